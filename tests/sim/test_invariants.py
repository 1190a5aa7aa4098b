"""Every checker raises for what breaks its invariant and says nothing of what does not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from node.averaging.exchange.events import Step
from node.core.ids import PeerId, RoundId
from node.core.journey import Hop, Member, Path, Plan, Version
from node.scheduler.settings import SchedulerSettings
from node.sim.disk import Checkpoint
from node.sim.invariants import InvariantViolation
from node.sim.setup import Setup
from node.sim.swarm import Swarm, facts_of
from node.sim.values import Moment, Share, Value, first_values
from node.training.protocol import events as ev

SETUP, SCHEDULER = Setup(), SchedulerSettings("round-robin")
E0, A, B, C = (PeerId(p) for p in ("e00-000", "s01-000", "s01-001", "s02-000"))


def plan(**changes: Any) -> Plan:
    members = (Member(E0, 0), Member(A, 1), Member(B, 1), Member(C, 2))
    owners = {n: {0: E0, 1: A, 2: C}[s] for s, names in SETUP.names.items() for n in names}
    paths = tuple(Path(i, E0, (i,), (Hop(1, A), Hop(2, C))) for i in range(SETUP.micro_batches))
    return replace(Plan(0, 1, E0, members, paths, owners), **changes)


def broken(id: str) -> Any:
    return pytest.raises(InvariantViolation, match=f"^{id} at ")


@pytest.fixture
def swarm() -> Swarm:
    return Swarm(SETUP, 0)


def test_i1_two_digests_at_the_beginning_of_one_epoch(swarm: Swarm) -> None:
    a, b = swarm.peers[A], swarm.peers[B]
    swarm.watch.began(a, plan(), False)
    swarm.watch.began(b, plan(), False)
    b.labour.digest = "other"
    swarm.watch.began(b, plan(), True)
    with broken("I1"):
        swarm.watch.began(b, plan(), False)
    with broken("I1"):
        swarm.watch.began(a, plan(term=2, digests={(1, 0): "agreed"}), False)


@pytest.mark.parametrize("owner", [C, PeerId("nobody")])
def test_i2_a_part_with_a_wrong_owner(swarm: Swarm, owner: PeerId) -> None:
    swarm.watch.owners.plan(plan())
    with broken("I2"):
        swarm.watch.owners.plan(plan(owners={**plan().owners, "1.0": owner}))


def test_i2_a_part_without_an_owner_or_with_a_dead_or_idle_one(swarm: Swarm) -> None:
    owners = dict(plan().owners)
    del owners["2.1"]
    with broken("I2"):
        swarm.watch.owners.plan(plan(owners=owners))
    listening = tuple(replace(m, current=m.peer != A) for m in plan().members)
    with broken("I2"):
        swarm.watch.owners.plan(plan(members=listening))
    with broken("I2"):
        swarm.watch.owners.round(ev.SendRound((B,), plan(), 1, (A,)))
    swarm.watch.owners.round(ev.SendRound((B,), plan(), 1, (A,), dict.fromkeys(SETUP.names[1], B)))


def test_i3_a_micro_batch_that_counts_twice(swarm: Swarm) -> None:
    swarm.watch.micro_batch(swarm.peers[A], plan(), 1, False)
    with broken("I3"):
        swarm.watch.micro_batch(swarm.peers[A], plan(), 1, True)
    request = SimpleNamespace(plan=plan())
    swarm.watch.once.step(swarm.peers[A], request, (Share(A, (1, 2), 32), Share(B, (3,), 16)))  # type: ignore[arg-type]
    with broken("I3"):
        swarm.watch.once.step(swarm.peers[A], request, (Share(A, (1, 2), 32), Share(B, (2,), 16)))  # type: ignore[arg-type]
    with broken("I3"):
        swarm.watch.taken(swarm.peers[A], plan(), plan(term=2).hash)


def test_i4_samples_that_are_taken_twice_or_forgotten(swarm: Swarm) -> None:
    books = swarm.watch.samples
    first = plan()
    books.plan(first)
    books.close(first, (1,), 32)
    made = next(v for v in books.books if v.epoch == 1)
    assert books.books[made].returned == {1}
    assert books.ancestor(Version(0), made)
    assert not books.ancestor(made, Version(0))
    follow = plan(epoch=1, lineage=made.lineage, cursor=(3, (1,)))
    books.plan(follow)
    with broken("I4"):
        books.plan(replace(follow, cursor=(3, ())))
    with broken("I4"):
        books.plan(replace(follow, lineage="f" * 32))
    with broken("I4"):
        books.close(follow, (), 48)  # its samples are 0, 1, 2 again: 0 counts already
    books.guessed.add(made)
    books.plan(replace(follow, cursor=(3, ())))
    assert books.books[made].lost == 1


@pytest.mark.parametrize(
    ("contributors", "tokens", "shares"),
    [
        ((A, A), 32, (Share(A, (1,), 16), Share(A, (1,), 16))),
        ((A, C), 32, (Share(A, (1,), 16), Share(C, (2,), 16))),
        ((A, B), 48, (Share(A, (1,), 16), Share(B, (2,), 16))),
        ((A, B), 64, (Share(A, (1,), 16), Share(B, (2,), 48))),
        ((A,), 16, (Share(A, (1,), 16, "another plan"),)),
    ],
    ids=["twice", "stranger", "divisor", "tokens", "plan"],
)
def test_i5_a_mean_that_is_none(swarm: Swarm, contributors: Any, tokens: int, shares: Any) -> None:
    request: Any = SimpleNamespace(
        plan=plan(), members=(A, B), listeners=frozenset(), round=RoundId(0, 1, 0)
    )
    good = (Share(A, (1,), 16, plan().hash), Share(B, (2,), 16, plan().hash))
    swarm.watch.step(
        swarm.peers[A], request, Step(request.round, 0, ("1.0",), (A, B), 32), good, False
    )
    with broken("I5"):
        swarm.watch.mean.step(swarm.peers[A], request, contributors, tokens, shares)


def test_i6_half_a_checkpoint(swarm: Swarm) -> None:
    version, names = Version(4, "a" * 32), SETUP.names[1]
    values = {n: Value("mark", version) for n in names}
    found = Checkpoint(version, 1, len(names), 0, (0, ()), {}, values, {}, sealed=True)
    swarm.watch.restored(swarm.peers[A], found)
    for wrong in (
        replace(found, sealed=False),
        replace(found, values=dict(list(values.items())[1:])),
        replace(found, values={**values, names[0]: Value("mark", Version(3))}),
    ):
        with broken("I6"):
            swarm.watch.restored(swarm.peers[A], wrong)


def test_i7_time_that_runs_backwards(swarm: Swarm) -> None:
    peer, grow = swarm.peers[A], swarm.watch.grow
    grow.member(peer, None, [], Version(0), 0)
    with broken("I7"):
        grow.member(peer, None, [], Version(0), 3)
    with broken("I7"):
        grow.member(peer, None, [], Version(2), 0)
    grow.member(peer, None, [ev.GoTo(Version(0), "roll-back")], Version(2), 0)
    with broken("I7"):
        grow.plan(peer, plan(), (1, None), [])
    with broken("I7"):
        grow.plan(peer, plan(), (0, Version(2)), [])
    grow.plan(peer, plan(), (0, Version(2)), [ev.Report("went-back", "")])


def test_i8_a_step_that_is_applied_twice_or_to_another_history(swarm: Swarm) -> None:
    peer, once, old = swarm.peers[A], swarm.watch.applied, first_values(["1.0"])["1.0"]
    once.stepping(peer, plan(), "1.0", old, None, False)
    with broken("I8"):
        once.stepping(peer, plan(), "1.0", old, None, True)
    with broken("I8"):
        once.stepping(peer, plan(), "1.0", Value("mark", Version(1, "a" * 32)), None, False)
    with broken("I8"):
        once.stepping(peer, plan(), "1.0", old, Moment("mark", Version(0, "b" * 32), 1), False)
    moment = Moment("mark", Version(0), 1)
    once.settling(peer, plan(), {"1.0": moment})
    with broken("I8"):
        once.settling(swarm.peers[B], plan(), {"1.0": moment})
    with broken("I8"):
        once.settling(peer, plan(), {"1.1": Moment("mark", Version(7), 1)})
    peer.labour.moments["1.2"] = moment
    with broken("I8"):
        once.settling(peer, plan(), {"1.2": moment})
    request: Any = SimpleNamespace(
        plan=plan(), members=(A,), listeners=frozenset(), round=RoundId(0, 1, 0)
    )
    with broken("I8"):
        swarm.watch.step(
            peer, request, Step(request.round, 0, ("1.0",), (A,), 16), (Share(A, (1,), 16),), True
        )


def test_i9_a_leader_that_rolls_dice(swarm: Swarm) -> None:
    pure, calls = swarm.watch.pure, []

    def dice(cursor: Any) -> Any:
        calls.append(cursor)
        return facts_of(SETUP, SCHEDULER).sampler((cursor[0] + len(calls), ()))

    for facts, fails in (
        (facts_of(SETUP, SCHEDULER), False),
        (replace(facts_of(SETUP, SCHEDULER), sampler=dice, settle_s=0.0), True),
    ):
        leader = swarm.make.leader(E0, replace(facts, settle_s=0.0))
        for name, stage in ((E0, 0), (A, 1)):
            leader.handle(ev.Heard(name, stage, Version(0), "d"), 5.0)
        event = ev.Heard(C, 2, Version(0), "d")
        pure._count = pure.EVERY * max(1, len(swarm.peers) // 8) - 1
        twin = pure.before(leader, event)
        assert twin is not None
        actions = leader.handle(event, 0.0)
        assert any(isinstance(a, ev.SendPlan) for a in actions)
        if fails:
            with broken("I9"):
                pure.after(twin, event, actions)
        else:
            pure.after(twin, event, actions)


def test_i9_nobody_may_object_to_the_plan_of_an_honest_leader(swarm: Swarm) -> None:
    with broken("I9"):
        swarm.watch.objected(swarm.peers[A], plan(), "masses that do not add up")


def test_i10_one_fault_may_not_cost_an_epoch(swarm: Swarm) -> None:
    peer, watch = swarm.peers[E0], swarm.watch.one_fault
    watch.planned(peer, plan())
    watch.fault("kill", B, True)
    with broken("I10"):
        watch.ended(peer, False, "given up")
    for faults in (
        [("kill", B, False)],
        [("kill", E0, True)],
        [("kill", B, True), ("kill", A, True)],
        [("partition", None, True)],
    ):
        swarm.watch.one_fault._disturbed = -1e9
        watch.planned(peer, plan())
        for fault in faults:
            watch.fault(*fault)
        watch.ended(peer, False, "given up")
    watch.planned(peer, plan())  # somebody was killed a moment ago
    watch.ended(peer, False, "given up")


def test_a_violation_says_what_when_and_what_happened_last(swarm: Swarm) -> None:
    swarm.watch.note("something")
    with pytest.raises(InvariantViolation) as caught:
        swarm.watch.micro_batch(swarm.peers[A], plan(), 1, True)
    assert (caught.value.id, caught.value.time, caught.value.seed) == ("I3", 0.0, 0)
    assert "something" in caught.value.recent[-1]
