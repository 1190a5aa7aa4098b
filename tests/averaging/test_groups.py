"""Micro-groups: how parts are cut, and what the owner decides group by group, in thousands of
schedules."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.averaging.exchange.events import (
    Began,
    Ended,
    EndStream,
    Fail,
    Forgot,
    Kind,
    PeerFoundDead,
    Read,
    ReduceAndStep,
    Serve,
    Spoiled,
    StepFailed,
    Stepped,
    TimePassed,
    Uploaded,
    Wait,
)
from node.averaging.exchange.groups import LET_IN, contribute_until, micro_groups
from node.averaging.exchange.machine import RoundMachine
from node.core.ids import PeerId, RoundId
from tests.averaging import test_machine
from tests.averaging.test_machine import OPEN, R0, R1, A, B, C, D, feed

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


def test_groups_are_about_equal_and_no_more_than_needed():
    assert [len(g.names) for g in micro_groups({f"{i:02}": 10 for i in range(21)}, 200)] == [11, 10]
    assert len(micro_groups({f"{i:02}": 10 for i in range(20)}, 200)) == 1
    assert [len(g.names) for g in micro_groups({"a": 1, "b": 900, "c": 1}, 100)] == [1, 1, 1], (
        "a part too large goes alone"
    )
    assert micro_groups({}, 1) == ()
    with pytest.raises(ValueError, match="byte"):
        micro_groups({"a": 1}, 0)


def test_names_that_run_together_are_other_groups():
    (one,), (two,) = micro_groups({"a": 1, "bc": 1}, 9), micro_groups({"ab": 1, "c": 1}, 9)
    assert one.digest != two.digest


def test_contribution_deadlines_divide_the_time_among_groups():
    assert contribute_until(5.0, 10.0, 1) == (11.0,)
    assert contribute_until(0.0, 10.0, 4) == (6.0, 7.0, 8.0, 9.0)


# What the machine does with them


def test_a_window_of_groups_is_read_and_stepped_in_order():
    machine = RoundMachine()
    feed(machine, opened(members=(A, B)))
    assert feed(machine, *(began(i, B, i) for i in range(4))) == [
        Read(0),
        Read(1),
        Wait(2),
        Wait(3),
    ]
    assert feed(machine, Uploaded(0)) == [ReduceAndStep(R0, 0, ("p0",), (A, B), 15)]
    assert feed(machine, Uploaded(1)) == [], "the optimizer has one group at a time"
    assert feed(machine, Stepped(3, frozenset({"p0"}))) == [
        Serve(0, ("p0",)),
        Read(2),
        ReduceAndStep(R0, 1, ("p1",), (A, B), 15),
    ]
    assert feed(machine, Uploaded(2), Ended(0)) == []
    assert feed(machine, Stepped(3, frozenset({"p1"}))) == [
        Serve(1, ("p1",)),
        Read(3),
        ReduceAndStep(R0, 2, ("p2",), (A, B), 15),
    ]


def test_a_later_group_need_not_wait_for_an_earlier_one():
    machine = RoundMachine()
    feed(machine, opened())
    feed(
        machine,
        began(0, B, 0),
        began(1, C, 0),
        began(2, B, 1),
        began(3, C, 1),
        Uploaded(0),
        Uploaded(2),
    )
    assert feed(machine, Uploaded(3)) == [ReduceAndStep(R0, 1, ("p1",), (A, B, C), 20)]
    assert feed(machine, Stepped(3, frozenset({"p1"})), Ended(2), Ended(3)) == [
        Serve(2, ("p1",)),
        Serve(3, ("p1",)),
    ]
    assert feed(machine, Uploaded(1)) == [ReduceAndStep(R0, 0, ("p0",), (A, B, C), 20)]


def test_a_member_that_stops_is_left_out_of_later_groups_only():
    machine = RoundMachine()
    feed(machine, opened())
    feed(
        machine,
        began(0, B, 0),
        Uploaded(0),
        began(1, B, 1),
        began(2, C, 0),
        began(3, C, 1),
        Uploaded(2),
        Uploaded(3),
    )
    assert feed(machine, Stepped(3, frozenset({"p0"}))) == [Serve(0, ("p0",)), Serve(2, ("p0",))]
    assert feed(machine, Ended(1)) == [ReduceAndStep(R0, 1, ("p1",), (A, C), 15)]
    feed(machine, Stepped(3, frozenset({"p1"})), began(4, C, 2))
    assert feed(machine, Uploaded(4)) == [ReduceAndStep(R0, 2, ("p2",), (A, C), 15)], (
        "who has gone is not waited for again"
    )
    feed(machine, Stepped(3, frozenset({"p2"})), began(5, C, 3), began(6, B, 3), Uploaded(5))
    assert feed(machine, Uploaded(6)) == [ReduceAndStep(R0, 3, ("p3",), (A, B, C), 20)], (
        "who is back gives again"
    )


def test_a_member_that_breaks_off_a_group_is_awaited_in_others():
    machine = RoundMachine()
    feed(machine, opened(members=(A, B)))
    feed(machine, began(0, B, 0), began(1, B, 1))
    assert feed(machine, Ended(0)) == [ReduceAndStep(R0, 0, ("p0",), (A,), 10)]
    feed(machine, Stepped(3, frozenset({"p0"})))
    assert feed(machine, Uploaded(1)) == [ReduceAndStep(R0, 1, ("p1",), (A, B), 15)]


def test_silent_members_are_awaited_once_slow_ones_every_group():
    machine = RoundMachine()
    feed(machine, opened(members=(A, B, C, D)), began(0, B, 0), began(1, C, 0), Uploaded(0))
    assert feed(machine, TimePassed(), now=99.0) == []
    late = feed(machine, TimePassed(), now=100.0)
    assert late == [ReduceAndStep(R0, 0, ("p0",), (A, B), 15), Wait(1)], (
        "C is late, D has not said a word"
    )
    feed(
        machine,
        began(2, B, 1),
        Uploaded(2),
        began(3, C, 1),
        Stepped(3, frozenset({"p0"})),
        now=100.1,
    )
    assert feed(machine, TimePassed(), now=100.9) == []
    assert feed(machine, Uploaded(3), now=100.95) == [ReduceAndStep(R0, 1, ("p1",), (A, B, C), 20)]


def test_a_group_of_other_parts_is_refused_by_its_kind():
    machine, other = RoundMachine(), micro_groups({f"p{i}": 4 for i in range(5)}, 8)
    feed(machine, opened())
    for bad in (
        began(1, B, 0, digest="x"),
        began(2, B, 0, groups=other),
        replace(began(3, B, 0), group=5),
        began(4, B, 1, digest=FIVE[0].digest),
    ):
        (refused,) = feed(machine, bad)
        assert (refused.kind, refused.weight) == (Kind.GROUPS, 0.0)
    (refused,) = feed(machine, began(5, B, 0, tokens=0, digest="x"))
    assert refused.kind is Kind.GROUPS, "a listener's too"
    (refused,) = feed(machine, began(6, B, 0, names=("p0", "p1")))
    assert (refused.kind, refused.weight) == (Kind.HEADS, 1.0)


def test_a_fault_keeps_fresh_groups_and_a_repair_may_regroup():
    machine = RoundMachine()
    feed(machine, opened(members=(A, B)))
    feed(machine, began(0, B, 0), Uploaded(0), began(1, B, 1), Uploaded(1), began(2, B, 2))
    feed(machine, Stepped(3, frozenset({"p0"})))
    actions = feed(machine, StepFailed(3, frozenset({"p1"}), "broken"))
    assert [(a.stream, a.kind) for a in actions[:-1]] == [(1, Kind.FAILED), (2, Kind.FAILED)]
    assert actions[-1] == Fail(3, "broken")
    assert feed(machine, began(3, B, 3))[0].kind is Kind.FAILED
    assert feed(machine, began(4, B, 0)) == [Serve(4, ("p0",))], "what is fresh is served for ever"
    pairs = micro_groups({f"p{i}": 4 for i in range(5)} | {"q": 4}, 8)
    feed(machine, opened(pairs, R1, members=(A, B)))
    first = began(5, B, 0, pairs, R1, names=("p1",))
    assert feed(machine, first, Uploaded(5)) == [Read(5), ReduceAndStep(R1, 0, ("p1",), (A, B), 15)]
    assert feed(machine, Stepped(3, frozenset({"p1"}))) == [Serve(5, ("p1",))]
    assert feed(machine, began(6, B, 0, pairs, R1)) == [Serve(6, ("p0", "p1"))]


def test_a_step_running_when_an_attempt_opens_is_not_repeated():
    machine = RoundMachine()
    feed(
        machine, opened(members=(A, B)), began(0, B, 0), Uploaded(0), began(1, B, 1), began(2, B, 2)
    )
    pairs = micro_groups({f"p{i}": 4 for i in range(5)}, 8)
    actions = feed(machine, opened(pairs, R1, members=(A, B)))
    assert [(a.stream, a.kind) for a in actions] == [(1, Kind.SUPERSEDED), (2, Kind.SUPERSEDED)]
    feed(machine, began(3, B, 0, pairs, R1), began(4, B, 1, pairs, R1))
    assert feed(machine, Uploaded(3), Uploaded(4)) == []
    done = feed(machine, Stepped(3, frozenset({"p0"})))
    assert done == [Serve(0, ("p0",)), ReduceAndStep(R1, 0, ("p1",), (A, B), 15)]


# Schedules


class Schedule:
    """One owner with parts of several groups, three peers and a stranger that give, drop, retry and
    lie; every rule is checked as it goes."""

    def __init__(self, seed):
        self.dice = random.Random(seed)
        self.parts = {f"p{i}": self.dice.randint(1, 9) for i in range(self.dice.randint(1, 7))}
        self.machine, self.now = RoundMachine(), 0.0
        self.attempt, self.groups, self.fault = -1, {}, False
        self.streams, self.answered, self.ended = {}, {}, set()
        self.reading, self.given = set(), {}
        self.running, self.fresh, self.counts = None, set(), Counter()

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
        """Groups whose contributions are in memory: read now, or given and not stepped."""
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
        tokens = 0
        for peer in step.contributors:
            names = self.given[self.attempt, step.group, peer].names if peer != A else step.names
            assert set(step.names) <= set(names), "a contribution that does not cover the step"
            tokens += 10 if peer == A else 5
        assert step.tokens == tokens
        assert list(step.contributors) == sorted(set(step.contributors))
        self.given = {
            key: value for key, value in self.given.items() if key[:2] != (self.attempt, step.group)
        }
        self.running = step

    def open(self):
        self.attempt, self.fault = self.attempt + 1, False
        names = [n for n in self.parts if self.attempt == 0 or self.dice.random() < 0.8]
        names += [f"q{self.attempt}"] if self.dice.random() < 0.3 else []
        groups = self.groups[self.attempt] = micro_groups(
            {n: self.parts.get(n, 3) for n in names}, self.dice.randint(3, 20)
        )
        held, mine = self.fresh & set(names), self.dice.choice((0, 10))
        self.reading.clear()  # whoever is read is told so anew
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
        group, number = self.dice.choice(groups), len(self.streams)
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
        self.apply(head)

    def turn(self):
        """Something happens, or nothing."""
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
                names, self.running = frozenset(self.running.names), None
                self.apply(StepFailed(3, names, "x"))
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
        names, self.running = frozenset(self.running.names), None
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
        # Nobody says anything any more: time alone must end the attempt, in at most a deadline for
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
