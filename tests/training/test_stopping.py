"""The checkpoint that a stop writes: versions that are committed, or may be, come back to the
bit."""

import asyncio
import errno
import os
import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from node.checkpoint import files
from node.checkpoint.schedule import CheckpointSchedule
from node.checkpoint.settings import CheckpointSettings
from node.core.errors import LocalFault
from node.core.ids import PeerId
from node.epoch import events as ev
from node.epoch.member import MemberState
from node.epoch.plan_context import PlanContext, makes
from node.optim.settings import OptimSettings
from node.stage.engines import Engines
from tests.training.conftest import Rig, shared
from tests.training.test_damaged import taking_part
from tests.training.test_meeting import DELTAS, _words, two_and_one

LIMIT_S = 60.0
RARELY = 100_000
"""Epochs between checkpoints, so that only a stop writes one."""


def bits(state: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, bytes]:
    return {
        f"{name}/{key}": t.contiguous().view(torch.uint8).numpy().tobytes()
        for name, part in state.items()
        for key, t in part.items()
    }


async def test_a_stop_in_an_epoch_keeps_the_version_it_begins_from(rig: Any) -> None:
    a, b, plan = await rig.trained("ab", 3, every=RARELY)
    running = await rig.begun((a, b), shared(a, b), plan)
    assert await a.work.keep(LIMIT_S)
    assert a.work.local_checkpoints.versions() == (running.base,)
    assert a.work.local_checkpoints.recall(running.base) == PlanContext.before(running)


async def test_a_stop_before_the_next_plan_keeps_both_versions(rig: Any) -> None:
    """Others may have heard that the newer one is committed, or may have to undo it."""
    a, b, plan = await rig.trained("ab", 3, every=RARELY)
    assert await a.work.keep(LIMIT_S)
    made = makes(plan, ())
    assert a.work.local_checkpoints.versions() == (plan.base, made)
    tokens = plan.tokens + rig.round(plan).tally.tokens
    after = PlanContext.after(plan, (), plan.owners, tokens)
    assert a.work.local_checkpoints.recall(made) == after
    assert a.work.local_checkpoints.recall(plan.base) == PlanContext.before(plan)


async def test_a_stop_in_the_first_epoch_of_a_newcomer_keeps_its_version(rig: Any) -> None:
    a, b, plan = await rig.trained("ab", 2, every=RARELY)
    (late,) = await rig.add("late", every=RARELY)
    listens = await rig.begun((a, b), shared(a, b), plan, listeners=(late,))
    await late.work.begin(listens, True)
    await rig.averaged(listens, a, b, late)
    first = rig.plan((a, b, late), shared(a, b), listens)
    await late.work.begin(first, False)
    assert late.work.stage.version == late.work.stage.settled == first.base
    assert await late.work.keep(LIMIT_S)
    assert late.work.local_checkpoints.versions() == (first.base,)
    assert late.work.local_checkpoints.recall(first.base) == PlanContext.before(first)


@pytest.mark.parametrize("parameters", ["fp32", "bf16"])
async def test_training_goes_on_to_the_bit_after_a_stop(rig: Any, parameters: str) -> None:
    rig.optim = OptimSettings(parameters=parameters)
    a, b, plan = await rig.trained("ab", 3, every=RARELY, buddy_every=0)
    for peer in (a, b):
        assert await peer.work.keep(LIMIT_S)
    made = makes(plan, ())
    last = await rig.train((a, b), shared(a, b), 2, plan)
    whole = a.parameters(), bits(a.states()), bits(b.states())

    async with rig.again() as again:
        c, d = await again.add("a", "b", every=RARELY, buddy_every=0)
        for peer in (c, d):
            assert max(peer.work.local_checkpoints.versions()) == made
            await peer.work.restore(made)
        assert (await again.train((c, d), shared(c, d), 2, plan)).epoch == last.epoch
        found = c.parameters(), bits(c.states()), bits(d.states())
    assert found[0].keys() == whole[0].keys()
    assert all(torch.equal(found[0][name], whole[0][name]) for name in whole[0])
    assert found[1:] == whole[1:]


async def test_a_stop_keeps_anchor_and_rounding_errors_of_each_version(rig: Rig) -> None:
    cells = await two_and_one(rig, replace(DELTAS, codec="int8", feedback=True), every=RARELY)
    c = cells.everybody[-1]
    await cells.give(7)
    before = c.anchored, _words(c)
    await cells.land(7)
    after = c.anchored, _words(c)
    assert before[0] is not after[0]
    assert await c.work.keep(LIMIT_S)
    older, newer = c.work.local_checkpoints.versions()
    for version, (state, words) in ((older, before), (newer, after)):
        await c.work.restore(version)
        assert all(torch.equal(c.anchored.anchor[n], state.anchor[n]) for n in state.anchor)
        assert all(torch.equal(c.anchored.momentum[n], state.momentum[n]) for n in state.momentum)
        assert all(torch.equal(_words(c)[n], words[n]) for n in words)


async def test_a_stop_between_anchor_and_parameters_keeps_those_of_one_version(
    rig: Rig, monkeypatch: Any
) -> None:
    cells = await two_and_one(rig, replace(DELTAS, codec="int8", feedback=True), every=RARELY)
    c = cells.everybody[-1]
    await cells.give(7)
    state = c.anchored
    words = _words(c)
    taken = asyncio.Event()
    aside = Engines.aside

    async def stops(engines: Engines, work: Any, *about: Any) -> Any:
        if engines is c.work.engines and work == c.work.stage.adopt:
            taken.set()
            await asyncio.Event().wait()
        return await aside(engines, work, *about)

    with monkeypatch.context() as m:
        m.setattr(Engines, "aside", stops)
        landing = asyncio.ensure_future(cells.land(7))
        await taken.wait()
        landing.cancel()
        await asyncio.wait([landing])
    assert c.anchored is not state
    assert await c.work.keep(LIMIT_S)
    (kept,) = c.work.local_checkpoints.versions()
    assert kept == c.work.stage.version
    await c.work.restore(kept)
    assert all(torch.equal(c.anchored.anchor[n], state.anchor[n]) for n in state.anchor)
    assert all(torch.equal(c.anchored.momentum[n], state.momentum[n]) for n in state.momentum)
    assert all(torch.equal(_words(c)[n], words[n]) for n in words)


async def test_what_is_on_disk_is_not_written_again(rig: Any, monkeypatch: Any) -> None:
    a, plan = await rig.trained("a", 2, every=1)
    await rig.begun((a,), dict.fromkeys(rig.shapes, a), plan)
    await rig.copied(a)
    monkeypatch.setattr(a.store, "save", None)
    assert await a.work.keep(LIMIT_S)


async def test_a_peer_that_took_no_part_or_writes_nothing_keeps_nothing(rig: Any) -> None:
    (idle,) = await rig.add("idle", every=RARELY)
    assert await idle.work.keep(LIMIT_S)
    never, plan = await rig.trained("n", 2, every=0)
    assert await never.work.keep(LIMIT_S)
    assert [p.work.local_checkpoints.versions() for p in (idle, never)] == [(), ()]
    assert plan.epoch == 1


async def test_the_state_is_kept_for_a_run_that_stops_also_where_nothing_is_written(
    rig: Any,
) -> None:
    never, plan = await rig.trained("n", 2, every=0)
    assert await never.work.keep(LIMIT_S, always=True)
    assert never.work.local_checkpoints.versions() == (plan.base, makes(plan, ()))


async def test_a_stop_gives_up_the_writing_of_an_older_version(rig: Any, monkeypatch: Any) -> None:
    a, plan = await rig.trained("a", 2, every=2)
    begins = threading.Event()
    written = list[int]()
    write = a.store.save

    def slow(stage: int, epoch: int, *about: Any, goes_on: Any, **how: Any) -> Any:
        if epoch == 2:
            begins.set()
            while goes_on():
                threading.Event().wait(0.01)
        path = write(stage, epoch, *about, goes_on=goes_on, **how)
        written.append(epoch)
        return path

    monkeypatch.setattr(a.store, "save", slow)
    owners = dict.fromkeys(rig.shapes, a)
    second = await rig.begun((a,), owners, plan)
    await asyncio.to_thread(begins.wait, LIMIT_S)
    await rig.averaged(second, a)
    third = await rig.begun((a,), owners, second)
    assert await a.work.keep(LIMIT_S)
    assert (third.epoch, written) == (3, [3])
    assert a.work.local_checkpoints.versions() == (third.base,)


async def test_a_stop_that_takes_too_long_says_so(rig: Any, monkeypatch: Any) -> None:
    a, plan = await rig.trained("a", 2, every=RARELY)
    ended = threading.Event()

    def endless(*about: Any, goes_on: Any, **how: Any) -> None:
        while goes_on():
            threading.Event().wait(0.01)
        ended.set()
        raise files.Interrupted()

    monkeypatch.setattr(a.store, "save", endless)
    assert not await a.work.keep(0.05)
    assert await asyncio.to_thread(ended.wait, LIMIT_S), "the thread ends"
    assert len(a.events("checkpoint-late")) == 1
    assert plan.epoch == 1


async def test_a_full_disk_fails_a_stop_and_leaves_what_is_there(
    rig: Any, monkeypatch: Any
) -> None:
    a, plan = await rig.trained("a", 2, every=1)
    await rig.copied(a)
    before = a.work.local_checkpoints.versions()

    def full(fd: int, data: memoryview) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "write", full)
    assert not await a.work.keep(LIMIT_S)
    assert a.work.local_checkpoints.versions() == before
    assert "no room" in a.events("checkpoint-failed")[-1].text
    assert plan.base in before


async def test_a_disk_that_refuses_is_not_tried_again_in_the_same_epoch(
    rig: Any, monkeypatch: Any
) -> None:
    a, plan = await rig.trained("a", 3, every=RARELY)
    local = a.work.local_checkpoints
    now = 0.0
    tried = list[float]()
    schedule = CheckpointSchedule(CheckpointSettings(within_s=30.0))
    monkeypatch.setattr(local, "_schedule", schedule)
    monkeypatch.setattr(local, "_now", lambda: now)

    def refuses(*about: Any, **how: Any) -> None:
        tried.append(now)
        raise LocalFault("no quota is left", "")

    monkeypatch.setattr(a.store, "save", refuses)
    assert not local.settled(0), "no power of two"
    now = 3.0
    await rig.begun((a,), dict.fromkeys(rig.shapes, a), plan)
    assert tried == []
    while now < 100.0:
        now += 0.25
        a.work.mind_the_disk()
        await local.saved()
    assert len(tried) == len(a.events("checkpoint-failed")) == 1
    local.settled(5)
    now += 30.0
    a.work.mind_the_disk()
    await local.saved()
    assert len(tried) == 2, "a newer version is another reason"


@pytest.mark.parametrize("error", [RuntimeError("the device is lost"), ValueError("no such name")])
async def test_a_stop_goes_on_when_the_state_cannot_be_read(
    rig: Any, monkeypatch: Any, error: Exception
) -> None:
    a, _ = await rig.trained("a", 2, every=RARELY)

    def fails(*about: Any, **how: Any) -> None:
        raise error

    monkeypatch.setattr(a.store, "save", fails)
    assert not await a.work.keep(LIMIT_S)
    assert str(error) in a.events("checkpoint-failed")[-1].text
    assert {str(e) for e in a.errors} == {str(error)}
    a.errors.clear()


async def test_a_message_under_way_is_carried_out_before_a_stop(rig: Any, monkeypatch: Any) -> None:
    a, plan = await rig.trained("a", 2, every=RARELY)
    t = taking_part(a)
    t.member.handle(ev.VersionPlaced(a.work.stage.version, (), 0), 0.0)
    begins = asyncio.Event()
    goes_on = asyncio.Event()
    begin = a.work.begin

    async def slow(*args: Any) -> None:
        begins.set()
        await goes_on.wait()
        await begin(*args)

    monkeypatch.setattr(a.work, "begin", slow)
    following = rig.plan((a,), dict.fromkeys(rig.shapes, a), plan)
    told = asyncio.ensure_future(t.following.told(ev.PlanArrived(following)))
    await begins.wait()
    closing = asyncio.ensure_future(t.close())
    await asyncio.sleep(0)
    assert not closing.done()
    goes_on.set()
    await closing
    assert await told is None
    assert (t.member.state, a.work.plan) == (MemberState.RUN, following)
    late = rig.plan((a,), dict.fromkeys(rig.shapes, a), following)
    assert await t.happens(ev.PlanArrived(late)) == "this peer stops"
    assert a.work.plan is following


async def test_a_cell_that_divides_is_written_at_once(rig: Any) -> None:
    """An older checkpoint has the samples of both cells."""
    a, plan = await rig.trained("a", 2, every=RARELY)
    founded = rig.plan((a,), dict.fromkeys(rig.shapes, a), plan, parent="f" * 16, paths=())
    await rig.begin(founded, a)
    await rig.copied(a)
    assert a.work.local_checkpoints.versions() == (founded.base,)
    recalled = a.work.local_checkpoints.recall(founded.base)
    assert recalled is not None
    assert recalled.cursor == founded.cursor
    assert recalled.owners == {name: PeerId("a") for name in rig.shapes}
