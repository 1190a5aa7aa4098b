"""Checkers of invariants: each raises for a violation of its invariant and for nothing else."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from node.app.assembly import run_facts
from node.averaging.exchange.events import Opened, ReduceAndStep, Stepped
from node.checkpoint.store import Checkpoint
from node.consensus.rules import Rules
from node.core.ids import PeerId, RoundId
from node.core.journey import Hop, Path, Plan, PlanMember, Version
from node.core.samples import SampleClass
from node.epoch import events as ev
from node.epoch.member import Member as Following
from node.optim.owner import Owner
from node.optim.settings import OptimSettings
from node.sim.invariants import EpochRun, InvariantViolation, TakenBatches, VersionBooks
from node.sim.setup import NUMBERS, Setup
from node.sim.swarm import SimSwarm
from node.sim.watch import OBJECTED
from node.sim.world.values import code

SETUP = Setup()
NO_WORK: Any = SimpleNamespace(
    local_checkpoints=SimpleNamespace(recall=lambda version: None),
    read=lambda change: Rules(),
    engines=SimpleNamespace(
        pipeline=SimpleNamespace(shape=SimpleNamespace(nbytes=lambda *shape: 4096))
    ),
)
FACTS = replace(run_facts(SETUP.manifest(1), NO_WORK, SETUP.parts), prove=False)
FACTS = replace(FACTS, waits=replace(FACTS.waits, settle_s=0.0))
ROUND = RoundId(0, 1, 0)
E0, A, B, C = (PeerId(p) for p in ("e00-000", "s01-000", "s01-001", "s02-000"))


def plan(**changes: Any) -> Plan:
    members = (PlanMember(E0, 0), PlanMember(A, 1), PlanMember(B, 1), PlanMember(C, 2))
    owners = {n: {0: E0, 1: A, 2: C}[s] for s, names in SETUP.names.items() for n in names}
    paths = tuple(Path(i, E0, (i,), (Hop(1, A), Hop(2, C))) for i in range(SETUP.micro_batches))
    return replace(Plan(0, 1, E0, members, paths, owners), **changes)


def breaks(id: str, look: Callable[..., object], *at: Any) -> None:
    """Assert that `look(*at)` reports a violation of the invariant `id`."""
    with pytest.raises(InvariantViolation, match=f"^{id} at "):
        look(*at)


@dataclass
class Peer:
    """The attributes of a peer that the checkers read."""

    name: PeerId
    stage: int
    digest: str = "same"
    placed: str = ""
    member: Any = field(default_factory=lambda: SimpleNamespace(dropped=()))
    work: Any = field(
        default_factory=lambda: SimpleNamespace(
            stage=SimpleNamespace(version=Version(0)), cell=0, plan=None
        )
    )

    def in_place(self) -> str:
        return self.placed or self.digest


@pytest.fixture
def swarm() -> SimSwarm:
    return SimSwarm(SETUP, 0)


@pytest.fixture
def a() -> Any:
    return Peer(A, 1)


@pytest.fixture
def b() -> Any:
    return Peer(B, 1)


def test_i1_two_digests_at_the_beginning_of_one_epoch(swarm: SimSwarm, a: Any, b: Any) -> None:
    swarm.watch.began(a, plan(), False)
    swarm.watch.began(b, plan(), False)
    b.digest = "other"
    swarm.watch.began(b, plan(), True)
    breaks("I1", swarm.watch.began, b, plan(), False)
    breaks("I1", swarm.watch.began, a, plan(term=2, digests={1: "agreed"}), False)


def test_i1_parameters_that_are_not_those_of_the_digest(swarm: SimSwarm, a: Any) -> None:
    a.placed = "undone"
    breaks("I1", swarm.watch.began, a, plan(), False)


@pytest.mark.parametrize("owner", [C, PeerId("nobody")])
def test_i2_a_part_with_a_wrong_owner(swarm: SimSwarm, owner: PeerId) -> None:
    swarm.watch.owners.plan(plan())
    breaks("I2", swarm.watch.owners.plan, plan(owners={**plan().owners, "1.0": owner}))


def test_i2_a_part_without_an_owner_or_with_a_dead_or_idle_one(swarm: SimSwarm) -> None:
    owners = {name: owner for name, owner in plan().owners.items() if name != "2.1"}
    breaks("I2", swarm.watch.owners.plan, plan(owners=owners))
    listening = tuple(replace(m, current=m.peer != A) for m in plan().members)
    breaks("I2", swarm.watch.owners.plan, plan(members=listening))
    round = ev.RoundArrived(A, 1, 1, plan().hash, 1, (A,), {}, (), (), 30.0)
    breaks("I2", swarm.watch.owners.round, ev.SendRound((B,), plan(), round))
    mended = replace(round, owners=dict.fromkeys(SETUP.names[1], B))
    swarm.watch.owners.round(ev.SendRound((B,), plan(), mended))


def taken(*samples: int, tokens: int = 0) -> TakenBatches:
    sums = sum((code(n) * 16 for n in samples), start=torch.zeros(NUMBERS))
    return TakenBatches(samples, sums, tokens or 16 * len(samples))


def opened(**changes: Any) -> Opened:
    found = Opened(
        ROUND, A, plan().hash, "owners", frozenset({A, B}), frozenset(), (), frozenset(), 16, (), 99
    )
    return replace(found, **changes)


def test_i3_a_sample_that_counts_twice(swarm: SimSwarm, a: Any) -> None:
    once = swarm.watch.once
    mean = swarm.watch.mean
    once.counted(a, plan(), 1, False)
    breaks("I3", once.counted, a, plan(), 1, True)
    once.gave(a, plan(), taken(1, 2))
    breaks("I3", once.gave, a, plan(), taken(1, 2, 1))
    for giver, given in ((A, taken(1, 2)), (B, taken(3))):
        mean.gave(plan().hash, giver, given)
    once.step(a, opened(), ReduceAndStep(ROUND, 0, ("1.0",), (A, B)), mean)
    mean.gave(plan().hash, B, taken(2))
    breaks("I3", once.step, a, opened(), ReduceAndStep(ROUND, 0, ("1.1",), (A, B)), mean)
    breaks("I3", once.taken, a, plan(), plan(term=2).hash)


def test_i4_samples_that_are_taken_twice_or_forgotten(swarm: SimSwarm) -> None:
    books = swarm.watch.samples
    first = plan()
    books.plan(first)
    books.close(first, (1,))
    made = next(v for v in books.books if v.epoch == 1)
    assert books.books[made].returned == {1}
    assert books.ancestor(Version(0), made)
    assert not books.ancestor(made, Version(0))
    follow = plan(epoch=1, lineage=made.lineage, cursor=(SampleClass(0, 0, 3, (1,)),))
    books.plan(follow)
    breaks("I4", books.plan, replace(follow, cursor=(SampleClass(0, 0, 3),)))
    breaks("I4", books.plan, replace(follow, lineage="f" * 32))
    breaks("I4", books.close, follow, ())
    books.guessed.add(made)
    books.plan(replace(follow, cursor=(SampleClass(0, 0, 3),)))
    assert books.books[made].lost == 1


def test_i4_samples_of_a_share_of_two_classes(swarm: SimSwarm) -> None:
    books = swarm.watch.samples
    share = (SampleClass(0, 2, 4), SampleClass(1, 1, 3, (1,)))
    books.guessed.add(Version(0))

    def taking(*samples: int) -> Plan:
        paths = tuple(
            replace(plan().paths[0], index=i, samples=(s,)) for i, s in enumerate(samples)
        )
        return plan(cursor=share, paths=paths)

    books.plan(taking(1, 3, 4, 5, 7))
    for wrong in (2, 4, 5):
        breaks("I4", books.close, taking(1, wrong), ())
    books.close(taking(1, 3, 4, 5, 7), (1,))
    made = next(v for v in books.books if v.epoch == 1)
    after = (SampleClass(0, 2, 8), SampleClass(1, 1, 9, (3,)))
    follow = plan(epoch=1, lineage=made.lineage, cursor=after)
    books.plan(follow)
    for wrong in (
        share,
        after[:1],
        (after[0], SampleClass(1, 1, 9)),
        (SampleClass(0, 0, 9, (3,)),),
    ):
        breaks("I4", books.plan, replace(follow, cursor=wrong))


@pytest.mark.parametrize("by", [(A, A), (A, C)], ids=["twice", "stranger"])
def test_i5_contributors_that_cannot_be(swarm: SimSwarm, a: Any, by: Any) -> None:
    swarm.watch.mean.step(a, opened(), ReduceAndStep(ROUND, 0, ("1.0",), (A, B)))
    breaks("I5", swarm.watch.mean.step, a, opened(), ReduceAndStep(ROUND, 0, ("1.0",), by))


def test_i5_a_mean_that_is_none(swarm: SimSwarm, a: Any) -> None:
    mean = swarm.watch.mean
    whole = plan()
    for giver, given in ((A, taken(1, 2)), (B, taken(3))):
        mean.gave(whole.hash, giver, given)
    breaks("I5", mean.gave, whole.hash, A, taken(1, tokens=48))
    mean.step(a, opened(), ReduceAndStep(ROUND, 0, ("1.0",), (A, B)))
    right = (code(1) + code(2) + code(3)) / 3
    mean.stepping(a, whole, {"1.0": right})
    for wrong in (right / 2, (code(1) + code(2)) / 2, (code(1) + code(2) + code(4)) / 3):
        breaks("I5", mean.stepping, a, whole, {"1.0": wrong})
    again = plan(term=2)
    mean.step(a, opened(plan_hash=again.hash), ReduceAndStep(ROUND, 0, ("1.0",), (A, B)))
    breaks("I5", mean.stepping, a, again, {"1.0": right})


def test_i5_weighs_a_share_whose_micro_batch_was_dropped(swarm: SimSwarm, a: Any) -> None:
    """The sum that has the share counts for the one micro-batch that the plan gave its giver."""
    mean = swarm.watch.mean
    whole = plan(paths=tuple(Path(i, E0, (i,), (Hop(1, p),)) for i, p in enumerate((A, B, B))))
    for giver, given in ((A, taken(0, 2)), (B, taken(1))):
        mean.gave(whole.hash, giver, given)
    mean.step(a, opened(plan_hash=whole.hash), ReduceAndStep(ROUND, 0, ("1.0",), (A, B)))
    plain = (code(0) + code(1) + code(2)) / 3
    weighed = (code(0) + code(2)) / 4 + code(1) / 2
    mean.stepping(a, whole, {"1.0": plain})
    breaks("I5", mean.stepping, a, whole, {"1.0": weighed})
    a.member.dropped = (2,)
    mean.stepping(a, whole, {"1.0": weighed})
    breaks("I5", mean.stepping, a, whole, {"1.0": plain})


def test_i5_remembers_what_was_given_under_a_plan_in_force(swarm: SimSwarm, a: Any) -> None:
    mean = swarm.watch.mean
    waits = plan()
    a.work.plan = waits
    swarm.live = lambda stage=None: [a]  # type: ignore[method-assign]
    for giver, given in ((A, taken(1, 2)), (B, taken(3))):
        mean.gave(waits.hash, giver, given)
    for term in range(2, 100):
        for giver in (A, B):
            mean.gave(plan(term=term).hash, giver, taken(term))
    assert mean.of(plan(term=2).hash, A) is None
    mean.step(a, opened(), ReduceAndStep(ROUND, 0, ("1.0",), (A, B)))
    mean.stepping(a, waits, {"1.0": (code(1) + code(2) + code(3)) / 3})
    breaks("I5", mean.stepping, a, waits, {"1.0": (code(1) + code(2)) / 3})


def test_i6_a_checkpoint_that_is_not_what_was_held(swarm: SimSwarm, a: Any) -> None:
    at = plan(epoch=4, lineage="a" * 32)
    swarm.watch.began(a, at, False)
    tensors = {n: torch.ones(NUMBERS) for n in SETUP.names[1]}
    found = Checkpoint(1, 4, tensors, {}, {"lineage": "a" * 32, "cell": 0}, "same")
    swarm.watch.restored(a, found)
    swarm.watch.restored(a, replace(found, epoch=3, digest="not known"))
    for wrong in (
        replace(found, digest="other"),
        replace(found, parameters=dict(list(tensors.items())[1:])),
    ):
        breaks("I6", swarm.watch.restored, a, wrong)


def test_i7_time_that_runs_backwards(swarm: SimSwarm, a: Any) -> None:
    peer = a
    grow = swarm.watch.grow
    peer.member = Following(A, Version(0))
    grow.member(peer, None, [], Version(0), 0)
    breaks("I7", grow.member, peer, None, [], Version(0), 3)
    breaks("I7", grow.member, peer, None, [], Version(2), 0)
    grow.member(peer, None, [ev.GoTo(Version(0), "roll-back")], Version(2), 0)
    breaks("I7", grow.plan, peer, plan(), (1, None), [])
    breaks("I7", grow.plan, peer, plan(), (0, Version(2)), [])
    grow.plan(peer, plan(), (0, Version(2)), [ev.RecordFact("went-back", "")])


class Kept(Owner):
    """An optimizer with state that is set by hand."""

    def __init__(self, **marks: float) -> None:
        super().__init__(OptimSettings(name="adamw"), 10)
        self._state = {f"1.{n}": {"exp_avg": torch.full((4,), v)} for n, v in marks.items()}


def test_i8_a_step_of_another_version_or_history(swarm: SimSwarm, a: Any, b: Any) -> None:
    once = swarm.watch.applied
    made = Version(1, "a" * 32)
    swarm.watch.samples.books[made] = VersionBooks(Version(0), {(0, 0): 3}, frozenset(), 3)
    means = {"1.0": torch.ones(4)}
    kept = Kept(**{"0": 1.0})
    once.stepping(a, plan(), kept, means)
    a.work.stage.version = made
    breaks("I8", once.stepping, a, plan(), kept, means)
    once.settling(a, kept, {"1.0"})
    once.settling(a, kept, {"1.0"})
    once.stepping(a, plan(epoch=1, lineage="a" * 32), kept, means)
    b.work.stage.version = made
    breaks("I8", once.settling, b, Kept(**{"0": 2.0}), {"1.0"})
    b.work.stage.version = Version(0)
    breaks("I8", once.stepping, b, plan(), kept, means)


def test_i8_a_step_that_is_ordered_twice_or_was_called_off(swarm: SimSwarm, a: Any) -> None:
    running = EpochRun()
    order = ReduceAndStep(ROUND, 0, ("1.0",), (A,))
    running.opens(opened())
    swarm.watch.step(a, running, order)
    breaks("I8", swarm.watch.step, a, running, order)
    running.failed_step(Stepped(0, frozenset({"1.0"}), "out of memory"))
    swarm.watch.step(a, running, order)
    running.voids(0)
    running.opens(opened())
    swarm.watch.step(a, running, order)
    running.failed.add(0)
    breaks("I8", swarm.watch.step, a, running, replace(order, names=("1.1",)))


def test_i9_a_leader_that_rolls_dice(swarm: SimSwarm) -> None:
    pure = swarm.watch.pure
    calls = []

    def dice(stage: int, *about: Any) -> dict[str, PeerId]:
        calls.append(stage)
        return dict.fromkeys(FACTS.make.assign(stage, *about), (E0, A)[len(calls) % 2])

    for facts, fails in (
        (FACTS, False),
        (replace(FACTS, make=replace(FACTS.make, assign=dice)), True),
    ):
        leader = swarm.make.leader(E0, facts)
        for name, stage in ((E0, 0), (A, 1)):
            leader.handle(ev.Heartbeat(name, stage, Version(0), "d"), 5.0)
        event = ev.Heartbeat(C, 2, Version(0), "d")
        pure._count = pure.EVERY * max(1, len(swarm.peers) // 8) - 1
        twin = pure.before(leader, event)
        assert twin is not None
        actions = leader.handle(event, 0.0)
        assert any(isinstance(a, ev.SendPlan) for a in actions)
        if fails:
            breaks("I9", pure.after, twin, event, actions)
        else:
            pure.after(twin, event, actions)


def test_i9_nobody_may_object_to_the_plan_of_an_honest_leader(swarm: SimSwarm, a: Any) -> None:
    swarm.watch.fault(a, E0, "a bad handshake")
    breaks("I9", swarm.watch.fault, a, E0, f"{OBJECTED}: masses that do not add up")


def test_i10_one_fault_may_not_cost_an_epoch(swarm: SimSwarm) -> None:
    peer: Any = Peer(E0, 0)
    watch = swarm.watch.one_fault
    watch.planned(peer, plan())
    watch.fault("kill", B)
    breaks("I10", watch.ended, peer, False, "given up")
    for faults in (
        [("kill",)],
        [("kill", E0)],
        [("kill", B), ("kill", A)],
        [("partition",)],
    ):
        swarm.watch.one_fault._disturbed = -1e9
        watch.planned(peer, plan())
        for fault in faults:
            watch.fault(*fault)
        watch.ended(peer, False, "given up")
    watch.planned(peer, plan())  # somebody was killed a moment ago
    watch.ended(peer, False, "given up")


def test_a_violation_reports_its_invariant_time_and_last_events(swarm: SimSwarm, a: Any) -> None:
    swarm.watch.note("something")
    with pytest.raises(InvariantViolation) as caught:
        swarm.watch.once.counted(a, plan(), 1, True)
    assert (caught.value.id, caught.value.time, caught.value.seed) == ("I3", 0.0, 0)
    assert "something" in caught.value.recent[-1]
