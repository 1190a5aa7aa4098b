"""Whole pipelines in one process against the model in one piece."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
import torch

from node.core.errors import PeerFault
from node.core.ids import PeerId
from node.pipeline.events import Arrived, Computed, Passed, Settled, Way
from node.pipeline.settings import PipelineLimits


async def test_gradients_and_loss_equal_the_model_in_one_piece(make_swarm):
    swarm = await make_swarm().fill(replicas=2)
    plan = swarm.plan(6)
    swarm.adopt(plan)
    done = await swarm.run(plan)
    assert all(r.counted and r.tokens == 32 for r in done.values())
    swarm.check(plan)
    assert all(not ear.events for ear in swarm.ears.values()), {n: e.events for n, e in swarm.ears.items()}
    assert all(len(room.stash) == 0 and room.stash.used == 0 for room in swarm.rooms.values())


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize(
    ("event", "way"),
    [
        (Arrived, Way.FORWARD),  # before it accepts a forward
        (Computed, Way.FORWARD),  # accepted, its output never leaves
        (Passed, Way.FORWARD),  # its output left, nobody heard DONE
        (Settled, Way.FORWARD),  # between forward and backward
        (Arrived, Way.BACKWARD),  # before it accepts a gradient
        (Computed, Way.BACKWARD),  # during backward
        (Passed, Way.BACKWARD),  # its gradient left, nobody heard DONE
    ],
)
async def test_one_replica_may_die_anywhere(make_swarm, kill_at, event, way, nth):
    swarm = await make_swarm().fill(replicas=2)
    plan = swarm.plan(6)
    swarm.adopt(plan)
    died = kill_at(swarm, "s2a", event, way, nth)
    done = await swarm.run(plan)
    assert died.is_set()
    assert all(r.counted for r in done.values())
    swarm.check(plan, skip_stages=(2,))


async def test_a_tiny_stash_answers_busy_and_everything_finishes(make_swarm):
    swarm = await make_swarm().fill(replicas=1, limits=PipelineLimits(stash_bytes=1, in_flight=6))
    plan = swarm.plan(8)
    swarm.adopt(plan)
    done = await swarm.run(plan)
    assert all(r.counted for r in done.values())
    assert "hop-turned" in swarm.ears["s0a"].events
    cost = swarm.rooms["s1a"].cost(0)
    assert all(swarm.rooms[f"s{s}a"].stash.peak <= cost for s in (1, 2, 3))
    swarm.check(plan)


async def test_a_stage_without_a_live_peer_drops_the_micro_batch(make_swarm):
    swarm = await make_swarm().fill(replicas=2)
    plan = swarm.plan(3)
    swarm.adopt(plan)
    await swarm.kill("s3a")
    await swarm.kill("s3b")
    done = await swarm.run(plan)
    assert not any(r.counted for r in done.values())
    assert swarm.gradients() == ({}, {0: 0, 1: 0, 2: 0})


async def test_a_frozen_replica_is_left_after_the_time_out(make_swarm):
    swarm = await make_swarm(forward_timeout_s=0.5).fill(replicas=2)
    plan = swarm.plan(3)
    swarm.adopt(plan)
    swarm.net.mute(PeerId("s1a"))
    done = await swarm.run(plan)
    assert all(r.counted for r in done.values())
    swarm.check(plan)


async def test_a_micro_batch_past_the_plans_deadline_is_dropped_and_reported(make_swarm):
    swarm = await make_swarm(forward_timeout_s=0.5).fill(replicas=1)
    plan = swarm.plan(2, deadline_s=0.3)
    swarm.adopt(plan)
    swarm.net.mute(PeerId("s2a"))
    done = await swarm.run(plan)
    assert not any(r.counted for r in done.values())


async def test_taking_gradients_closes_the_epoch(make_swarm):
    swarm = await make_swarm(forward_timeout_s=0.5).fill(replicas=1)
    plan = swarm.plan(4)
    swarm.adopt(plan)
    swarm.net.mute(PeerId("s3a"))
    running = asyncio.ensure_future(swarm.run(plan))
    while not swarm.ears["s2a"].seconds.get("compute"):
        await asyncio.wait({running}, timeout=0.01)
    first = swarm.rooms["s0a"].take_gradients(3)
    done = await running
    assert not any(r.counted for r in done.values())
    assert first == ({}, 0) == swarm.rooms["s0a"].take_gradients(3)
    assert swarm.rooms["s0a"].take_gradients(4) == ({}, 0)


async def test_the_last_receipts_are_waited_for_before_gradients_are_taken(make_swarm):
    swarm = await make_swarm().fill(replicas=2)
    outbound = swarm.rooms["s1a"].outbound
    send = outbound.send

    async def slow(peer, way, messages, size, timeout, accepted):
        outcome = await send(peer, way, messages, size, timeout, lambda: None)
        await asyncio.sleep(0.1)
        accepted()
        return outcome

    plan = swarm.plan(4)
    swarm.adopt(plan)
    outbound.send = slow
    await swarm.rooms["s0a"].run(plan.paths, swarm.batch, swarm.results.append)
    # As in a swarm: the end of the epoch is known before its last receipt has arrived everywhere.
    assert swarm.rooms["s1a"].machine.unsure()
    await asyncio.gather(*(room.receipts(3) for room in swarm.rooms.values()))
    assert swarm.gradients()[1] == dict.fromkeys(range(4), 128)


async def test_a_receipt_that_never_comes_does_not_hold_up_the_round(make_swarm):
    swarm = await make_swarm(forward_timeout_s=20.0).fill(replicas=1)
    plan = swarm.plan(1)
    swarm.adopt(plan)
    kept = swarm.rooms["s1a"].outbound.send

    async def deaf(peer, way, *rest):
        return await (asyncio.Event().wait() if way is Way.BACKWARD else kept(peer, way, *rest))

    swarm.rooms["s1a"].outbound.send = deaf
    running = asyncio.ensure_future(swarm.run(plan))
    while not swarm.rooms["s1a"].machine.unsure():
        await asyncio.wait({running}, timeout=0.01)
    await swarm.rooms["s1a"].receipts(3, dropped=(0,))
    await swarm.rooms["s1a"].receipts(3, patience_s=0.05)
    await swarm.rooms["s1a"].receipts(4)
    assert swarm.rooms["s1a"].machine.unsure()
    running.cancel()


async def test_reset_frees_the_stash_and_the_next_epoch_starts_clean(make_swarm):
    swarm = await make_swarm().fill(replicas=1)
    plan = swarm.plan(4)
    swarm.adopt(plan)
    swarm.net.mute(PeerId("s3a"))
    running = asyncio.ensure_future(swarm.run(plan))
    while not len(swarm.rooms["s2a"].stash):
        await asyncio.wait({running}, timeout=0.01)
    for room in swarm.rooms.values():
        room.reset(2)
    assert len(swarm.rooms["s2a"].stash)
    for room in swarm.rooms.values():
        room.reset(3)
    assert not any(r.counted for r in (await running).values())
    swarm.net.mute(PeerId("s3a"), False)
    following = swarm.plan(4, epoch=4)
    swarm.adopt(following)
    assert all(r.counted for r in (await swarm.run(following)).values())
    _, tokens = swarm.gradients(4)
    assert tokens == dict.fromkeys(range(4), 128)
    assert all(room.stash.used == 0 for room in swarm.rooms.values())


async def test_a_frame_that_is_ahead_of_the_plan_waits_for_it(make_swarm):
    swarm = await make_swarm().fill(replicas=1)
    plan = swarm.plan(2)
    for name in ("s0a", "s2a", "s3a"):
        swarm.rooms[name].set_plan(plan)
    late, machine = swarm.rooms["s1a"], swarm.rooms["s1a"].machine
    handle, arrived = machine.handle, asyncio.Event()

    def watched(event, now):
        if isinstance(event, Arrived):
            arrived.set()
        return handle(event, now)

    machine.handle = watched
    running = asyncio.ensure_future(swarm.run(plan))
    await arrived.wait()
    late.set_plan(plan)
    assert all(r.counted for r in (await running).values())
    assert "hop-turned" not in swarm.ears["s0a"].events


async def test_evaluation_and_logits_meet_the_model_of_the_moment(make_swarm):
    swarm = await make_swarm().fill(replicas=1)
    path = swarm.plan(1).paths[0]
    tokens, targets = swarm.batch(path)
    total, n = await swarm.rooms["s0a"].evaluate(path.hops, tokens, targets)
    wanted, _ = swarm.unsplit.loss(tokens, targets)
    assert n == 32
    assert total == pytest.approx(wanted.item(), rel=1e-5)
    short = tokens[:1, :5]
    torch.testing.assert_close(
        await swarm.rooms["s0a"].logits(path.hops, short), swarm.unsplit(short)[:, -1], rtol=1e-4, atol=1e-5
    )
    await swarm.settle()
    assert all(room.stash.used == 0 for room in swarm.rooms.values())
    sent = {n: e.moved[0] for n, e in swarm.ears.items()}
    assert sent["s3a"] - sent["s2a"] == (1 - 5) * 16 * 4  # of a generation only the last position comes home


async def test_forward_only_work_finds_another_replica_or_says_who_failed(make_swarm):
    swarm = await make_swarm().fill(replicas=2)
    plan = swarm.plan(2, choose=lambda i, s: "a")
    swarm.adopt(plan)
    await swarm.kill("s2a")
    tokens, targets = swarm.batch(plan.paths[0])
    total, _ = await swarm.rooms["s0a"].evaluate(plan.paths[0].hops, tokens, targets)
    assert total == pytest.approx(swarm.unsplit.loss(tokens, targets)[0].item(), rel=1e-5)
    await swarm.kill("s1a")
    await swarm.kill("s1b")
    with pytest.raises(PeerFault, match="stage 1"):
        await swarm.rooms["s0a"].logits(plan.paths[0].hops, tokens)
    with pytest.raises(ValueError, match="errand"):
        await swarm.rooms["s0a"].logits((), tokens)


async def test_a_batch_that_cannot_be_computed_is_dropped_alone(make_swarm):
    swarm = await make_swarm().fill(replicas=1)
    plan = swarm.plan(3)
    swarm.adopt(plan)
    good = swarm.batch

    def bad(path):
        tokens, targets = good(path)
        return (tokens + 1000, targets) if path.index == 1 else (tokens, targets)

    swarm.batch = bad
    done = await swarm.run(plan)
    assert [done[i].counted for i in range(3)] == [True, False, True]


async def test_bf16_on_the_wire_stays_close(make_swarm):
    swarm = await make_swarm(wire="bf16").fill(replicas=1)
    plan = swarm.plan(2)
    swarm.adopt(plan)
    await swarm.run(plan)
    mine, _ = swarm.gradients()
    theirs, total = swarm.reference(plan)
    assert sum(r.loss_sum for r in swarm.results) == pytest.approx(total, rel=1e-3)
    for name, wanted in theirs.items():
        assert torch.norm(mine[name] - wanted) <= 0.02 * torch.norm(wanted) + 1e-6, name


async def test_gradients_of_a_tied_model(make_swarm):
    swarm = make_swarm()
    swarm.model = replace(swarm.model, tied=True)
    swarm.unsplit = type(swarm.unsplit)(swarm.model)
    await swarm.fill(replicas=1)
    plan = swarm.plan(2)
    swarm.adopt(plan)
    await swarm.run(plan)
    swarm.check(plan)
