"""The epoch's two machines against each other: many peers, virtual time, random delays, deaths and
returns.

Rounds, pipelines and parameters are fakes here: a part's value is a hash of what went into it, so
that two peers hold equal values only when the same owner's step reached both.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from node.core.ids import ENDS, PeerId
from node.core.journey import Plan, Version
from node.training.leader.leader import Leader, Phase
from node.training.member import Member, MemberState
from node.training.protocol import events as ev
from node.training.protocol.facts import Waits
from tests.training.run_facts import facts

PARTS = {s: [f"s{s}.p{i}" for i in range(3)] for s in range(4)}
BATCH, MICRO = 16, 4


def assign(stage: int, cell: Any, previous: Any) -> dict[str, PeerId]:
    """Sticky round robin: enough to move parts when somebody dies."""
    peers = sorted(p for p, _ in cell)
    old = {k: v for k, v in (previous or {}).items() if v in peers}
    return {part: old.get(part, peers[i % len(peers)]) for i, part in enumerate(PARTS[stage])}


@dataclass
class Peer:
    name: PeerId
    stage: int
    member: Member
    values: dict[str, str]
    leader: Leader | None = None
    alive: bool = True
    paused_until: float = 0.0
    before: dict[str, str] | None = None
    fresh: dict[str, str] = field(default_factory=dict)
    stepped: dict[str, str] = field(default_factory=dict)
    round: ev.RoundArrived | None = None
    came: set[PeerId] = field(default_factory=set)
    waiting: list[tuple[PeerId, int]] = field(default_factory=list)
    failed: set[PeerId] = field(default_factory=set)
    late: bool = False

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(sorted(self.values.items())).encode()).hexdigest()[:12]


class Swarm:
    """A swarm in virtual time. ``log`` keeps every report of every leader."""

    def __init__(self, seed: int, ends: int = 1, replicas: int = 2, **kw: Any) -> None:
        self.rng, self.now, self.queue, self.count = random.Random(seed), 0.0, [], itertools.count()
        self.facts = facts(
            **{
                "stages": 3,
                "epochs": 12,
                "target_batch": BATCH,
                "eval_every": 5,
                "late_s": Waits.late_s,
                "assign": assign,
            }
            | kw
        )
        self.log: list[ev.RecordFact] = []
        self.plans: dict[tuple[int, int], str] = {}
        self.speeds: dict[PeerId, float] = {}
        self.visited: dict[int, set[PeerId]] = {}
        self.counted: dict[int, set[int]] = {}
        self.peers: dict[PeerId, Peer] = {}
        for stage in range(4):
            for i in range(ends if stage == ENDS else replicas):
                self.add(PeerId(f"peer{stage}{i}"), stage)

    # ---- the world

    def at(self, delay: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.queue, (self.now + delay, next(self.count), what))

    def add(self, name: PeerId, stage: int) -> None:
        values = {part: "0" for part in PARTS[stage]}
        self.peers[name] = peer = Peer(name, stage, Member(name, Version(0)), values)
        self.at(self.rng.random(), lambda: self.beat(peer))

    def kill(self, name: PeerId) -> None:
        self.peers[name].alive = False

    def up(self, peer: Peer) -> bool:
        return self.peers.get(peer.name) is peer and peer.alive and self.now >= peer.paused_until

    def run(self, until: float) -> None:
        while self.queue and self.queue[0][0] <= until:
            self.now, _, what = heapq.heappop(self.queue)
            what()
            self.check()

    def call(
        self, to: PeerId, what: Callable[[Peer], Any], failed: Callable[[], None] = lambda: None
    ) -> None:
        """A message: arrives after a random delay, or is found undeliverable after a while."""

        def arrive() -> None:
            peer = self.peers.get(to)
            if peer is None or not peer.alive:
                self.at(0.05, failed)
            elif self.now < peer.paused_until:
                self.at(1.5, failed)
            else:
                what(peer)

        self.at(self.rng.uniform(0.001, 0.05), arrive)

    # ---- one peer's service

    def leading(self) -> PeerId:
        return min(p.name for p in self.peers.values() if p.stage == ENDS and p.alive)

    def beat(self, peer: Peer) -> None:
        if self.peers.get(peer.name) is not peer or not peer.alive:
            return
        self.at(1.0, lambda: self.beat(peer))
        if self.now < peer.paused_until:
            return
        chief = self.leading()
        if peer.name == chief and peer.leader is None:
            m = peer.member
            peer.leader = Leader(
                peer.name, self.facts, term=m.term, history=m.plan, dropped=m.dropped
            )
        elif peer.name != chief:
            peer.leader = None
        if peer.leader is not None:
            self.lead(peer, ev.ClockTick())
        m = peer.member
        speed = self.speeds.get(peer.name, 1.0)
        heard = ev.Heartbeat(
            peer.name, peer.stage, m.at, peer.digest, speed, m.reachable, m.term, m.tokens
        )
        if chief == peer.name:
            self.lead(peer, heard)
        else:
            self.call(chief, lambda p: self.lead(p, heard))

    def lead(self, peer: Peer, event: Any) -> None:
        if peer.leader is None or not self.up(peer):
            return
        for a in peer.leader.handle(event, self.now):
            match a:
                case ev.SendPlan(plan):
                    assert self.plans.setdefault((plan.epoch, plan.term), plan.hash) == plan.hash
                    assert Plan.parse(plan.canonical()).hash == plan.hash
                    self.visited[plan.epoch] = {h.peer for p in plan.paths for h in p.hops}
                    for m in plan.members:
                        self.tell(peer, m.peer, ev.PlanArrived(plan))
                case ev.SendRound():
                    r = ev.RoundArrived(
                        peer.name,
                        a.plan.epoch,
                        a.plan.term,
                        a.plan.hash,
                        a.attempt,
                        a.dead,
                        a.owners,
                        a.sources,
                        a.dropped,
                        a.deadline_s,
                        a.digest,
                        a.tokens,
                    )
                    for to in a.to:
                        self.tell(peer, to, r)
                case ev.ProbePeer(who):
                    self.probe(peer, who)
                case ev.Evaluate(epoch, _):
                    self.at(0.1, lambda: self.lead(peer, ev.Evaluated(epoch, 2.0)))
                case ev.RecordFact():
                    self.log.append(a)

    def probe(self, chief: Peer, who: PeerId) -> None:
        began = self.now

        def answers(p: Peer) -> None:
            self.call(
                chief.name,
                lambda c: self.lead(c, ev.ProbeAnswered(who, self.leading() == chief.name)),
            )

        self.call(who, answers, lambda: self.lead(chief, ev.Unreachable(who, began)))

    def tell(self, chief: Peer, to: PeerId, event: Any) -> None:
        def deliver(p: Peer) -> None:
            if self.happens(p, event) is not None:
                self.call(chief.name, lambda c: self.lead(c, ev.Unreachable(to)))

        self.call(to, deliver, lambda: self.lead(chief, ev.Unreachable(to)))

    def happens(self, peer: Peer, event: Any) -> str | None:
        queue, refused = [event], None
        while queue:
            for a in peer.member.handle(queue.pop(0), self.now):
                follow = self.act(peer, a)
                if isinstance(a, ev.RefuseCaller):
                    refused = a.reason
                elif follow is not None:
                    queue.append(follow)
        return refused

    def act(self, peer: Peer, a: Any) -> Any:
        match a:
            case ev.GoTo(_, "roll-back"):
                assert peer.before is not None
                peer.values, peer.before, peer.stepped = peer.before, None, {}
            case ev.Settle():
                peer.before = None
            case ev.BeginEpoch(plan, listener):
                peer.fresh, peer.stepped, peer.round = {}, {}, None
                if peer.stage == ENDS and not listener:
                    for path in (p for p in plan.paths if p.origin == peer.name):
                        self.at(
                            self.rng.uniform(0.05, 0.5),
                            lambda path=path: self.micro_batch(peer, plan, path),
                        )
            case ev.StartRound():
                self.exchange(peer, a)
            case ev.CopyFrom(plan, r):
                self.copy(peer, plan, r)
            case ev.AdoptParts(plan, ended):
                peer.before, peer.values = peer.values, dict(peer.fresh)
                return ev.Adopted(plan.epoch, plan.term, ended.attempt, peer.digest, 1)
            case ev.TellCommitted(plan, attempt, digest):
                self.call(
                    plan.leader,
                    lambda p: self.lead(p, ev.Committed(peer.name, plan.hash, attempt, digest)),
                )
            case ev.TellIncomplete(plan, e):
                for about in e.failed:
                    self.call(
                        plan.leader,
                        lambda p, about=about: self.lead(p, ev.Accused(about, peer.name, "silent")),
                    )
                note = ev.Incomplete(peer.name, plan.hash, e.attempt, e.holds, e.failed)
                self.call(plan.leader, lambda p: self.lead(p, note))
        return None

    def micro_batch(self, peer: Peer, plan: Plan, path: Any) -> None:
        if (
            not self.up(peer)
            or peer.member.plan is not plan
            or peer.member.state is not MemberState.RUN
        ):
            return
        counted = all(
            any(self.peers[m.peer].alive for m in plan.stage(h.stage) if m.current)
            for h in path.hops
        )
        result = ev.MicroBatchResult(path.index, counted, 2.0 * MICRO, MICRO)
        self.call(
            plan.leader,
            lambda p: self.lead(p, ev.MicroBatchesReported(peer.name, plan.hash, (result,))),
        )

    # ---- a fake round: parts are hashes, an owner steps each part once per epoch

    def exchange(self, peer: Peer, a: ev.StartRound) -> None:
        r, plan = a.round, a.plan
        peer.round, peer.came, peer.waiting, peer.failed, peer.late = (
            r,
            {peer.name},
            [],
            set(),
            False,
        )
        owners = {p: r.owners.get(p, plan.owners[p]) for p in PARTS[peer.stage]}
        for owner in sorted(set(owners.values()) - {peer.name}):
            mine = [p for p, o in owners.items() if o == owner]

            def ask(o: Peer, mine: list[str] = mine) -> None:
                self.contribute(o, peer.name, r, mine)

            self.call(owner, ask, lambda owner=owner: self.no_answer(peer, plan, r, owner))
        self.at(r.deadline_s * 0.6, lambda: self.step(peer, plan, r, owners, late=True))
        self.at(r.deadline_s, lambda: self.round_over(peer, plan, r, owners, force=True))
        self.step(peer, plan, r, owners)

    def contribute(self, owner: Peer, giver: PeerId, r: ev.RoundArrived, parts: list[str]) -> None:
        mine = owner.round
        if (
            mine is None
            or (mine.term, mine.attempt) != (r.term, r.attempt)
            or mine.epoch != r.epoch
        ):
            if owner.member.plan is not None and owner.member.plan.term > r.term:
                return
            self.at(
                0.1,
                lambda: (
                    self.contribute(owner, giver, r, parts)
                    if self.up(owner) and self.now < 400
                    else None
                ),
            )
            return
        owner.came.add(giver)
        owner.waiting.append((giver, r.attempt))
        plan = owner.member.plan
        assert plan is not None
        owners = {p: mine.owners.get(p, plan.owners[p]) for p in PARTS[owner.stage]}
        self.step(owner, plan, mine, owners)

    def no_answer(self, peer: Peer, plan: Plan, r: ev.RoundArrived, owner: PeerId) -> None:
        if peer.round is r:
            peer.failed.add(owner)
            owners = {p: r.owners.get(p, plan.owners[p]) for p in PARTS[peer.stage]}
            self.round_over(peer, plan, r, owners)

    def step(
        self,
        peer: Peer,
        plan: Plan,
        r: ev.RoundArrived,
        owners: dict[str, PeerId],
        late: bool = False,
    ) -> None:
        if peer.round is not r or not self.up(peer):
            return
        cell = {m.peer for m in plan.stage(peer.stage)} - set(r.dead)
        if not (late or peer.late) and not cell <= peer.came:
            return
        peer.late = peer.late or late
        for part in (p for p, o in owners.items() if o == peer.name):
            if part not in peer.fresh:
                given = sorted(p for p in peer.came if (m := plan.member(p)) and m.current)
                peer.stepped[part] = peer.fresh[part] = hashlib.sha256(
                    f"{peer.values[part]}|{plan.epoch}|{given}|{peer.name}".encode()
                ).hexdigest()[:8]
        ready = {p: peer.fresh[p] for p, o in owners.items() if o == peer.name}
        while peer.waiting:
            to, _ = peer.waiting.pop()
            self.call(to, lambda p: self.receive(p, plan, r, ready))
        self.round_over(peer, plan, r, owners)

    def receive(self, peer: Peer, plan: Plan, r: ev.RoundArrived, parts: dict[str, str]) -> None:
        if (
            peer.round is not None
            and (peer.round.term, peer.round.attempt) == (r.term, r.attempt)
            and peer.round.epoch == r.epoch
        ):
            peer.fresh.update(parts)
            owners = {p: r.owners.get(p, plan.owners[p]) for p in PARTS[peer.stage]}
            self.round_over(peer, plan, peer.round, owners)

    def round_over(
        self,
        peer: Peer,
        plan: Plan,
        r: ev.RoundArrived,
        owners: dict[str, PeerId],
        force: bool = False,
    ) -> None:
        if peer.round is not r or not self.up(peer):
            return
        missing = tuple(p for p in owners if p not in peer.fresh)
        blocked = {o for p, o in owners.items() if p in missing}
        if missing and not force and not blocked <= peer.failed:
            return
        peer.round = None
        failed = tuple(sorted(blocked)) if missing else ()
        self.happens(
            peer,
            ev.RoundEnded(
                plan.epoch, plan.term, r.attempt, tuple(sorted(peer.fresh)), missing, failed
            ),
        )

    def copy(self, peer: Peer, plan: Plan, r: ev.RoundArrived) -> None:
        def give(donor: Peer) -> None:
            values = dict(donor.values) if donor.member.holds == plan.epoch + 1 else None
            self.call(peer.name, lambda p: got(values))

        def got(values: dict[str, str] | None) -> None:
            if peer.member.plan is not plan or not self.up(peer):
                return
            peer.fresh = values or {}
            missing = () if values else tuple(PARTS[peer.stage])
            self.happens(peer, ev.RoundEnded(plan.epoch, plan.term, r.attempt, (), missing, ()))

        self.call(r.sources[0], give, lambda: got(None))

    # ---- what must always hold

    def check(self) -> None:
        """I1: whoever the leader counts as current at a version holds what the rest of its cell
        holds."""
        chief = (
            self.peers[self.leading()]
            if any(p.stage == ENDS and p.alive for p in self.peers.values())
            else None
        )
        plan = chief.leader.plan if chief is not None and chief.leader is not None else None
        if (
            plan is None
            or chief is None
            or chief.leader is None
            or chief.leader.phase is not Phase.RUN
        ):
            return
        for stage in range(4):
            said = {
                self.peers[m.peer].digest
                for m in plan.stage(stage)
                if m.current and (p := self.peers.get(m.peer)) and p.alive and p.member.plan is plan
            }
            assert len(said) <= 1, f"stage {stage} differs at epoch {plan.epoch}: {said}"

    def kinds(self, kind: str) -> list[ev.RecordFact]:
        return [r for r in self.log if r.kind == kind]

    def epochs(self) -> list[int]:
        return [int(str(r.facts["epoch"])) for r in self.kinds("epoch-committed")]


def settled(member: Member) -> int:
    """The epoch of the version nobody can undo any more."""
    return (member.before or member.at).epoch


def test_a_quiet_swarm_commits_every_epoch_once() -> None:
    swarm = Swarm(0)
    swarm.run(60)
    assert swarm.epochs() == list(range(1, 13))
    assert [r.facts["epoch"] for r in swarm.kinds("evaluated")] == [5, 10, 12]
    assert not swarm.kinds("epoch-abandoned")
    assert not swarm.kinds("round-repaired")
    assert all(
        p.member.state is MemberState.FINISHED and p.member.holds == 12
        for p in swarm.peers.values()
    )


@pytest.mark.parametrize("when", [i * 0.13 + 1.5 for i in range(24)])
def test_a_replica_dies_at_any_moment_and_the_run_goes_on(when: float) -> None:
    swarm = Swarm(2, replicas=3)
    swarm.at(when, lambda: swarm.kill(PeerId("peer21")))
    swarm.run(120)
    assert swarm.epochs() == list(range(1, 13))
    assert not swarm.kinds("digest-mismatch")


def test_a_replacement_catches_up_in_one_epoch() -> None:
    swarm = Swarm(3)
    swarm.at(2.0, lambda: swarm.kill(PeerId("peer31")))
    swarm.at(5.0, lambda: swarm.add(PeerId("peer39"), 3))
    swarm.run(120)
    newcomer = swarm.peers[PeerId("peer39")]
    assert newcomer.member.holds == 12
    assert newcomer.digest == swarm.peers[PeerId("peer30")].digest


def test_a_replica_measured_slow_is_tried_again() -> None:
    swarm = Swarm(9, epochs=30)
    slow = PeerId("peer11")
    swarm.speeds[slow] = 0.01
    swarm.run(120)
    chief = swarm.peers[PeerId("peer00")]
    assert chief.leader is not None
    visits = [epoch for epoch, peers in swarm.visited.items() if slow in peers]
    assert visits, "it never got a micro-batch"
    assert 1 <= len(visits) <= 30 // 8 + 1
    assert swarm.epochs()[-1] == 30


def test_a_peer_that_joins_after_the_end_finishes() -> None:
    swarm = Swarm(8)
    swarm.run(60)
    late = PeerId("peer19")
    swarm.add(late, 1)
    donor = swarm.peers[PeerId("peer10")]
    swarm.peers[late].values = dict(donor.values)
    swarm.peers[late].member.stand(donor.member.at, (), donor.member.tokens)
    swarm.run(70)
    assert swarm.peers[late].member.state is MemberState.FINISHED
    assert donor.member.state is MemberState.FINISHED


def test_a_paused_peer_is_dropped_and_comes_back_equal() -> None:
    swarm = Swarm(4)

    def pause() -> None:
        swarm.peers[PeerId("peer11")].paused_until = swarm.now + 8

    swarm.at(2.0, pause)
    swarm.run(120)
    assert swarm.epochs() == list(range(1, 13))
    assert swarm.peers[PeerId("peer11")].digest == swarm.peers[PeerId("peer10")].digest


def test_the_next_ends_peer_takes_over_from_a_dead_leader() -> None:
    swarm = Swarm(5, ends=2)
    swarm.at(3.0, lambda: swarm.kill(PeerId("peer00")))
    swarm.run(120)
    assert swarm.epochs()[-1] == 12
    assert (
        sorted(set(swarm.epochs())) == swarm.epochs()
        or len(swarm.epochs()) - len(set(swarm.epochs())) <= 1
    )


def test_a_stage_without_a_peer_stops_the_run_with_the_reason() -> None:
    swarm = Swarm(6)
    for name in ("peer20", "peer21"):
        swarm.at(5.0, lambda name=name: swarm.kill(PeerId(name)))
    swarm.run(40)
    leader = swarm.peers[PeerId("peer00")].leader
    assert leader is not None
    assert swarm.epochs()[-1] < 12
    assert leader.waiting_for == "a peer for stage 2"
    # A peer comes that holds nothing, and nobody kept an older version here, so there is none in
    # common: the leader waits and says for what.
    swarm.add(PeerId("peer29"), 2)
    swarm.run(65)
    assert leader.waiting_for == "stages that hold one version in common"


@pytest.mark.parametrize("seed", range(60))
def test_churn_never_makes_two_truths(seed: int) -> None:
    swarm = Swarm(seed + 100, ends=2, replicas=3, epochs=20)
    rng, fresh = random.Random(seed), itertools.count(5)

    def disturb() -> None:
        stage = rng.choice([1, 2, 3])
        cell = [p for p in swarm.peers.values() if p.stage == stage and p.alive]
        newest = max(settled(p.member) for p in cell)
        # The last holder of a stage's parameters may not die: nothing could bring them back here.
        holders = [p for p in cell if settled(p.member) >= newest]
        what = rng.random()
        if what < 0.4 and len(holders) > 1:
            swarm.kill(rng.choice(holders).name)
        elif what < 0.7 and len(cell) < 4:
            swarm.add(PeerId(f"peer{stage}{next(fresh)}"), stage)
        elif cell:
            rng.choice(cell).paused_until = swarm.now + rng.uniform(0.5, 6)
        if swarm.now < 60:
            swarm.at(rng.uniform(0.5, 4), disturb)

    swarm.at(2.0, disturb)
    swarm.run(200)
    assert swarm.epochs()[-1] == 20, (swarm.epochs(), swarm.log[-5:])
    done = {
        p.digest for p in swarm.peers.values() if p.alive and p.stage == 1 and p.member.holds == 20
    }
    assert len(done) == 1
