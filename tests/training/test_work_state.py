"""Versions of a stage at one peer: checkpoints with their history, copies that must be the swarm's,
late state."""

import asyncio
import dataclasses
import threading
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import pytest
import torch

from node.checkpoint.errors import NoDonor
from node.checkpoint.fetch import Partial
from node.checkpoint.service import StateService, Unserved
from node.checkpoint.state import StateKind
from node.core.errors import NetworkFault, Refused
from node.core.ids import PeerId
from node.core.journey import Losses, Version, lineage_after
from node.core.samples import SampleClass
from node.epoch.plan_context import makes
from protos import state_pb2
from tests.training.conftest import same, shared

LATER = Version(9, "ee" * 16)


async def test_checkpoints_carry_their_history(rig: Any) -> None:
    a, b, plan = await rig.trained("ab", 4, every=2)
    share = (SampleClass(1, 1, 9, (3, 5)), SampleClass(2, 2, 10))
    before = Losses(4.5, 4.25)
    last = await rig.begun((a, b), shared(a, b), plan, cursor=share, reference=before)
    await rig.copied(a, b)
    (two, four) = a.work.local_checkpoints.versions()
    assert (two.epoch, four) == (2, last.base)
    assert four.lineage == lineage_after(plan, ()) != two.lineage
    assert b.work.local_checkpoints.versions() == (two, four), (
        "the stages of a swarm can be matched"
    )
    assert a.store.metas(1)[4]["tokens"] == last.tokens > 0
    past = a.work.local_checkpoints.recall(four)
    assert (past.cursor, past.owners) == (share, shared(a.me, b.me))
    assert (past.tokens, past.reference) == (last.tokens, before)
    assert a.work.local_checkpoints.recall(Version(4, "f" * 32)) is None
    assert a.work.local_checkpoints.recall(Version(3, two.lineage)) is None


async def test_members_of_a_plan_are_expected_before_its_round(rig: Any) -> None:
    a, b, plan = await rig.trained("ab", 1)
    last = await rig.begun((a, b), shared(a, b), plan)
    planned = a.work.engines.cell._machine._plans[last.epoch]
    assert planned.plan_hash == last.hash
    assert planned.members == {m.peer for m in last.stage(1)} == {a.me, b.me}


async def test_a_checkpoint_brings_back_parameters_state_and_version(rig: Any, alone: Any) -> None:
    a, b, plan = await rig.trained("ab", 3, every=2)
    alone.epochs(["ab"] * 2)
    await a.work.local_checkpoints.saved()
    (two,) = a.work.local_checkpoints.versions()
    await a.work.restore(two)
    assert (a.work.stage.version, a.work.tokens) == (two, a.store.metas(1)[2]["tokens"])
    same(a.parameters(), alone.parameters)
    assert {n: a.owner.through(n) for n in a.owner.names()} == dict.fromkeys(
        ("layers.0.a", "layers.0.norm"), 1
    )
    same(a.owner.state("layers.0.a"), alone.saved[2]["layers.0.a"])
    assert (a.spares.versions(), plan.epoch) == ({}, 2)
    before = a.parameters()
    for other, why in ((Version(2, "f" * 32), "another history"), (Version(7), "there is none")):
        with pytest.raises(Refused, match=why):
            await a.work.restore(other)
    assert all(torch.equal(t, before[n]) for n, t in a.parameters().items())


async def test_checkpoints_without_a_lineage_are_read(
    rig: Any,
) -> None:
    (a,) = await rig.add("a")
    parameters = a.work.stage.parameters()
    cursor = {"cursor": [8, [3]], "owners": {"layers.0.a": "a"}}
    a.store.save(1, 2, parameters, {}, cursor)
    a.store.save(1, 4, parameters, {}, {**cursor, "lineage": "no hex"})
    a.store.save(1, 6, {"other": torch.zeros(2)}, {}, cursor)
    assert a.work.local_checkpoints.versions() == (Version(2, ""), Version(6, ""))
    assert a.work.local_checkpoints.troubles() == []
    past = a.work.local_checkpoints.recall(Version(2))
    assert (past.cursor, past.tokens) == ((SampleClass(0, 0, 8, (3,)),), 0)
    assert a.work.local_checkpoints.recall(Version(4)) is None
    await a.work.restore(Version(2))
    assert (a.work.stage.version, a.work.tokens) == (Version(2), 0)
    with pytest.raises(Refused, match="another model"):
        await a.work.restore(Version(6))
    assert a.work.local_checkpoints.versions() == (Version(2, ""),)
    assert "epoch-6: " in a.work.local_checkpoints.troubles()[0]


@pytest.mark.parametrize(
    "said",
    [[], [8], [8, 3], [8, [9]], [8, [3, 3]], [8, [3], 0], 8, None, [[0, 1, 3, []]], [True, []]],
)
async def test_a_checkpoint_with_an_impossible_cursor_is_refused(rig: Any, said: Any) -> None:
    (a,) = await rig.add("a")
    meta = {"cursor": said, "owners": {"layers.0.a": "a"}}
    a.store.save(1, 2, a.work.stage.parameters(), {}, meta)
    assert a.work.local_checkpoints.recall(Version(2)) is None


async def test_a_peer_that_copies_takes_only_what_the_swarm_committed(rig: Any) -> None:
    *everybody, plan = await rig.trained("abc", 1, buddy_every=0)
    a, b, c = everybody
    last = await rig.begun(everybody, shared(a, b), plan)
    await rig.average(last, a, b, dead=(c.me,))
    good = a.work.stage.digest
    made = makes(last, ())
    wrong = await c.work.copy(last, rig.round(last, 1, sources=(a.me,), digest="0" * 64))
    assert set(wrong.missing) == set(rig.shapes)
    assert [(p, w) for p, _, w in c.transport.faults] == [(a.me, 1.0)]
    # A source at another version is no liar, it only has nothing to give.
    other = dataclasses.replace(rig.round(last, 1, sources=(a.me,), digest=good), dropped=(0,))
    assert (await c.work.copy(last, other)).missing
    assert len(c.transport.faults) == 1
    ended = await c.work.copy(last, rig.round(last, 1, sources=(a.me, b.me), digest=good))
    assert not ended.missing
    assert await c.work.adopt(last) == good
    assert (c.work.stage.version, c.work.tokens) == (made, last.tokens + 30)
    assert c.work.fetching == 1.0


class Breaks(StateService):
    """Service that gives only its largest tensor whole."""

    async def pieces(
        self, request: state_pb2.FetchRequest, peer: PeerId
    ) -> AsyncGenerator[state_pb2.StateChunk, None]:
        if self.broken and request.name != "layers.0.a":
            raise Unserved(grpc.StatusCode.UNAVAILABLE, "broken")
        async for chunk in super().pieces(request, peer):
            self.given += len(chunk.data)
            yield chunk

    broken = True
    given = 0


async def test_a_download_resumes_though_training_went_on(rig: Any, tmp_path: Any) -> None:
    a, plan = await rig.trained("a", 2, service=Breaks)
    (c,) = await rig.add("c")
    incoming = tmp_path / "incoming"
    partial = Partial(incoming)
    with pytest.raises(NoDonor):
        await c.work.join((a.me,), None, partial=partial)
    assert (c.work.fetching, len(list(incoming.glob("*.piece")))) == (1.0, 1)
    was = a.work.stage.version
    given = a.state.given
    await rig.epoch(rig.plan((a,), shared(a, a), plan), a)
    a.state.broken = False
    await c.work.join((a.me,), None, partial=partial)
    assert c.work.stage.version == was != a.work.stage.version
    assert a.state.given == sum(t.nbytes for t in c.parameters().values()), "nothing comes twice"
    assert given == c.parameters()["layers.0.a"].nbytes
    assert not incoming.exists()


class Waits(StateService):
    """Service that gives optimizer state only when it may."""

    async def pieces(
        self, request: state_pb2.FetchRequest, peer: PeerId
    ) -> AsyncGenerator[state_pb2.StateChunk, None]:
        if StateKind.of(request.kind) is StateKind.OPTIMIZER:
            self.asked.set()
            await self.let.wait()
        async for chunk in super().pieces(request, peer):
            yield chunk

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.asked = asyncio.Event()
        self.let = asyncio.Event()


async def test_a_step_stops_waiting_and_ignores_late_state(rig: Any, alone: Any) -> None:
    a, b, plan = await rig.trained("ab", 3, alone, service=Waits, buddy_every=0)
    moved = {"layers.0.a": a, "layers.0.norm": a}
    last = await rig.begun((b,), shared(b, b), plan, moved=moved)
    await a.state.asked.wait()
    await rig.averaged(last, b, deadline_s=8.0)
    same(b.parameters(), alone.stepped("b", 3, dict.fromkeys(moved, 0)))
    (lost,) = b.events("state-lost")
    assert "a, which owned it, did not give it in time" in lost.text
    taking = b.taking._arrivals[0].task
    a.state.let.set()
    await asyncio.wait([taking])
    assert not b.owner.state("layers.0.a"), "it came after the step"
    await rig.begun((b,), shared(b, b), last)
    assert b.owner.through("layers.0.a") == 3
    same(b.owner.state("layers.0.a")["steps"], torch.ones(1))


async def test_state_is_of_the_version_that_was_asked_for(rig: Any) -> None:
    a, b, plan = await rig.trained("ab", 3, buddy_every=0)
    here = a.work.stage.version
    before = a.work.stage.settled
    assert here.epoch == before.epoch + 1
    states = []
    for version in (here, before):
        at, found = a.work.describe(1, StateKind.OPTIMIZER, version.epoch, version.lineage)
        assert at == version
        assert {k.rpartition("/")[0] for k in found} == {"layers.0.a", "layers.0.norm"}
        states.append(found["layers.0.a/momentum"])
    assert not torch.equal(*states)
    assert a.work.describe(1, StateKind.OPTIMIZER, None, "")[0] == before, (
        "what may still be undone is not the newest"
    )
    for nowhere in (
        (1, StateKind.OPTIMIZER, here.epoch, "f" * 32),
        (1, StateKind.OPTIMIZER, 1, ""),
        (2, StateKind.OPTIMIZER, None, ""),
        (1, StateKind.PARAMETERS, here.epoch, "f" * 32),
    ):
        assert a.work.describe(*nowhere) is None, nowhere
    assert a.work.describe(1, StateKind.PARAMETERS, None, "")[0] == here
    # The plan's starting version is given until the next plan comes.
    at, found = a.work.describe(1, StateKind.PARAMETERS, before.epoch, before.lineage)
    assert at == before
    assert found.keys() == a.work.stage.shapes.keys()
    newest = a.work.stage.parameters()
    assert not any(torch.equal(tensor, newest[name]) for name, tensor in found.items())
    assert a.work.listing(1, StateKind.OPTIMIZER) == dict.fromkeys(
        ("layers.0.a", "layers.0.norm"), before
    )
    assert (a.work.listing(2, StateKind.OPTIMIZER), plan.epoch) == ({}, before.epoch)
    a.work.stage.settle()
    assert a.work.describe(1, StateKind.PARAMETERS, before.epoch, before.lineage) is None


async def test_a_checkpoint_outlives_who_waits_for_it(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, plan = await rig.trained("a", 1, every=1)
    write = a.store.save
    goes_on = threading.Event()
    monkeypatch.setattr(
        a.store, "save", lambda *about, **how: goes_on.wait(60) and write(*about, **how)
    )
    await rig.begun((a,), dict.fromkeys(rig.shapes, a), plan)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0):
            await a.work.local_checkpoints.saved()
    goes_on.set()
    await a.work.close()
    assert a.work.local_checkpoints.versions() == (a.work.stage.version,)


async def test_a_peer_catching_up_at_the_end_writes_no_checkpoint(
    rig: Any,
) -> None:
    a, plan = await rig.trained("a", 3, every=100, buddy_every=0)
    (late,) = await rig.add("late", every=100, buddy_every=0)
    done = rig.plan((a,), shared(a, a), plan, listeners=(late,), paths=())
    await a.work.settle(done.epoch, done)
    for peer in (a, late):
        await peer.work.finish(done)
        await peer.work.local_checkpoints.saved()
    assert [p.work.local_checkpoints.versions() for p in (a, late)] == [(done.base,), ()]


async def test_parameters_and_momentum_continue_after_skipped_epochs(rig: Any, alone: Any) -> None:
    """A stage that was left out for some epochs goes on from its last version, and no epoch counts
    twice."""
    a, plan = await rig.trained("a", 3, alone, every=1)
    owners = dict.fromkeys(rig.shapes, a)
    # Its last version becomes final, then the swarm's version is LATER.
    stage = a.work.stage
    held = stage.version
    await a.work.settle(
        held.epoch, rig.plan((a,), owners, plan, epoch=LATER.epoch, lineage=LATER.lineage)
    )
    digest = stage.digest
    await a.work.go_to(LATER, "left out")
    assert (stage.version, stage.settled, stage.digest) == (LATER, LATER, digest)
    back = rig.plan((a,), owners, plan, epoch=LATER.epoch, lineage=LATER.lineage, stood={1: held})
    a.plan = None
    await rig.epoch(back, a)
    assert a.work.stage.version.epoch == LATER.epoch + 1
    assert not [*a.events("state-lost"), *a.events("momentum-old")]
    expected = alone.stepped("a", LATER.epoch, dict.fromkeys(rig.shapes, 3))
    torch.testing.assert_close(a.parameters(), expected)
    # A checkpoint of the version before is not written anew under the epoch that became final late.
    await a.work.local_checkpoints.saved()
    assert held not in a.work.local_checkpoints.versions()
    assert a.owner.through("layers.0.a") == LATER.epoch - 1


async def test_held_out_text_that_does_not_come_is_given_up(rig: Any) -> None:
    class Away:
        def held_out_count(self) -> int:
            return 4

        async def fetch_held_out(self, i: int) -> Any:
            await asyncio.get_running_loop().create_future()

    (a,) = await rig.add("a")
    a.work.engines = dataclasses.replace(a.work.engines, text=Away())
    with pytest.raises(NetworkFault, match="held-out text did not come"):
        await a.work.evaluate(rig.plan((a,), {}, deadline_s=0.05))
