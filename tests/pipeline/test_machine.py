"""Swarms of real machines and no network: everything that can happen next is drawn at random, and one thing goes wrong."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.core.ids import PeerId
from node.core.journey import Hop, Member, Path, Plan
from node.pipeline import events as ev
from node.pipeline.delivery import Trouble
from node.pipeline.events import Key, Say, Way
from node.pipeline.machine import PipelineMachine

ORIGIN = PeerId("s0a")
STAGES = 3


def make_plan(batches: int, replicas: int) -> Plan:
    peers = {s: [PeerId(f"s{s}{'abc'[r]}") for r in range(replicas)] for s in range(1, STAGES + 1)}
    members = (Member(ORIGIN, 0), *(Member(p, s) for s, ps in peers.items() for p in ps))
    paths = tuple(
        Path(i, ORIGIN, (i,), tuple(Hop(s, ps[(i + s) % replicas]) for s, ps in peers.items())) for i in range(batches)
    )
    return Plan(3, 1, ORIGIN, members, paths, {})


@dataclass
class World:
    """Carries out actions as the service does, in an order that ``dice`` chooses."""

    plan: Plan
    dice: random.Random
    capacity: int = 99
    breaks: int = -1
    """The receipt that gets lost, counted from 0; -1 for none."""
    machines: dict[PeerId, PipelineMachine] = field(default_factory=dict)
    dead: set[PeerId] = field(default_factory=set)
    todo: list = field(default_factory=list)
    attempts: dict = field(default_factory=dict)
    streams: dict = field(default_factory=dict)
    waiting: dict = field(default_factory=dict)
    stash: Counter = field(default_factory=Counter)
    commits: Counter = field(default_factory=Counter)
    ended: dict[int, list[str]] = field(default_factory=dict)
    receipts: int = 0
    now: float = 0.0

    def __post_init__(self) -> None:
        for member in self.plan.members:
            self.machines[member.peer] = PipelineMachine(member.peer)
            self.tell(member.peer, ev.Adopt(self.plan))
        for path in self.plan.paths:
            self.tell(path.origin, ev.Start(path.index))

    def tell(self, peer: PeerId, event: ev.Event) -> ev.Answer | None:
        answer = None
        if peer in self.dead:
            return None
        for action in self.machines[peer].handle(event, self.now):
            if isinstance(action, ev.Answer):
                assert answer is None
                answer = action
            else:
                self.act(peer, action)
        return answer

    def later(self, peer: PeerId, event: ev.Event) -> None:
        self.todo.append(lambda: self.tell(peer, event))

    def act(self, me: PeerId, action: ev.Action) -> None:
        match action:
            case ev.Compute(key, way):
                self.later(me, ev.Computed(key, way))
            case ev.Later(key, way, _):
                self.attempts[me, key, way] = self.attempts.get((me, key, way), 0) + 1
                self.later(me, ev.Retry(key, way))
            case ev.Send():
                number = self.attempts[me, action.key, action.way] = self.attempts.get((me, action.key, action.way), 0) + 1
                self.todo.append(lambda: self.arrive(me, action, number))
            case ev.Fetch(key, peers):
                self.todo.append(lambda: self.fetch(me, key, list(peers)))
            case ev.Commit(key):
                stage = self.machines[me].visits[key].journey[key.position].stage
                self.commits[key.index, stage, me] += 1
            case ev.Told(key, way) | ev.Failed(key, way, _):
                for done in self.waiting.pop((me, key, way), []):
                    done(isinstance(action, ev.Told))
            case ev.TellOrigin(key, origin, reason):
                self.later(origin, ev.Lost(key.epoch, self.plan.hash, key.index, me, reason))
            case ev.Free(key):
                self.stash[me] -= 1 if key.position else 0
                for way in Way:
                    for done in self.waiting.pop((me, key, way), []):
                        done(False)
            case ev.Finished(index):
                self.ended.setdefault(index, []).append("finished")
            case ev.Dropped(index, _):
                self.ended.setdefault(index, []).append("dropped")

    def back(self, sender: PeerId, send: ev.Send, number: int, event: ev.Event) -> None:
        """A receipt on its way, in order with the others of its stream; only the attempt under way listens."""
        stream = self.streams.setdefault((sender, send.key, send.way, number), [])

        def arrive() -> None:
            event = stream.pop(0)
            if self.attempts.get((sender, send.key, send.way)) != number:
                return
            self.receipts += 1
            if self.receipts - 1 == self.breaks:
                self.attempts[sender, send.key, send.way] += 1
                self.tell(sender, ev.Turned(send.key, send.way, send.peer, Trouble.FAILED))
                return
            self.tell(sender, event)

        stream.append(event)
        self.todo.append(arrive)

    def turned(self, sender: PeerId, send: ev.Send, number: int, trouble: Trouble) -> None:
        self.back(sender, send, number, ev.Turned(send.key, send.way, send.peer, trouble))

    def arrive(self, sender: PeerId, send: ev.Send, number: int) -> None:
        peer, claim = send.peer, ev.Claim(3, self.plan.hash, send.key.index, send.journey, send.position)
        if sender in self.dead or self.attempts.get((sender, send.key, send.way)) != number:
            return
        if peer in self.dead:
            return self.turned(sender, send, number, Trouble.FAILED)
        answer = self.tell(peer, ev.Arrived(send.way, claim, sender, self.stash[peer] < self.capacity))
        assert answer is not None
        if answer.say is Say.TAKE:
            self.stash[peer] += 1 if send.way is Way.FORWARD else 0
            return self.todo.append(lambda: self.held(sender, send, number, claim))
        self.answer(sender, send, number, claim, answer)

    def held(self, sender: PeerId, send: ev.Send, number: int, claim: ev.Claim) -> None:
        if send.peer in self.dead:
            return self.turned(sender, send, number, Trouble.FAILED)
        answer = self.tell(send.peer, ev.Held(send.way, claim, sender))
        assert answer is not None
        if answer.say is not Say.TAKE and send.way is Way.FORWARD:
            self.stash[send.peer] -= 1
        self.answer(sender, send, number, claim, answer)

    def answer(self, sender: PeerId, send: ev.Send, number: int, claim: ev.Claim, answer: ev.Answer) -> None:
        done = ev.Settled(send.key, send.way, send.peer)
        if answer.say in (Say.TAKE, Say.AGAIN):

            def finished(ok: bool) -> None:
                if ok:
                    self.back(sender, send, number, done)
                else:
                    self.turned(sender, send, number, Trouble.REFUSED)

            def accepted() -> None:
                self.back(sender, send, number, ev.Passed(send.key, send.way, send.peer))
                if send.peer in self.dead:
                    self.turned(sender, send, number, Trouble.FAILED)
                elif self.machines[send.peer].told(claim.key, send.way):
                    finished(True)
                elif claim.key not in self.machines[send.peer].visits:
                    finished(False)
                else:
                    self.waiting.setdefault((send.peer, claim.key, send.way), []).append(finished)
                    self.waiting.setdefault(send.peer, []).append(lambda: self.turned(sender, send, number, Trouble.FAILED))

            return accepted()
        if answer.say is Say.SETTLED:
            return self.back(sender, send, number, done)
        self.turned(sender, send, number, {Say.BUSY: Trouble.BUSY}.get(answer.say, Trouble.REFUSED))

    def fetch(self, me: PeerId, key: Key, peers: list[PeerId]) -> None:
        for peer in peers:
            answer = self.tell(peer, ev.Asked(key.epoch, self.plan.hash, key.index, key.position, me))
            if answer is not None and answer.say is Say.TAKE:
                self.later(me, ev.Fetched(key, peer))
                return
            if answer is not None and answer.say is Say.SETTLED:
                self.later(me, ev.NotFetched(key, True))
                return
        self.later(me, ev.NotFetched(key, False))

    def kill(self, peer: PeerId) -> None:
        self.dead.add(peer)
        for done in self.waiting.pop(peer, []):
            done()

    def step(self) -> bool:
        if not self.todo:
            return False
        self.now += 0.1
        self.todo.pop(self.dice.randrange(len(self.todo)))()
        return True

    def run(self, victim: PeerId | None = None, after: int = 0) -> None:
        steps = 0
        while True:
            if victim is not None and steps == after:
                self.kill(victim)
            if not self.step():
                break
            steps += 1
            assert steps < 20_000, "it never ends"
        if victim is not None and victim not in self.dead:
            self.kill(victim)

    def counted(self, index: int, stage: int) -> list[PeerId]:
        return [p for (i, s, p), n in self.commits.items() for _ in range(n) if (i, s) == (index, stage)]

    def check(self, everything_finishes: bool) -> None:
        for path in self.plan.paths:
            ends = self.ended.get(path.index, [])
            assert len(ends) == 1, f"micro-batch {path.index} ended {ends}"
            if everything_finishes:
                assert ends == ["finished"]
            for stage in range(STAGES + 1):
                by = self.counted(path.index, stage)
                assert len([p for p in by if p not in self.dead]) <= 1, f"{path.index} counts twice at stage {stage}: {by}"
                if ends == ["finished"] and stage not in {
                    int(p[1]) for p in self.dead
                }:  # the dead take what they counted along
                    assert by, f"{path.index} counts nowhere at stage {stage}"
            assert len(self.counted(path.index, 0)) == (ends == ["finished"])


seeds = st.integers(0, 2**32)
VICTIMS = [PeerId(f"s{s}{r}") for s in range(1, STAGES + 1) for r in "ab"]


@settings(max_examples=60, deadline=None)
@given(seeds, st.integers(1, 4), st.integers(1, 3))
def test_without_faults_everything_counts_once_everywhere(seed, batches, replicas):
    world = World(make_plan(batches, replicas), random.Random(seed))
    world.run()
    world.check(everything_finishes=True)
    assert all(n == 1 for n in world.commits.values())


@settings(max_examples=120, deadline=None)
@given(seeds, st.integers(1, 3), st.sampled_from(VICTIMS), st.integers(0, 120))
def test_any_one_peer_may_die_at_any_moment(seed, batches, victim, after):
    world = World(make_plan(batches, 2), random.Random(seed))
    world.run(victim, after)
    world.check(everything_finishes=True)


@settings(max_examples=120, deadline=None)
@given(seeds, st.integers(1, 3), st.integers(0, 80))
def test_any_one_receipt_may_get_lost(seed, batches, breaks):
    world = World(make_plan(batches, 2), random.Random(seed), breaks=breaks)
    world.run()
    world.check(everything_finishes=True)


@settings(max_examples=60, deadline=None)
@given(seeds, st.sampled_from(VICTIMS), st.integers(0, 120))
def test_a_full_stash_only_delays(seed, victim, after):
    world = World(make_plan(4, 2), random.Random(seed), capacity=1)
    world.run()
    world.check(everything_finishes=True)


@settings(max_examples=50, deadline=None)
@given(seeds, st.integers(1, 3), st.integers(0, 60))
def test_a_stage_that_dies_out_ends_every_micro_batch_once(seed, stage, after):
    world = World(make_plan(3, 1), random.Random(seed))
    world.run(PeerId(f"s{stage}a"), after)
    world.check(everything_finishes=False)


def test_an_expired_entry_makes_way_and_is_fetched_again_when_its_gradient_comes():
    plan = make_plan(1, 1)
    machine = PipelineMachine(PeerId("s2a"))
    machine.handle(ev.Adopt(plan), 0.0)
    journey = plan.paths[0].journey
    forward = ev.Claim(3, plan.hash, 0, journey, 2)
    machine.handle(ev.Held(Way.FORWARD, forward, PeerId("s1a")), 0.0)
    machine.handle(ev.Computed(forward.key, Way.FORWARD), 0.0)
    assert machine.handle(ev.Expired(forward.key), 9.0)[-1] == ev.Free(forward.key)
    actions = machine.handle(ev.Held(Way.BACKWARD, forward, PeerId("s3a")), 9.0)
    assert actions == [ev.Answer(Say.TAKE), ev.Fetch(forward.key, (PeerId("s1a"),))]
    assert machine.handle(ev.Expired(forward.key), 99.0) == []


@pytest.mark.parametrize("close", [ev.Close(3), ev.Adopt(None)])
def test_closing_ends_the_origins_micro_batches_once_and_refuses_the_rest(close):
    plan = make_plan(2, 1)
    machine = PipelineMachine(ORIGIN)
    machine.handle(ev.Adopt(plan), 0.0)
    machine.handle(ev.Start(0), 0.0)
    dropped = [a.index for a in machine.handle(close, 1.0) if isinstance(a, ev.Dropped)]
    assert dropped == [0]
    assert machine.handle(close, 1.0) == []
    (late,) = machine.handle(ev.Start(1), 1.0)
    assert isinstance(late, ev.Dropped)
    home = ev.Claim(3, plan.hash, 0, plan.paths[0].journey, 4)
    (answer,) = machine.handle(ev.Held(Way.FORWARD, home, PeerId("s3a")), 1.0)
    assert isinstance(answer, ev.Answer)
    assert answer.say in (Say.REFUSED, Say.AWAIT_PLAN)
