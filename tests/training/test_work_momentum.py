"""Optimizer state outlives its owner: copies at buddies, taking over, giving away. Real rounds,
real transfers, no sleep."""

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, cast

import grpc
import pytest
import torch

from node.checkpoint.service import StateService, Unserved
from node.checkpoint.state import StateKind, StateSnapshot
from node.core.errors import StepFault
from node.core.ids import PeerId
from node.core.journey import Plan, PlanMember, Version
from node.core.tasks import Tasks
from node.optim import owner
from node.optim.muon import State
from node.optim.owner import Owner
from node.optim.settings import OptimSettings
from node.optim.state_replica import Spares, StateReplica, VersionTrail
from node.stage.state_import import WAIT_SHARE, Arrival, Parts, StateImport
from node.telemetry.events import Journal
from protos import state_pb2
from tests.training.conftest import same, shared

CELL = "abc"
OF_A = ("layers.0.a", "layers.0.norm")
LONG_S = 60.0
"""Bound of every wait for another thread."""


async def begun_without(rig: Any, plan: Any, a: Any, b: Any, c: Any) -> Any:
    """Begin the next plan at all three peers, then kill `a`; returns the plan."""
    last = await rig.begun((a, b, c), shared(a, b, c), plan)
    await rig.net.kill(a.me)
    return last


async def test_copies_are_kept_at_the_buddy_and_change_nothing(rig: Any, alone: Any) -> None:
    a, b, c, plan = await rig.trained(CELL, 5, alone)
    for p in (a, b, c):
        same(p.parameters(), alone.parameters)
        assert not [e for e in ("state-lost", "momentum-old", "state-moved") if p.events(e)]
    # Copied at versions 2 and 4; b is the buddy of a, c of b, a of c.
    version = Version(4, b.work.state_export._trail.at(4).lineage)
    assert b.spares.versions() == dict.fromkeys(OF_A, version)
    assert c.spares.versions() == {"layers.0.b": version}
    assert a.spares.versions() == {"layers.1.a": version}
    same(b.spares.get("layers.0.a").state, alone.saved[4]["layers.0.a"])
    assert [e.fields["epoch"] for e in b.events("spare-kept")] == [2, 4]
    assert plan.epoch == 4


@pytest.mark.parametrize("heir", ["b", "c"])
async def test_a_dead_owners_successor_steps_with_the_spare(
    rig: Any, alone: Any, heir: str
) -> None:
    a, b, c, plan = await rig.trained(CELL, 5, alone)
    last = await begun_without(rig, plan, a, b, c)
    first = await rig.average(last, b, c)
    assert all(set(e.missing) == set(OF_A) for e in first)
    await rig.averaged(last, b, c, attempt=1, dead=(a.me,), owners=dict.fromkeys(OF_A, heir))
    # The copy is of version 4, the plan starts from 5: one update is missing in the momentum and
    # none counts twice.
    expected = alone.stepped("bc", 5, dict.fromkeys(OF_A, 4))
    same(b.parameters(), expected)
    same(c.parameters(), expected)
    taker, other = (b, c) if heir == "b" else (c, b)
    (old,) = taker.events("momentum-old")
    assert (old.fields["parts"], old.fields["age"]) == (2, 1)
    assert [(p.taking.age, p.taking.lost) for p in (taker, other)] == [(1, 0), (0, 0)]
    assert not taker.events("state-lost")
    # The next epoch goes on from what this one left.
    await rig.epoch(rig.plan((b, c), shared(taker, b, c), last), b, c)
    assert taker.owner.through("layers.0.a") == 5
    assert not taker.events("momentum-old")[1:]
    assert "layers.0.a" not in taker.spares.versions(), "its own now"


async def test_of_several_copies_the_newest_is_taken(rig: Any, alone: Any) -> None:
    a, b, c, plan = await rig.trained(CELL, 5, alone)
    mine = b.spares
    trail = b.work.state_export._trail
    for name in OF_A:
        c.spares.put(name, mine.get(name).version, mine.get(name).state)
        mine.drop([name])
        mine.put(name, trail.at(2), alone.saved[2][name])
    await rig.net.kill(a.me)
    await rig.epoch(rig.plan((b, c), shared(b, b, c), plan), b, c)
    same(b.parameters(), alone.stepped("bc", 5, dict.fromkeys(OF_A, 4)))
    assert b.taking.age == 1


async def test_without_a_copy_the_loss_is_reported_with_its_reason(rig: Any, alone: Any) -> None:
    a, b, c, plan = await rig.trained(CELL, 3, alone, buddy_every=0)
    last = await begun_without(rig, plan, a, b, c)
    await rig.averaged(last, b, c, dead=(a.me,), owners=dict.fromkeys(OF_A, "b"))
    same(b.parameters(), alone.stepped("bc", 3, dict.fromkeys(OF_A, 0)))
    (lost,) = b.events("state-lost")
    assert lost.fields["parts"] == 2
    assert "its owner a died" in lost.text
    assert (
        b.taking.lost,
        b.taking.age,
        c.taking.lost,
    ) == (2, 0, 0)


async def test_a_part_changes_its_owner_and_its_state_goes_with_it(rig: Any, alone: Any) -> None:
    a, b, c, plan = await rig.trained(CELL, 3)
    moved = dict.fromkeys(OF_A, a)
    last = await rig.epoch(rig.plan((a, b, c), shared(c, b, c), plan, moved=moved), a, b, c)
    alone.epochs([CELL] * 4)
    same(c.parameters(), alone.parameters)
    assert [e.fields["parts"] for e in c.events("state-moved")] == [2]
    assert c.taking.lost == c.taking.age == 0
    # The giver keeps its state as a copy, and offers it as nothing else.
    await rig.begun((a, b, c), shared(c, b, c), last)
    assert a.owner.names() == ()
    assert {n: v.epoch for n, v in a.work.listing(1, StateKind.SPARE).items()} == {
        "layers.1.a": 2,
        "layers.0.a": 3,
        "layers.0.norm": 3,
    }


class DiesWhileGiving(StateService):
    """Service that gives the first bytes of optimizer state and dies."""

    async def pieces(
        self, request: state_pb2.FetchRequest, peer: PeerId
    ) -> AsyncGenerator[state_pb2.StateChunk, None]:
        async for chunk in super().pieces(request, peer):
            if StateKind.of(request.kind) is StateKind.OPTIMIZER and self.dies:
                yield state_pb2.StateChunk(offset=chunk.offset, data=chunk.data[:4])
                raise Unserved(grpc.StatusCode.UNAVAILABLE, "gone")
            yield chunk

    dies = False


async def test_a_donor_that_dies_half_way_is_replaced_by_the_copy(rig: Any, alone: Any) -> None:
    a, b, c, plan = await rig.trained(CELL, 5, alone, service=DiesWhileGiving)
    a.state.dies = True
    await rig.epoch(rig.plan((b, c), shared(c, b, c), plan, moved=dict.fromkeys(OF_A, a)), b, c)
    same(c.parameters(), alone.stepped("bc", 5, dict.fromkeys(OF_A, 4)))
    assert [(e.fields["parts"], e.fields["age"]) for e in c.events("momentum-old")] == [(2, 1)]
    assert (len(c.events("state-not-moved")), c.taking.lost) == (1, 0)


async def test_state_that_was_refused_keeps_its_reason(rig: Any, monkeypatch: Any) -> None:
    a, b, c, plan = await rig.trained(CELL, 2, service=DiesWhileGiving, buddy_every=0)

    def refuse(name: str, copy: object) -> None:
        a.state.dies = True
        raise StepFault("a square that is none", "take it from another peer")

    monkeypatch.setattr("node.stage.state_import.BATCH", 1)  # a part in each batch
    monkeypatch.setattr(c.taking, "_readied", refuse)
    await rig.epoch(rig.plan((b, c), shared(c, b, c), plan, moved=dict.fromkeys(OF_A, a)), b, c)
    missing, refused = sorted(c.events("state-lost"), key=lambda e: e.text)
    assert "what a gave cannot be" in refused.text
    assert "a, which owned it, did not give it" in missing.text
    assert "died" not in missing.text, "it lives"
    assert refused.fields["parts"] == missing.fields["parts"] == 1


async def test_an_owner_that_lives_but_does_not_step_gives_its_state(rig: Any, alone: Any) -> None:
    a, b, c, plan = await rig.trained(CELL, 5)
    alone.epochs([CELL] * 6)
    last = await rig.begun((a, b, c), shared(a, b, c), plan, deadline_s=1000.0)
    await rig.averaged(last, a, b, c, attempt=1, owners=dict.fromkeys(OF_A, "b"))
    for p in (a, b, c):
        same(p.parameters(), alone.parameters)
    assert [e.fields["parts"] for e in b.events("state-moved")] == [2]
    assert b.taking.lost == b.taking.age == 0


class StandsStill(StateService):
    """Service that gives no optimizer state until it goes on."""

    async def pieces(
        self, request: state_pb2.FetchRequest, peer: PeerId
    ) -> AsyncGenerator[state_pb2.StateChunk, None]:
        if StateKind.of(request.kind) is StateKind.OPTIMIZER:
            await self.goes_on.wait()
        async for chunk in super().pieces(request, peer):
            yield chunk

    goes_on = asyncio.Event()


async def test_a_copy_replaces_the_state_of_an_owner_that_stands_still(
    rig: Any, alone: Any
) -> None:
    StandsStill.goes_on.set()
    a, b, c, plan = await rig.trained(CELL, 5, service=StandsStill)
    alone.epochs([CELL] * 5)
    last = await rig.begun((a, b, c), shared(a, b, c), plan, deadline_s=1.0)
    a.state.goes_on = asyncio.Event()
    await rig.averaged(last, a, b, c, attempt=1, owners=dict.fromkeys(OF_A, "c"), deadline_s=LONG_S)
    a.state.goes_on.set()
    same(c.parameters(), alone.stepped(CELL, 5, dict.fromkeys(OF_A, 4)))
    assert (c.taking.age, c.taking.lost) == (1, 0)


async def test_two_heirs_in_two_attempts_and_only_the_last_one_counts(rig: Any, alone: Any) -> None:
    everybody = a, b, c, d = await rig.add(*CELL, "d")
    plan = await rig.train(everybody, shared(a, b, c), 5)
    alone.epochs(["abcd"] * 5)
    last = await rig.begun(everybody, shared(a, b, c), plan)
    await rig.net.kill(a.me)
    # Attempt 1: d inherits, steps, and nobody can reach it. Attempt 2: b inherits; d lives on
    # beside the cell.
    for p in (b, c):
        rig.net.cut(d.me, p.me)
    new = dict.fromkeys(OF_A, "d")
    first = await rig.average(last, b, c, d, attempt=1, dead=(a.me,), owners=new, deadline_s=60.0)
    assert "layers.0.a" in first[0].missing
    assert d.owner.staged(5) == set(OF_A)
    for p in (b, c):
        rig.net.mend(d.me, p.me)
    second = dict.fromkeys(OF_A, "b")
    await rig.averaged(last, b, c, attempt=2, dead=(a.me, d.me), owners=second)
    same(b.parameters(), alone.stepped("bc", 5, dict.fromkeys(OF_A, 4)))
    # d comes back as a listener: its step never counts, and it offers the state to nobody.
    after = await rig.begun((b, c), shared(b, b, c), last, listeners=(d,))
    d.plan = after
    await d.work.begin(after, True)
    assert (d.owner.names(), d.owner.staged(5)) == ((), frozenset())
    assert d.work.listing(1, StateKind.OPTIMIZER) == {}
    offered = b.work.listing(1, StateKind.OPTIMIZER).items()
    assert {n for n, v in offered if v == after.base} >= set(OF_A)


async def test_a_failed_attempt_neither_ages_nor_reapplies_the_copy(rig: Any, alone: Any) -> None:
    a, b, c, plan = await rig.trained(CELL, 5, alone)
    last = await begun_without(rig, plan, a, b, c)
    await rig.average(last, b, c, attempt=1, dead=(a.me,), owners=dict.fromkeys(OF_A, "b"))
    assert b.work.stage.version.epoch == 6
    # Another stage failed: the epoch is undone and begun again; now c inherits, then the parts stay
    # with it.
    again = await rig.begun((b, c), shared(c, b, c), last, again=True)
    assert b.work.stage.version == again.base == Version(5, last.lineage)
    await rig.averaged(again, b, c)
    expected = alone.stepped("bc", 5, dict.fromkeys(OF_A, 4))
    same(b.parameters(), expected)
    same(c.parameters(), expected)
    await rig.begun((b, c), shared(c, b, c), again)
    assert c.owner.through("layers.0.a") == 5
    assert "layers.0.a" not in b.owner.names()


async def test_a_copy_fetched_in_vain_outlives_its_giver(rig: Any, alone: Any) -> None:
    a, b, c, plan = await rig.trained(CELL, 5, alone)
    last = await begun_without(rig, plan, a, b, c)
    await rig.average(last, b, c, attempt=1, dead=(a.me,), owners=dict.fromkeys(OF_A, "c"))
    await rig.net.kill(b.me)  # the buddy of a, with the copies
    again = await rig.begun((c,), shared(c, c, c), last, again=True)
    await rig.averaged(again, c)
    # c is the buddy of b, and has a copy of b's part as well.
    old = dict.fromkeys(rig.shapes, 4) | {"layers.1.a": 5}
    same(c.parameters(), alone.stepped("c", 5, old))
    assert c.taking.lost == 0


async def test_an_owner_that_lost_a_part_on_retry_does_not_offer_it(
    rig: Any,
) -> None:
    a, b, c, plan = await rig.trained(CELL, 3)
    last = await begun_without(rig, plan, a, b, c)
    new = dict.fromkeys(OF_A, "b")
    (first,) = await rig.average(last, b, attempt=1, dead=(a.me,), owners=new, deadline_s=5.0)
    assert first.missing == ("layers.1.a",)
    assert set(new) < b.owner.staged(3)
    await rig.averaged(last, b, c, attempt=2, dead=(a.me,), owners=dict.fromkeys(new, "c"))
    made = b.work.stage.version
    for p, parts in ((b, {"layers.0.b"}), (c, {*new, "layers.1.a"})):
        found = p.work.describe(1, StateKind.OPTIMIZER, made.epoch, made.lineage)[1]
        assert {k.rpartition("/")[0] for k in found} == parts


async def test_state_is_described_where_it_is(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, plan = await rig.trained("ab", 1)
    made = a.work.stage.version

    def copies(held: Any) -> Any:
        raise AssertionError("a description names tensors, and copies none")

    monkeypatch.setattr(owner, "on_cpu", copies)
    for peer in (a, b):
        found = peer.work.describe(1, StateKind.OPTIMIZER, made.epoch, made.lineage)
        mine = [part for part, who in plan.owners.items() if who == peer.me]
        assert {name.rpartition("/")[0] for name in found[1]} == set(mine)


async def test_a_peer_that_leaves_stays_until_its_state_was_fetched(rig: Any, alone: Any) -> None:
    a, b, c, plan = await rig.trained(CELL, 3, buddy_every=0)
    alone.epochs([CELL] * 3 + ["bc"])
    # The plan is not sent to a any more, so nothing settles its last update there: it gives its
    # staged state.
    leaving = asyncio.ensure_future(a.work.handed_over(60.0))
    await rig.epoch(rig.plan((b, c), shared(b, b, c), plan, moved=dict.fromkeys(OF_A, a)), b, c)
    assert await leaving
    same(b.parameters(), alone.parameters)
    assert [e.fields["parts"] for e in a.events("handed-over")] == [2]
    assert b.taking.lost == 0
    assert await a.work.handed_over(60.0), "what was given is given"


async def test_a_copy_of_an_earlier_version_is_not_handing_over(rig: Any) -> None:
    a, b, _, _ = await rig.trained(CELL, 3)
    # b has copied version 2, which is final; the state of version 3, which a has stepped, is still
    # here only.
    assert {v.epoch for v in b.spares.versions().values()} == {2} == {a.work.stage.settled.epoch}
    assert not await a.work.handed_over(0.01)
    # When the last update is undone it is version 2 that a new owner asks for, after this peer has
    # said that it leaves.
    leaving = asyncio.ensure_future(a.work.handed_over(60.0))
    await asyncio.sleep(0)
    for key in a.work.describe(1, StateKind.OPTIMIZER, 2, "")[1]:
        a.work.state_export.served(StateKind.OPTIMIZER, a.work.stage.settled, key)
    assert await leaving


async def test_an_owner_leaving_mid_epoch_gives_its_final_state(rig: Any, alone: Any) -> None:
    a, b, c, plan = await rig.trained(CELL, 4)
    last = await rig.begun((a, b, c), shared(a, b, c), plan)
    await rig.copied(b)  # of version 4, which this epoch starts from
    leaving = asyncio.ensure_future(a.work.handed_over(60.0))
    await rig.average(last, a, b, c)
    assert not leaving.done()
    await rig.epoch(rig.plan((b, c), shared(c, b, c), last, moved=dict.fromkeys(OF_A, a)), b, c)
    assert await leaving
    assert [e.fields["epoch"] for e in a.events("handed-over")] == [5]
    alone.epochs([CELL] * 5 + ["bc"])
    same(c.parameters(), alone.parameters)
    assert c.taking.age == c.taking.lost == 0


async def test_an_owner_leaving_in_its_first_epoch_awaits_its_state(rig: Any) -> None:
    a, b = await rig.add("a", "b")
    first = await rig.begun((a, b), shared(a, b, b))
    leaving = asyncio.ensure_future(a.work.handed_over(60.0))
    await rig.average(first, a, b)
    assert not leaving.done()
    await rig.epoch(rig.plan((b,), shared(b, b, b), first, moved=dict.fromkeys(OF_A, a)), b)
    assert await leaving
    assert b.owner.staged(1) == set(rig.shapes)
    assert b.taking.lost == 0


async def test_half_of_it_is_not_all_of_it(rig: Any) -> None:
    a, b, c, plan = await rig.trained(CELL, 2, buddy_every=0)
    assert not await a.work.handed_over(0.01)
    assert [e.fields["parts"] for e in a.events("not-handed-over")] == [2]
    await rig.epoch(
        rig.plan((b, c), {**shared(b, b, c), "layers.0.norm": c}, plan, moved={"layers.0.a": a}),
        b,
        c,
    )
    assert not await a.work.handed_over(0.01)
    assert [e.fields["parts"] for e in a.events("not-handed-over")] == [2, 1]
    here = a.work.stage.version
    served = a.work.state_export.served
    for key in ("exp_avg", "exp_avg_sq"):
        served(StateKind.OPTIMIZER, here, f"layers.0.norm/{key}")
    assert not await a.work.handed_over(0.01), "one tensor of it is still here only"
    served(StateKind.SPARE, here, "layers.0.norm/steps")
    served(StateKind.OPTIMIZER, Version(1, ""), "layers.0.norm/steps")
    assert not await a.work.handed_over(0.01), "a copy, or old state, is not it"
    served(StateKind.OPTIMIZER, here, "layers.0.norm/steps")
    assert await a.work.handed_over(0.01)


async def test_a_peer_that_has_nobody_to_give_to_or_nothing_to_give_does_not_wait(rig: Any) -> None:
    a, b = await rig.add("a", "b")
    plan = await rig.train((a, b), shared(a, a, a), 2)
    assert await b.work.handed_over(1000.0)
    await rig.train((a,), shared(a, a, a), 1, plan)
    async with asyncio.timeout(60):
        assert not await a.work.handed_over(1000.0)
    assert "nobody else" in a.events("not-handed-over")[0].text


async def test_a_liar_cannot_make_a_copy_newer_than_the_swarm(rig: Any, alone: Any) -> None:
    a, b, c, plan = await rig.trained(CELL, 4, alone)
    await rig.net.kill(a.me)
    last = rig.plan((b, c), shared(b, b, c), plan)
    await rig.begin(last, c)
    for name, version in zip(OF_A, (Version(10**6, ""), Version(3, "f" * 32)), strict=True):
        c.spares.put(
            name, version, {k: torch.zeros_like(t) for k, t in alone.saved[2][name].items()}
        )
    await rig.begin(last, b)
    await rig.averaged(last, b, c)
    same(b.parameters(), alone.stepped("bc", 4, dict.fromkeys(OF_A, 2)))


async def test_state_that_cannot_be_is_refused_and_its_sender_counted(rig: Any, alone: Any) -> None:
    a, b, c, plan = await rig.trained(CELL, 5, alone)
    b.spares.get("layers.0.a").state["momentum"].fill_(float("nan"))
    await rig.net.kill(a.me)
    await rig.epoch(rig.plan((b, c), shared(c, b, c), plan), b, c)
    same(c.parameters(), alone.stepped("bc", 5, {"layers.0.a": 0, "layers.0.norm": 4}))
    assert [(p, w) for p, _, w in c.transport.faults] == [(b.me, 1.0)]
    assert (c.taking.lost, c.taking.age) == (1, 1)


def test_state_that_local_devices_take_over_holds_nobody_up_who_closes() -> None:
    """The devices may be in the middle of a step, and the event loop closes arrivals."""
    begun = threading.Event()
    may_end = threading.Event()

    def keep(name: str, state: State) -> State:
        begun.set()
        assert may_end.wait(LONG_S)
        return state

    owner = Owner(OptimSettings(), 0, steps=SimpleNamespace(keep=keep))  # pyright: ignore
    engines: Any = SimpleNamespace(owner=owner)
    parts: Any = SimpleNamespace(shapes={"norm.weight": (4,)})
    taking = StateImport(parts, engines, Spares(), VersionTrail(), 1, PeerId("a"), Tasks("test"))
    arrival = Arrival(cast(Plan, None), parts.shapes)
    state = {"steps": torch.ones(1), "exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4)}
    with ThreadPoolExecutor(2) as pool:
        put = pool.submit(taking._put, arrival, {"norm.weight": StateReplica(Version(2), state)})
        try:
            assert begun.wait(LONG_S)
            assert pool.submit(arrival.close).result(LONG_S)
        finally:
            may_end.set()
        assert put.result(LONG_S) == (0, {})
    assert owner.names() == (), "its step has begun without it"


class Deliveries:
    """Parts with state that another peer gives once it is released."""

    def __init__(self, *names: str) -> None:
        self.shapes = dict.fromkeys(names, (4,))
        self.released = {name: asyncio.Event() for name in names}

    def batches(self, names: Sequence[str]) -> list[list[str]]:
        return [[name] for name in names]

    async def fetch(
        self, donor: PeerId, kind: StateKind, version: Version, names: Sequence[str], tries: int
    ) -> StateSnapshot:
        (name,) = names
        await self.released[name].wait()
        state = {"steps": torch.ones(1), "exp_avg": torch.zeros(4), "exp_avg_sq": torch.zeros(4)}
        return StateSnapshot(version, {f"{name}/{key}": t for key, t in state.items()}, {})


@asynccontextmanager
async def taken_over(*names: str) -> AsyncIterator[tuple[StateImport, Deliveries, Owner]]:
    """Parts that have moved here, each from another peer."""
    me = PeerId("a")
    parts = Deliveries(*names)
    owner = Owner(OptimSettings(), 0)
    engines: Any = SimpleNamespace(owner=owner, journal=Journal())
    tasks = Tasks("test")
    taking = StateImport(cast(Parts, parts), engines, Spares(), VersionTrail(), 1, me, tasks)
    moved = {name: PeerId(f"from {name}") for name in names}
    members = (PlanMember(me, 1),)
    plan = Plan(3, 1, me, members, (), dict.fromkeys(names, me), moved)
    taking.expect(plan, names, ())
    try:
        async with asyncio.timeout(LONG_S):
            yield taking, parts, owner
    finally:
        await tasks.close()


NO_END_S = 10 * LONG_S / WAIT_SHARE
"""Deadline of a round in which a step waits longer for state than a test does."""


async def test_a_step_waits_for_the_state_of_its_own_parts_only() -> None:
    async with taken_over("early", "late") as (taking, parts, owner):
        parts.released["early"].set()
        await taking.ready(("early",), NO_END_S)
        assert owner.names() == ("early",)


async def test_a_step_gives_up_the_state_of_its_own_parts_only() -> None:
    async with taken_over("early", "late") as (taking, parts, owner):
        await taking.ready(("early",), 0.0)
        assert taking.lost == 1
        for released in parts.released.values():
            released.set()
        await taking.ready(("late",), NO_END_S)
        assert owner.names() == ("late",), "the other part's step has begun without its state"
        assert taking.lost == 1


async def test_the_steps_of_a_round_share_the_time_for_which_they_wait() -> None:
    async with taken_over("early", "late") as (taking, _, owner):
        (arrival,) = taking._arrivals
        arrival._waited_s = WAIT_SHARE * NO_END_S  # for the first one
        await taking.ready(("late",), NO_END_S)
        assert (owner.names(), taking.lost) == ((), 1)
