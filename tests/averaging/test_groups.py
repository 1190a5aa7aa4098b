"""Micro-groups: how parts are cut, and what the owner decides group by group, in thousands of
schedules."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.averaging.exchange.events import (
    LET_IN,
    Began,
    Ended,
    EndStream,
    Fail,
    Forgot,
    Kind,
    Knocked,
    PeerFoundDead,
    Read,
    ReadHead,
    ReduceAndStep,
    Serve,
    Spoiled,
    Stepped,
    TimePassed,
    Uploaded,
    Wait,
    contribute_until,
    micro_groups,
)
from node.averaging.exchange.machine import RoundMachine
from node.core.ids import PeerId, RoundId
from tests.averaging import test_machine
from tests.averaging.test_machine import ANYTHING, OPEN, R0, R1, A, B, C, D, play

FIVE = micro_groups({f"p{i}": 4 for i in range(5)}, 4)


def opened(groups=FIVE, round_id=R0, members=(A, B, C), tokens=10, held=(), until=100.0, **changes):
    return replace(
        OPEN,
        round=round_id,
        members=frozenset(members),
        groups=groups,
        held=frozenset(held),
        tokens=tokens,
        contribute_by=tuple(until + i for i in range(len(groups))),
        **changes,
    )


def began(stream, peer, group, groups=FIVE, round_id=R0, tokens=5, **changes):
    names = changes.pop("names", groups[group].names)
    return test_machine.began(stream, peer, tokens, names, round_id, groups, group, **changes)


# How parts are cut

SIZES = st.dictionaries(st.text(max_size=3), st.integers(0, 50), max_size=30)


@given(SIZES, st.integers(1, 60), st.randoms())
def test_groups_hold_each_part_once_within_the_size_bound(sizes, most, dice):
    groups = micro_groups(sizes, most)
    assert [n for g in groups for n in g.names] == sorted(sizes)
    assert [g.index for g in groups] == list(range(len(groups)))
    assert all(g.names for g in groups)
    assert all(
        sum(sizes[n] for n in g.names) <= most or sum(sizes[n] > 0 for n in g.names) == 1
        for g in groups
    )
    shuffled = list(sizes.items())
    dice.shuffle(shuffled)
    assert micro_groups(dict(shuffled), most) == groups
    assert len({g.digest for g in groups}) == len(groups)


@pytest.mark.parametrize(
    ("sizes", "most", "lengths"),
    [
        ({f"{i:02}": 10 for i in range(21)}, 200, [11, 10]),
        ({f"{i:02}": 10 for i in range(20)}, 200, [20]),
        ({"a": 1, "b": 900, "c": 1}, 100, [1, 1, 1]),  # a part too large goes alone
        ({}, 1, []),
    ],
)
def test_groups_are_about_equal_and_no_more_than_needed(sizes, most, lengths):
    assert [len(g.names) for g in micro_groups(sizes, most)] == lengths


def test_names_that_run_together_are_other_groups():
    (one,) = micro_groups({"a": 1, "bc": 1}, 9)
    (two,) = micro_groups({"ab": 1, "c": 1}, 9)
    assert one.digest != two.digest


def test_contribution_deadlines_divide_the_time_among_groups():
    assert contribute_until(5.0, 10.0, 1) == (11.0,)
    assert contribute_until(0.0, 10.0, 4) == (6.0, 7.0, 8.0, 9.0)


# The machine with several groups in one attempt


def step(group, *by, **changes):
    return test_machine.step(*by, **{"group": group, "names": (f"p{group}",), **changes})


def done(group):
    return Stepped(3, frozenset({f"p{group}"}))


R2 = RoundId(3, 1, 2)
PAIRS = micro_groups({f"p{i}": 4 for i in range(5)}, 8)
MORE = micro_groups({f"p{i}": 4 for i in range(5)} | {"q": 4}, 8)

SCRIPTS = {
    "a window of groups is read and stepped in order": [
        (
            (opened(members=(A, B)), *(began(i, B, i) for i in range(4))),
            [Read(0), Read(1), Wait(2), Wait(3)],
        ),
        ((Uploaded(0),), [step(0, A, B)]),
        ((Uploaded(1),), []),  # the optimizer has one group at a time
        ((done(0),), [Serve(0, ("p0",)), Read(2), step(1, A, B)]),
        ((Uploaded(2), Ended(0)), []),
        ((done(1),), [Serve(1, ("p1",)), Read(3), step(2, A, B)]),
    ],
    "a later group need not wait for an earlier one": [
        ((opened(), *(began(i, "bc"[i % 2], i // 2) for i in range(4))), ANYTHING),
        ((Uploaded(0), Uploaded(2)), []),
        ((Uploaded(3),), [step(1, A, B, C)]),
        ((done(1), Ended(2), Ended(3)), [Serve(2, ("p1",)), Serve(3, ("p1",))]),
        ((Uploaded(1),), [step(0, A, B, C)]),
    ],
    "a member that stops is left out of later groups only": [
        ((opened(), began(0, B, 0), Uploaded(0), began(1, B, 1)), ANYTHING),
        ((began(2, C, 0), began(3, C, 1), Uploaded(2), Uploaded(3)), ANYTHING),
        ((done(0),), [Serve(0, ("p0",)), Serve(2, ("p0",))]),
        ((Ended(1),), [step(1, A, C)]),
        ((done(1), began(4, C, 2)), ANYTHING),
        ((Uploaded(4),), [step(2, A, C)]),  # nobody waits again for C, which has gone
        ((done(2), began(5, C, 3), began(6, B, 3), Uploaded(5)), ANYTHING),
        ((Uploaded(6),), [step(3, A, B, C)]),  # C, back again, contributes again
    ],
    "a member that breaks off a group is awaited in others": [
        ((opened(members=(A, B)), began(0, B, 0), began(1, B, 1)), [Read(0), Read(1)]),
        ((Ended(0),), [step(0, A)]),
        ((done(0),), ANYTHING),
        ((Uploaded(1),), [step(1, A, B)]),
    ],
    "a member that gives a group again after it broke off is awaited there": [
        ((opened(), began(1, B, 0), began(2, B, 1), Ended(1)), [Read(1), Read(2)]),
        ((began(3, B, 0), began(4, C, 0), Uploaded(4)), [Read(3), Read(4)]),
        ((Uploaded(3),), [step(0, A, B, C)]),
    ],
    "the end of a stream of the attempt before is no absence in this one": [
        ((opened(members=(A, B)), began(0, B, 0), Uploaded(0)), [Read(0), step(0, A, B)]),
        ((opened(PAIRS, R1, members=(A, B)), began(1, B, 0, PAIRS, R1)), [Read(1)]),
        ((Ended(0), done(0)), []),
        ((Uploaded(1),), [step(0, A, B, round_id=R1, names=("p1",))]),
    ],
    "a contribution to parts that are held or stepped meanwhile is read no further": [
        ((opened(members=(A, B)), began(0, B, 1), Uploaded(0)), [Read(0), step(1, A, B)]),
        ((opened(PAIRS, R1, members=(A, B)), began(1, B, 0, PAIRS, R1)), [Read(1)]),
        ((opened(PAIRS, R2, members=(A, B), held=("p0",)),), [Wait(1)]),
        ((done(1),), [Serve(0, ("p1",)), Serve(1, ("p0", "p1"))]),
    ],
    "silent members are awaited once, slow ones in every group": [
        (
            (opened(members=(A, B, C, D)), began(0, B, 0), began(1, C, 0), Uploaded(0)),
            [Read(0), Read(1)],
        ),
        ((99.0, TimePassed()), []),
        # C is late, D has not said a word
        ((100.0, TimePassed()), [step(0, A, B), Wait(1)]),
        ((100.1, began(2, B, 1), Uploaded(2), began(3, C, 1), done(0)), ANYTHING),
        ((100.9, TimePassed()), []),
        ((100.95, Uploaded(3)), [step(1, A, B, C)]),
    ],
    "a member that is late with one group is awaited in those it has begun": [
        ((opened(), *(began(i, "bc"[i % 2], i // 2) for i in range(4))), ANYTHING),
        ((Uploaded(0), Uploaded(2), 100.0, TimePassed()), [step(0, A, B), Wait(1)]),
        ((100.1, done(0)), [Serve(0, ("p0",)), Serve(1, ("p0",))]),
        ((100.1, Uploaded(3)), [step(1, A, B, C)]),
    ],
    "a fault keeps fresh groups and a repair may regroup": [
        ((opened(members=(A, B)), began(0, B, 0), Uploaded(0)), ANYTHING),
        ((began(1, B, 1), Uploaded(1), began(2, B, 2), done(0)), ANYTHING),
        (
            (Stepped(3, frozenset({"p1"}), "broken"),),
            [(1, Kind.FAILED), (2, Kind.FAILED), Fail(3, "broken")],
        ),
        ((began(3, B, 3),), [(3, Kind.FAILED)]),
        ((began(4, B, 0),), [Serve(4, ("p0",))]),  # a fresh group is served for ever
        ((opened(MORE, R1, members=(A, B)),), ANYTHING),
        (
            (began(5, B, 0, MORE, R1, names=("p1",)), Uploaded(5)),
            [Read(5), step(0, A, B, round_id=R1, names=("p1",))],
        ),
        ((done(1),), [Serve(5, ("p1",))]),
        ((began(6, B, 0, MORE, R1),), [Serve(6, ("p0", "p1"))]),
    ],
    "a listener of other groups is refused": [
        ((opened(), began(1, B, 0, tokens=0, digest="x")), [(1, Kind.GROUPS)]),
    ],
    "a step running when an attempt opens is not repeated": [
        ((opened(members=(A, B)), began(0, B, 0), Uploaded(0)), [Read(0), step(0, A, B)]),
        ((began(1, B, 1), began(2, B, 2)), ANYTHING),
        (
            (opened(PAIRS, R1, members=(A, B)),),
            [(1, Kind.SUPERSEDED), (2, Kind.SUPERSEDED)],
        ),
        ((began(3, B, 0, PAIRS, R1), began(4, B, 1, PAIRS, R1)), ANYTHING),
        ((Uploaded(3), Uploaded(4)), []),
        ((done(0),), [Serve(0, ("p0",)), step(0, A, B, round_id=R1, names=("p1",))]),
    ],
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_an_owner_decides_group_by_group_as_its_script_says(name):
    play(RoundMachine(), SCRIPTS[name])


# Schedules


class Schedule:
    """One owner with parts of several groups, three peers and a stranger that give, drop, retry and
    lie; every rule is checked as it goes."""

    def __init__(self, seed):
        self.dice = random.Random(seed)
        self.parts = {f"p{i}": self.dice.randint(1, 9) for i in range(self.dice.randint(1, 7))}
        self.machine = RoundMachine()
        self.now = 0.0
        self.attempt = -1
        self.groups = {}
        self.fault = False
        self.streams = {}
        self.answered = {}
        self.ended = set()
        self.reading = set()
        self.given = {}
        self.running = None
        self.fresh = set()
        self.counts = Counter()

    def apply(self, event):
        for action in self.machine.handle(event, self.now):
            self.counts[type(action).__name__] += 1
            match action:
                case ReduceAndStep():
                    self.stepped(action)
                case Serve(number, names) | EndStream(number, names):
                    assert number not in self.answered
                    assert number not in self.ended, "an answer to nobody"
                    self.answered[number] = action
                    self.reading.discard(number)
                    if isinstance(action, Serve):
                        assert set(names) <= self.fresh
                        wanted = self.streams[number]
                        group = self.groups[wanted.round.attempt][wanted.group]
                        assert set(names) == set(wanted.names or group.names)
                case ReadHead(number):
                    self.apply(self.streams[number])
                case Read(number):
                    self.reading.add(number)
                case Wait(number):
                    self.reading.discard(number)
                case Fail():
                    self.fault = True
        assert len({g for g in self.held_groups()}) <= LET_IN, (
            "more groups in memory than the window"
        )

    def held_groups(self):
        """Groups whose contributions are in memory: read now, or uploaded and not yet stepped."""
        yield from (self.streams[n].group for n in self.reading)
        yield from (group for attempt, group, _ in self.given if attempt == self.attempt)
        if self.running is not None and self.running.round.attempt == self.attempt:
            yield self.running.group

    def stepped(self, step):
        assert self.running is None, "two steps at once"
        assert not self.fault, "a step after the first fault"
        assert step.round.attempt == self.attempt
        assert not set(step.names) & self.fresh, "stepped twice"
        assert step.names
        assert set(step.names) == set(self.groups[self.attempt][step.group].names) - self.fresh
        for peer in step.contributors:
            names = self.given[self.attempt, step.group, peer].names if peer != A else step.names
            assert set(step.names) <= set(names), "a contribution that does not cover the step"
        assert list(step.contributors) == sorted(set(step.contributors))
        self.given = {
            key: value for key, value in self.given.items() if key[:2] != (self.attempt, step.group)
        }
        self.running = step

    def open(self):
        self.attempt = self.attempt + 1
        self.fault = False
        names = [n for n in self.parts if self.attempt == 0 or self.dice.random() < 0.8]
        names += [f"q{self.attempt}"] if self.dice.random() < 0.3 else []
        groups = self.groups[self.attempt] = micro_groups(
            {n: self.parts.get(n, 3) for n in names}, self.dice.randint(3, 20)
        )
        held = self.fresh & set(names)
        mine = self.dice.choice((0, 10))
        self.reading.clear()  # the machine asks anew for each stream to be read
        listeners = frozenset({D}) if self.dice.random() < 0.3 else frozenset()
        self.apply(
            opened(
                groups,
                RoundId(3, 1, self.attempt),
                (A, B, C, D),
                mine,
                held,
                self.now + 50,
                listeners=listeners,
            )
        )

    def begin(self):
        attempt = self.attempt + (self.dice.random() < 0.1) - (self.dice.random() < 0.1)
        groups = self.groups.get(attempt) or FIVE
        group = self.dice.choice(groups)
        number = len(self.streams)
        names = (
            group.names
            if self.dice.random() < 0.9
            else tuple(self.dice.sample(group.names, self.dice.randint(0, len(group.names))))
        )
        tokens = 5 if names and self.dice.random() < 0.85 else 0
        digest = group.digest if self.dice.random() < 0.97 else "other"
        peer = PeerId(self.dice.choice("bcdbcdx"))
        head = Began(
            number,
            peer,
            RoundId(3, 1, max(0, attempt)),
            "plan",
            "own",
            group.index,
            digest,
            tokens,
            names if tokens else (),
        )
        self.streams[number] = head
        self.apply(Knocked(number, peer, head.round, head.plan_hash))

    def turn(self):
        """Take one random step, which may be none."""
        read = sorted(self.reading)
        live = [n for n in self.streams if n not in self.ended]
        match self.dice.choices(
            ("begin", "upload", "step", "end", "tick", "gone", "spoil", "fail", "open"),
            (30, 40, 25, 6, 4, 1, 1, 1, 1),
        )[0]:
            case "begin":
                self.begin()
            case "upload" if read:
                self.upload(self.dice.choice(read))
            case "step" if self.running:
                self.finish()
            case "fail" if self.running:
                names = frozenset(self.running.names)
                self.running = None
                self.apply(Stepped(3, names, "x"))
            case "end" if live:
                number = self.dice.choice(live)
                self.ended.add(number)
                self.reading.discard(number)
                self.apply(Ended(number))
            case "tick":
                self.now += self.dice.choice((1, 20))
                self.apply(TimePassed())
            case "gone":
                self.apply(PeerFoundDead(PeerId(self.dice.choice("bcd"))))
            case "spoil" if read:
                number = self.dice.choice(read)
                self.apply(Spoiled(number, Kind.VALUES, "x"))
            case "open" if self.attempt < 3:
                self.open()

    def upload(self, number):
        head = self.streams[number]
        self.reading.discard(number)
        self.given[head.round.attempt, head.group, head.peer] = head
        self.apply(Uploaded(number))

    def finish(self):
        names = frozenset(self.running.names)
        self.running = None
        self.fresh |= names
        self.apply(Stepped(3, names))

    def play(self):
        self.open()
        for _ in range(self.dice.randint(5, 120)):
            self.turn()
        over = self.dice.random() < 0.1
        if over:  # in the middle of it all
            self.apply(Forgot(3))
            self.begin()
        # Nobody sends anything any more: time alone must end the attempt, in at most a deadline for
        # each group.
        for _ in range(len(self.groups[self.attempt]) + 1):
            self.now += 1000
            self.apply(TimePassed())
            if self.running:
                self.finish()
        mine = {n for g in self.groups[self.attempt] for n in g.names}
        assert over or self.fault or mine <= self.fresh, "the attempt hangs"
        self.apply(Forgot(3))
        assert self.answered.keys() | self.ended == self.streams.keys(), "somebody hangs"
        return self.counts


def test_thousands_of_schedules_break_no_rule():
    counts = Counter()
    for seed in range(2000):
        try:
            counts += Schedule(seed).play()
        except AssertionError as error:
            error.add_note(f"seed {seed}")
            raise
    kinds = ("ReduceAndStep", "Serve", "EndStream", "Fail", "Read", "Wait")
    assert min(counts[k] for k in kinds) > 200, counts
