"""Checkpoints that cannot be read and disks without room: the epochs go on, the operator is told,
and nothing else is lost."""

import asyncio
import errno
import os
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from node.averaging.strategies.outer import REMOVED
from node.checkpoint import files
from node.coordinator.kit import Callbacks, Kit
from node.coordinator.presence import View
from node.coordinator.service import Training
from node.coordinator.vitals import Vitals
from node.core.clock import SystemClock
from node.core.errors import Refused
from node.core.ids import PeerId
from node.core.journey import Version
from node.core.tasks import Tasks
from node.epoch import events as ev
from node.epoch.member import MemberState
from node.stage.local_checkpoints import AGAIN_S
from protos import training_pb2 as pb
from tests.training.run_facts import facts


def taking_part(peer: Any, on_error: Any = None) -> Training:
    """Training of a rig's peer, without other peers."""
    identity: Any = SimpleNamespace(peer_id=peer.me)
    kit = Kit(
        peer.me,
        1,
        facts(stages=1, read=peer.work.read),
        peer.work,
        peer.transport,
        SystemClock(),
        peer.journal,
        Vitals(),
        Tasks("training", on_error),
        Callbacks(),
        on_error,
    )
    return Training(kit, identity, lambda: View({}))


def stands(t: Training, at: Version) -> None:
    """The member of `t` has this version in place."""
    work = t.kit.work
    placed = ev.VersionPlaced(at, work.local_checkpoints.versions(), work.tokens)
    t.member.handle(placed, 0.0)


async def written(rig: Any, epochs: int) -> tuple[Any, dict[str, Any]]:
    """A peer that owns all parts, with a checkpoint of every epoch, and the owners."""
    a, last = await rig.trained("a", epochs, every=1)
    owners = dict.fromkeys(rig.shapes, a)
    await rig.begun((a,), owners, last)
    await a.work.local_checkpoints.saved()
    return a, owners


async def test_an_unreadable_checkpoint_is_declined_for_an_older_one(
    rig: Any,
) -> None:
    a, owners = await written(rig, 4)
    two, three, four = a.work.local_checkpoints.versions()
    path = a.store.path(1, three.epoch) / "optimizer.safetensors"
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 0xFF
    path.write_bytes(raw)

    t = taking_part(a)
    stands(t, four)
    spoilt, back = (rig.plan((a,), owners, epoch=v.epoch, lineage=v.lineage) for v in (three, two))
    refused = await t.happens(ev.PlanArrived(spoilt))
    assert f"epoch {three.epoch} cannot be put in place" in refused
    assert (t.member.at, t.member.state, a.work.stage.version) == (four, MemberState.IDLE, four), (
        "it stands where it stood"
    )
    assert {two, three} & {*t.member.reachable} == {two}
    assert len(a.events("restore-failed")) == 1

    assert await t.happens(ev.PlanArrived(back)) is None
    assert (t.member.at, t.member.state, a.work.stage.version) == (two, MemberState.RUN, two)
    await t.close()


async def test_a_checkpoint_of_a_run_by_push_sum_is_refused_by_name(rig: Any) -> None:
    a, _ = await written(rig, 2)
    *_, newest = a.work.local_checkpoints.versions()
    found = a.store.load(1, newest.epoch)
    books = [1, 0, 0, {"1": 5}, [], []]
    a.store.save(1, newest.epoch, found.parameters, found.optimizer, {**found.meta, "books": books})
    with pytest.raises(Refused, match="is of a run by push-sum, which was removed") as refusal:
        await a.work.local_checkpoints.load(newest, rig.shapes)
    assert REMOVED["push-sum"] in refusal.value.next_step
    assert newest not in a.work.local_checkpoints.versions(), "nobody is told that it could be used"


async def test_a_plan_is_carried_out_when_who_told_it_hangs_up(rig: Any, monkeypatch: Any) -> None:
    a, owners = await written(rig, 3)
    *_, older, newest = a.work.local_checkpoints.versions()
    begins = asyncio.Event()
    may_end = asyncio.Event()
    restore = a.work.restore

    async def slow(*args: Any) -> None:
        begins.set()
        await may_end.wait()
        await restore(*args)

    monkeypatch.setattr(a.work, "restore", slow)
    t = taking_part(a)
    stands(t, newest)
    plan = rig.plan((a,), owners, epoch=older.epoch, lineage=older.lineage)
    call = asyncio.ensure_future(t.following.told(ev.PlanArrived(plan)))
    await begins.wait()
    call.cancel()
    await asyncio.wait([call])
    may_end.set()
    assert await t.following.told(ev.PlanArrived(plan)) is None
    assert (t.member.state, a.work.stage.version, a.work.plan) == (MemberState.RUN, older, plan)
    await t.close()


async def test_a_plan_that_breaks_a_member_is_told_to_its_parent(
    rig: Any, monkeypatch: Any
) -> None:
    """The sender can do nothing about it; a peer with contradictory parts must stop."""
    a, owners = await written(rig, 3)
    *_, older, newest = a.work.local_checkpoints.versions()

    async def broken(*_: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(a.work, "restore", broken)
    errors: list[str] = []
    t = taking_part(a, lambda name, error: errors.append(f"{name}: {error}"))
    stands(t, newest)
    plan = rig.plan((a,), owners, epoch=older.epoch, lineage=older.lineage)
    with pytest.raises(RuntimeError, match="memory"):
        await t.following.told(ev.PlanArrived(plan))
    assert (t.member.at, a.work.stage.version) == (older, newest)
    assert errors == ["training.told: out of memory"]
    await t.close()


async def test_rounds_of_strangers_wait_for_nothing(rig: Any) -> None:
    (a,) = await rig.add("a")
    t = taking_part(a)
    stands(t, a.work.stage.version)
    plan = rig.plan((a,), dict.fromkeys(rig.shapes, a))
    t.member.handle(ev.PlanArrived(plan), 0.0)
    async with t.following._turns:
        refused = await t._hear(PeerId("stranger"), pb.Note(round=pb.RoundNote()))
    assert (refused, len(t.tasks)) == ("only the leader of this epoch opens its rounds", 0)
    await t.close()


async def test_a_full_disk_is_reported_and_the_next_epoch_is_saved(
    rig: Any, monkeypatch: Any
) -> None:
    a, last = await rig.trained("a", 4, every=3)
    owners = dict.fromkeys(rig.shapes, a)
    (old,) = a.work.local_checkpoints.versions()
    before = {p: p.read_bytes() for p in a.store.root.rglob("*") if p.is_file()}
    assert a.work.local_checkpoints.troubles() == []

    def full(fd: int, data: memoryview) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "write", full)
    monkeypatch.setattr(a.store, "free", lambda: 100)
    (said,) = a.work.local_checkpoints.troubles()
    assert "the disk is full" in said, "seen before a checkpoint fails"
    last = await rig.train((a,), owners, 4, last)
    assert [e.fields["epoch"] for e in a.events("checkpoint-failed")] == [6]
    (said,) = a.work.local_checkpoints.troubles()
    assert "no room to write a checkpoint" in said
    assert {p: p.read_bytes() for p in a.store.root.rglob("*") if p.is_file()} == before
    assert a.work.local_checkpoints.versions() == (old,)

    monkeypatch.undo()
    assert a.work.local_checkpoints.troubles() == [said], "there is room, and nothing is written"
    last = await rig.train((a,), owners, 1, last)
    await rig.begun((a,), owners, last)
    await a.work.local_checkpoints.saved()
    assert [v.epoch for v in a.work.local_checkpoints.versions()][:2] == [3, 8], (
        "the next epoch, not the next multiple"
    )
    assert len(a.events("checkpoint-again")) == 1


@pytest.mark.parametrize("newcomer", [False, True])
async def test_the_last_checkpoint_of_a_complete_run_is_written_once_there_is_room(
    rig: Any, monkeypatch: Any, newcomer: bool
) -> None:
    a, plan = await rig.trained("a", 2, every=100, buddy_every=0)
    owners = dict.fromkeys(rig.shapes, a)
    (late,) = await rig.add("late", every=100, buddy_every=0)
    before = await rig.begun((a,), owners, plan, listeners=(late,))
    await late.work.begin(before, True)
    await rig.averaged(before, a, late)
    last = rig.plan((a, late), owners, before, paths=())
    await a.work.settle(last.epoch, last)
    peer = late if newcomer else a
    local = peer.work.local_checkpoints
    now = 0.0
    tried = list[float]()

    def full(fd: int, data: memoryview) -> None:
        tried.append(now)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def tick() -> None:
        peer.work.mind_the_disk()
        await local.saved()

    monkeypatch.setattr(local, "_now", lambda: now)
    with monkeypatch.context() as disk:
        disk.setattr(files, "write", full)
        disk.setattr(peer.store, "free", lambda: 100)
        await peer.work.finish(last)
        await local.saved()
        now = 2 * AGAIN_S
        await tick()
        assert (len(tried), local.versions()) == (1, ()), "not tried without room"
        disk.setattr(peer.store, "free", lambda: 1 << 40)
        disk.setattr(local, "_lacks", Mock(side_effect=["", "full again", *[""] * 9]))
        await tick()
        assert len(tried) == 2
        (said,) = local.troubles()
        assert "no room to write a checkpoint" in said, "until something is written"
        now += AGAIN_S - 1
        await tick()
        assert len(tried) == 2, "a disk that fills and empties is not tried all the time"
    assert local.troubles() == [said]
    now += 1
    await tick()
    assert local.versions() == (last.base,)
    assert local.troubles() == []
    await tick()
    assert len(peer.events("checkpoint-written")) == 1
