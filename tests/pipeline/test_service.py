"""Whole pipelines in one process against the model in one piece."""

import asyncio
import time
from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from node.core.errors import OutOfResources, PeerFault
from node.core.ids import PeerId
from node.pipeline.events import Arrived, Computed, Direction, Key, Passed, Settled
from node.pipeline.hops.calls import AlreadyThere
from node.pipeline.hops.deadlines import STRETCH_MOST
from node.pipeline.hops.stash import Stash
from node.pipeline.settings import PipelineLimits
from node.wire.tensors import expected_head
from protos import pipeline_pb2 as pb
from protos.pipeline_pb2_grpc import PipelineStub
from testbed.fakes.clock import VirtualClock
from tests.pipeline.conftest import DEEP, MODEL, begun, dies_at
from tests.transport.conftest import until


@pytest.mark.parametrize("model", [MODEL, DEEP, replace(DEEP, tied=True)])
async def test_gradients_and_loss_equal_the_model_in_one_piece(make_swarm, model):
    swarm, plan = await begun(make_swarm(model).fill(replicas=2), 6)
    done = await swarm.run(plan)
    assert all(r.counted and r.tokens == 32 for r in done.values())
    await swarm.check(plan)
    shape = swarm.pipelines["s0a"].hops.planned.shape_of(0)
    graph = swarm.pipelines["s0a"].math.graph_bytes[shape]
    assert (graph > 100 * 4 * 32) == (model.ends_layers > 0), "the graph of the first layers"
    assert all(not ear.events for ear in swarm.ears.values()), {
        n: e.events for n, e in swarm.ears.items()
    }
    assert all(pipeline.stash.used == 0 for pipeline in swarm.pipelines.values())


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize(
    ("event", "way"),
    [
        (Arrived, Direction.FORWARD),  # before it accepts a forward
        (Computed, Direction.FORWARD),  # accepted, its output never leaves
        (Passed, Direction.FORWARD),  # its output left, nobody heard DONE
        (Settled, Direction.FORWARD),  # between forward and backward
        (Arrived, Direction.BACKWARD),  # before it accepts a gradient
        (Computed, Direction.BACKWARD),  # during backward
        (Passed, Direction.BACKWARD),  # its gradient left, nobody heard DONE
    ],
)
async def test_one_replica_may_die_anywhere(make_swarm, event, way, nth):
    swarm, plan = await begun(make_swarm().fill(replicas=2), 6)
    died = dies_at(swarm, "s2a", event, way, nth)
    await swarm.run(plan, counted=True)
    assert died.is_set()
    await swarm.check(plan, skip_stages=(2,))


@pytest.mark.parametrize(
    ("may_skip", "killed", "left"),
    [
        (0.0, ("s3a", "s3b"), {0: 0, 1: 0, 2: 0}),
        (0.34, ("s1a", "s1b", "s3a", "s3b"), {0: 0, 2: 0}),  # more than may be left out
    ],
)
async def test_a_stage_without_a_live_peer_drops_the_micro_batch(
    make_swarm, may_skip, killed, left
):
    swarm, plan = await begun(make_swarm(may_skip=may_skip).fill(replicas=2), 3)
    await swarm.kill(*killed)
    await swarm.run(plan, counted=False)
    assert await swarm.gradients() == ({}, left)


async def test_a_frozen_replica_is_left_after_the_time_out(make_swarm):
    swarm, plan = await begun(make_swarm(forward_timeout_s=3.0).fill(replicas=2), 3)
    swarm.net.mute(PeerId("s1a"))
    await swarm.run(plan, counted=True)
    await swarm.check(plan)


async def test_a_replica_whose_connection_is_closed_is_left(make_swarm):
    swarm, plan = await begun(make_swarm().fill(replicas=2), 1, choose=lambda i, s: "a")
    swarm.net.mute(PeerId("s1a"))
    running = asyncio.ensure_future(swarm.run(plan, counted=True))
    channel = await swarm.net.transports["s0a"].channel(PeerId("s1a"))
    await until(lambda: channel._open, 10)
    await channel.close()
    await running
    await swarm.check(plan)


async def test_a_micro_batch_past_the_deadline_is_dropped(make_swarm):
    swarm, plan = await begun(make_swarm(forward_timeout_s=0.5).fill(replicas=1), 2, deadline_s=0.3)
    swarm.net.mute(PeerId("s2a"))
    await swarm.run(plan, counted=False)


async def test_a_cancelled_run_is_dropped_without_a_report(make_swarm):
    swarm, plan = await begun(make_swarm().fill(replicas=1), 4)
    swarm.net.mute(PeerId("s2a"))
    pipeline = swarm.pipelines["s0a"]
    results = []
    running = asyncio.ensure_future(pipeline.origin.run(plan.paths, swarm.fetch, results.append))
    await until(lambda: pipeline.machine.visits, 10)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await pipeline.close()
    assert results == []
    assert "micro-batch-dropped" not in swarm.ears["s0a"].events
    assert pipeline.stash.used == 0


async def test_taking_gradients_closes_the_epoch(make_swarm):
    swarm, plan = await begun(make_swarm(forward_timeout_s=0.5).fill(replicas=1), 4)
    swarm.net.mute(PeerId("s3a"))
    running = asyncio.ensure_future(swarm.run(plan))
    await until(lambda: swarm.ears["s2a"].seconds.get("compute"), 10)
    first = await swarm.pipelines["s0a"].take_gradients(3)
    done = await running
    assert not any(r.counted for r in done.values())
    assert first == ({}, 0) == await swarm.pipelines["s0a"].take_gradients(3)
    assert await swarm.pipelines["s0a"].take_gradients(4) == ({}, 0)


async def test_a_closed_epoch_starts_no_more_micro_batches(make_swarm):
    swarm, plan = await begun(make_swarm().fill(replicas=1), 12)
    swarm.net.mute(PeerId("s2a"))
    pipeline = swarm.pipelines["s0a"]
    running = asyncio.ensure_future(swarm.run(plan, counted=False))
    await until(lambda: pipeline.machine.visits, 10)
    await pipeline.take_gradients(3)
    await running
    assert swarm.ears["s0a"].events.count("micro-batch-dropped") == 4
    pipeline.reset(3)
    assert pipeline.stash.used == 0


async def test_the_last_names_are_awaited_before_gradients_are_taken(make_swarm, monkeypatch):
    monkeypatch.setattr("node.pipeline.service.RECEIPTS_S", 60.0)
    swarm = await make_swarm().fill(replicas=2)
    calls = swarm.pipelines["s0a"].hops.calls
    kept = calls.tell
    named = asyncio.Event()

    async def slow(*args):
        await named.wait()
        await kept(*args)

    plan = swarm.adopt(swarm.plan(4))
    calls.tell = slow
    await swarm.pipelines["s0a"].origin.run(plan.paths, swarm.fetch, swarm.results.append)
    # As in a swarm, the end of the epoch is known before the origin's last notes have arrived
    # everywhere.
    assert swarm.pipelines["s1a"].machine.unsure() == 2
    asyncio.get_running_loop().call_later(0.05, named.set)
    await asyncio.gather(*(pipeline.receipts(3) for pipeline in swarm.pipelines.values()))
    assert (await swarm.gradients())[1] == dict.fromkeys(range(4), 128)


async def test_a_missing_name_is_left_uncounted_and_does_not_block(make_swarm, monkeypatch):
    swarm, plan = await begun(make_swarm().fill(replicas=1), 2)
    calls = swarm.pipelines["s0a"].hops.calls
    asked = []
    kept = calls.tell

    async def mute(peer, *rest):
        asked.append(peer)
        if peer == "s1a":
            raise PeerFault(peer, "does not hear")
        await kept(peer, *rest)

    calls.tell = mute
    await swarm.run(plan, counted=True)
    pipeline = swarm.pipelines["s1a"]
    await pipeline.receipts(3, dropped=(0, 1))
    assert "shares-unnamed" not in swarm.ears["s1a"].events
    monkeypatch.setattr("node.pipeline.service.RECEIPTS_S", 0.05)
    await pipeline.receipts(3)
    await pipeline.receipts(4)
    assert swarm.ears["s1a"].events == ["shares-unnamed"]
    assert asked.count("s1a") >= 3
    assert (await swarm.gradients())[1] == {0: 64, 1: 0, 2: 64, 3: 64}


async def test_gradients_that_cannot_be_added_are_added_at_the_end(make_swarm, monkeypatch):
    swarm, plan = await begun(make_swarm().fill(replicas=1), 2)
    pipeline = swarm.pipelines["s1a"]

    def full(share, epoch):
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as short_of_memory:
        short_of_memory.setattr(pipeline.shares._gradients, "_add", full)
        await swarm.run(plan, counted=True)
        await pipeline.receipts(3)
        await pipeline.host.device.run(list)  # behind the additions
        with pytest.raises(OutOfResources, match="gradients of an epoch"):
            await pipeline.take_gradients(3)
    await swarm.check(plan)
    assert set(swarm.ears["s1a"].events) == {"gradients-not-added"}


async def test_reset_frees_the_stash_and_the_next_epoch_starts_clean(make_swarm):
    swarm, plan = await begun(make_swarm().fill(replicas=1), 4)
    swarm.net.mute(PeerId("s3a"))
    running = asyncio.ensure_future(swarm.run(plan))
    await until(lambda: swarm.pipelines["s2a"].stash.used, 10)
    for pipeline in swarm.pipelines.values():
        pipeline.reset(2)
    assert swarm.pipelines["s2a"].stash.used
    for pipeline in swarm.pipelines.values():
        pipeline.reset(3)
    assert not any(r.counted for r in (await running).values())
    swarm.net.mute(PeerId("s3a"), False)
    following = swarm.adopt(swarm.plan(4, epoch=4))
    await swarm.run(following, counted=True)
    _, tokens = await swarm.gradients(4)
    assert tokens == dict.fromkeys(range(4), 128)
    assert all(pipeline.stash.used == 0 for pipeline in swarm.pipelines.values())


@pytest.mark.parametrize("before", [0, 9], ids=["first epoch", "the swarm goes back"])
@pytest.mark.parametrize("stash_bytes", [0, 1])
async def test_frames_that_are_ahead_of_the_plan_wait_for_it(
    make_swarm, stash_bytes, before, monkeypatch
):
    peaks = defaultdict(int)
    charge = Stash.charge

    def charged(stash, nbytes, origin=None):
        charge(stash, nbytes, origin)
        peaks[stash] = max(peaks[stash], stash.used)

    monkeypatch.setattr(Stash, "charge", charged)
    limits = PipelineLimits(stash_bytes=stash_bytes, in_flight=4)
    swarm = await make_swarm().fill(replicas=1, limits=limits, plan_wait_s=5.0)
    plan = swarm.plan(4)
    late = swarm.pipelines["s1a"]
    if before:
        late.set_plan(swarm.plan(1, epoch=before))
    for name in ("s0a", "s2a", "s3a"):
        swarm.pipelines[name].set_plan(plan)
    running = asyncio.ensure_future(swarm.run(plan, counted=True))
    await until(lambda: len(late.hops.changes.event._waiters) == 4, 5)
    late.set_plan(plan)
    await running
    assert "hop-turned" not in swarm.ears["s0a"].events, "who is alone at a stage is waited for"
    one = late.hops.planned.cost(0) + late.shape.nbytes(4, 8)  # with its gradient
    most = one if stash_bytes else late.stash.limit
    assert all(0 < peaks[swarm.pipelines[f"s{s}a"].stash] <= most for s in (1, 2, 3))
    await swarm.check(plan)


async def test_a_plan_of_the_same_epoch_may_come_long_after_its_first_frames(make_swarm):
    swarm = await make_swarm().fill(replicas=1, plan_wait_s=0.01)
    plan = swarm.plan(4)
    late = swarm.pipelines["s1a"]
    late.set_plan(replace(plan, term=plan.term + 1))
    for name in ("s0a", "s2a", "s3a"):
        swarm.pipelines[name].set_plan(plan)
    running = asyncio.ensure_future(swarm.run(plan, counted=True))
    await until(lambda: "hop-turned" in swarm.ears["s0a"].events, 5)
    late.set_plan(plan)
    await running
    await swarm.check(plan)


async def test_frames_of_a_plan_that_never_comes_are_given_up_at_their_deadline(make_swarm):
    swarm = await make_swarm().fill(replicas=1, plan_wait_s=0.01)
    plan = swarm.plan(1, deadline_s=0.3)
    for name, pipeline in swarm.pipelines.items():
        pipeline.set_plan(replace(plan, term=9) if name == "s2a" else plan)
    await swarm.run(plan, counted=False)
    await until(lambda: not swarm.pipelines["s1a"].machine.visits, 5)


async def test_work_is_computed_where_its_micro_batch_does_not_count_too(make_swarm):
    swarm, plan = await begun(make_swarm().fill(replicas=1), 2)
    await swarm.run(plan, counted=True)
    assert {pipeline.computed for pipeline in swarm.pipelines.values()} == {2.0}
    lost = swarm.adopt(swarm.plan(2, epoch=4))
    await swarm.kill("s3a")
    await swarm.run(lost, counted=False)
    first = swarm.pipelines["s1a"]
    assert (first.micro_batches, first.computed) == (0, 1.0), "two forwards"


def unnamed_bytes(pipeline):
    """Bytes of the shares that wait for their names, or are about to."""
    shares = [work.share for work in pipeline.stash._entries.values() if work.share]
    return sum(tensor.nbytes for share in shares for tensor in share.values())


def watched(pipeline):
    """List of the bytes of unnamed shares, one entry after each time the pipeline carries out
    actions."""
    seen = []
    carry_out = pipeline.hops.driver.carry_out

    def watch(actions):
        carry_out(actions)
        seen.append(unnamed_bytes(pipeline))

    pipeline.hops.driver.carry_out = watch
    return seen


async def test_an_origin_that_names_nothing_holds_few_shares_and_loses_them(
    make_swarm, monkeypatch
):
    monkeypatch.setattr("node.pipeline.service.ROOM_WAIT", 0.0)
    swarm, plan = await begun(make_swarm().fill(replicas=1, places=2), 12)
    swarm.pipelines["s0a"].hops.notes.tell_counted = lambda index, peers: None
    stages = [swarm.pipelines[f"s{s}a"] for s in (1, 2, 3)]
    seen = [watched(pipeline) for pipeline in stages]
    await swarm.run(plan, counted=True)
    for pipeline, held in zip(stages, seen, strict=True):
        parameters = sum(p.nbytes for p in pipeline.math.module.parameters())
        assert held[-1] == 2 * parameters, "one for each place"
        assert max(held) <= 3 * parameters, "and the one that the device is making"
        assert await pipeline.take_gradients(3) == ({}, 0)
        assert unnamed_bytes(pipeline) == 0, "given back before the round"


async def test_a_single_place_for_shares_costs_no_honest_micro_batch(make_swarm):
    swarm, plan = await begun(make_swarm().fill(replicas=1, places=1), 6)
    await swarm.run(plan, counted=True)
    await swarm.check(plan)
    assert not any(ear.events for ear in swarm.ears.values())


async def test_what_nobody_asks_for_is_given_back_though_nothing_else_comes(make_swarm):
    swarm, plan = await begun(make_swarm(forward_timeout_s=1.0).fill(replicas=1), 1)
    s1a = swarm.pipelines["s1a"]
    channel = await swarm.net.transports["s0a"].channel("s1a")
    swarm.net.mute(PeerId("s2a"))
    journey = [pb.PathHop(stage=h.stage, peer=h.peer) for h in plan.paths[0].journey]
    head = pb.FrameHead(
        epoch=3,
        plan_hash=plan.hash,
        purpose=pb.TRAIN,
        journey=journey,
        position=1,
        tensor=expected_head("", (4, 8, 16), "fp32"),
        deadline_s=86_000.0,
    )
    call = PipelineStub(channel).Forward()
    await call.write(pb.Frame(head=head))
    await call.write(pb.Frame(chunk=bytes(2048)))
    assert (await call.read()).verdict == pb.ACCEPTED
    (work,) = s1a.stash._entries.values()
    assert work.deadline - s1a.clock.now() <= 5 * s1a.hops.deadlines.hop_s, (
        "of three hops and the way home"
    )
    await until(lambda: s1a.stash.used == 0, 60)
    assert not s1a.machine.visits


@pytest.mark.parametrize("model", [MODEL, DEEP])
async def test_evaluation_and_logits_meet_the_model_of_the_moment(make_swarm, model):
    swarm = await make_swarm(model).fill(replicas=1)
    path = swarm.plan(1).paths[0]
    tokens, targets = swarm.batch(path)
    total, n = await swarm.pipelines["s0a"].evaluate(path.hops, tokens, targets)
    wanted, _ = swarm.unsplit.loss(tokens, targets)
    assert (n, total) == (32, pytest.approx(wanted.item(), rel=1e-5))
    short = tokens[:1, :5]
    torch.testing.assert_close(
        await swarm.pipelines["s0a"].logits(path.hops, short),
        swarm.unsplit(short)[:, -1],
        rtol=1e-4,
        atol=1e-5,
    )
    await swarm.settle()
    assert all(pipeline.stash.used == 0 for pipeline in swarm.pipelines.values())
    sent = {
        n: sum(link.sent for link in p.host.transport.peers().values())
        for n, p in swarm.pipelines.items()
    }
    # of a generation only the last position comes home
    assert sent["s3a"] - sent["s2a"] == (1 - 5) * 16 * 4


async def test_forward_only_work_uses_another_replica_or_fails(make_swarm):
    swarm, plan = await begun(make_swarm().fill(replicas=2), 2, choose=lambda i, s: "a")
    await swarm.kill("s2a")
    tokens, targets = swarm.batch(plan.paths[0])
    total, _ = await swarm.pipelines["s0a"].evaluate(plan.paths[0].hops, tokens, targets)
    assert total == pytest.approx(swarm.unsplit.loss(tokens, targets)[0].item(), rel=1e-5)
    await swarm.kill("s1a", "s1b")
    with pytest.raises(PeerFault, match="stage 1"):
        await swarm.pipelines["s0a"].logits(plan.paths[0].hops, tokens)
    with pytest.raises(ValueError, match="no forward work of 0 hops"):
        await swarm.pipelines["s0a"].logits((), tokens)


async def test_forward_only_work_that_cannot_be_computed_is_a_fault(make_swarm):
    swarm, plan = await begun(make_swarm().fill(replicas=1), 1)
    origin = swarm.pipelines["s0a"]
    hops = plan.paths[0].hops
    tokens, targets = swarm.batch(plan.paths[0])
    with pytest.raises(PeerFault, match="s0a: could not compute it"):
        await origin.evaluate(hops, tokens, targets + 1000)
    with pytest.raises(PeerFault, match="s0a: could not compute it"):
        await origin.logits(hops, tokens + 1000)


async def test_a_batch_that_cannot_be_computed_is_dropped_alone(make_swarm):
    swarm, plan = await begun(make_swarm().fill(replicas=1), 3)
    good = swarm.batch

    def bad(path):
        tokens, targets = good(path)
        return (tokens + 1000, targets) if path.index == 1 else (tokens, targets)

    swarm.batch = bad
    done = await swarm.run(plan)
    assert [done[i].counted for i in range(3)] == [True, False, True]


async def test_a_batch_whose_text_does_not_come_is_dropped_alone(make_swarm):
    swarm, plan = await begun(make_swarm().fill(replicas=1), 3)
    deadlines = swarm.pipelines["s0a"].hops.deadlines
    left = deadlines.time_left
    deadlines.time_left = lambda path: 0.2 if path.index == 1 else left(path)
    good = swarm.fetch

    async def late(path):
        await asyncio.sleep(3600 if path.index == 1 else 0)
        return await good(path)

    swarm.fetch = late
    done = await swarm.run(plan)
    assert [done[i].counted for i in range(3)] == [True, False, True]
    assert "micro-batch-dropped" in swarm.ears["s0a"].events


async def test_what_the_epoch_has_no_time_for_says_so_and_is_not_begun(make_swarm):
    swarm, plan = await begun(make_swarm().fill(replicas=1), 3, deadline_s=0.0)
    ear = swarm.ears["s0a"]
    said = list[str]()
    ear.emit = lambda kind, text, *_, **__: said.append(f"{kind}: {text}")
    good = swarm.fetch

    async def streamed(path):
        await asyncio.sleep(0)
        return await good(path)

    for swarm.fetch in (good, streamed):
        await swarm.run(plan, counted=False)
    assert said == ["micro-batch-dropped: the time of its epoch was over"] * 6
    assert not ear.seconds


def poisoned(swarm, name, what, make):
    """Change every result of `name` in one direction between its own check and the wire."""
    math = swarm.pipelines[name].math
    job = getattr(math, what)
    field = "output" if what == "forward" else "upstream"

    def worse(work):
        job(work)
        numbers = torch.frombuffer(getattr(work, field), dtype=torch.float32).clone()
        setattr(work, field, make(numbers).numpy().view("uint8").data)

    setattr(math, what, worse)


def nan(numbers):
    numbers[7] = float("nan")
    return numbers


@pytest.mark.parametrize("make", [nan, lambda t: t * 1e30, lambda t: t * float("inf")])
async def test_a_poisoned_activation_is_refused(make_swarm, make):
    swarm, plan = await begun(make_swarm().fill(replicas=2), 4)
    poisoned(swarm, "s2a", "forward", make)
    await swarm.run(plan, counted=True)
    await swarm.check(plan)
    assert {peer for t in swarm.net.transports.values() for peer, _, _ in t.faults} == {"s2a"}
    assert "activation-not-finite" in swarm.ears["s3a"].events + swarm.ears["s3b"].events
    assert (await swarm.pipelines["s2a"].take_gradients(3))[1] == 0


async def test_a_poisoned_gradient_is_recomputed_by_another_replica(make_swarm):
    swarm, plan = await begun(make_swarm().fill(replicas=2), 4, choose=lambda i, s: "ab"[i % 2])
    poisoned(swarm, "s2a", "backward", nan)
    await swarm.run(plan, counted=True)
    assert (await swarm.pipelines["s2a"].take_gradients(3))[1] == 0
    await swarm.check(plan)
    assert {peer for t in swarm.net.transports.values() for peer, _, _ in t.faults} == {"s2a"}


async def test_a_poisoned_gradient_without_another_replica_is_dropped(make_swarm):
    swarm, plan = await begun(make_swarm().fill(replicas=1), 2)
    poisoned(swarm, "s2a", "backward", nan)
    await swarm.run(plan, counted=False)
    assert await swarm.gradients() == ({}, dict.fromkeys(range(4), 0))


@pytest.mark.parametrize("stage", [0, 2])
async def test_our_own_outputs_are_sent_only_if_finite(make_swarm, stage):
    swarm = await make_swarm().fill(replicas=2)
    for name in (n for n in swarm.pipelines if n[1] == str(stage)):
        with torch.no_grad():
            next(swarm.pipelines[name].math.module.parameters()).fill_(float("nan"))
    plan = swarm.adopt(swarm.plan(2))
    await swarm.run(plan, counted=False)
    heard = [kind for n, e in swarm.ears.items() if n[1] == str(stage) for kind in e.events]
    assert "output-not-finite" in heard
    assert not any(t.faults for t in swarm.net.transports.values())
    assert (await swarm.gradients())[0] == {}


async def test_an_activation_of_an_odd_norm_is_refused(make_swarm):
    swarm, plan = await begun(make_swarm().fill(replicas=2), 72)
    await swarm.run(plan, counted=True)
    assert not any(t.faults for t in swarm.net.transports.values())
    poisoned(swarm, "s2a", "forward", lambda t: t * 1e4)
    following = swarm.adopt(swarm.plan(2, epoch=4, choose=lambda i, s: "ab"[i] if s == 2 else "a"))
    await swarm.run(following, counted=True)
    assert [(peer, weight) for peer, _, weight in swarm.net.transports["s3a"].faults] == [
        ("s2a", 0.5)
    ]
    assert "activation-odd" in swarm.ears["s3a"].events


async def test_a_peer_that_missed_updates_does_not_judge_by_old_sizes(make_swarm):
    swarm, plan = await begun(make_swarm().fill(replicas=1), 36)
    await swarm.run(plan, counted=True)
    poisoned(swarm, "s2a", "forward", lambda t: t * 1e4)
    await swarm.run(swarm.adopt(swarm.plan(1, epoch=4)), counted=False)
    await swarm.run(swarm.adopt(swarm.plan(1, epoch=24)), counted=True)
    assert len(swarm.net.transports["s3a"].faults) == 1


async def test_neighbours_are_measured_from_sending_to_done(make_swarm):
    swarm = await make_swarm().fill(replicas=1)
    job = swarm.pipelines["s2a"].math.forward
    swarm.pipelines["s2a"].math.forward = lambda work: (time.sleep(0.02), job(work))
    plan = swarm.adopt(swarm.plan(6))
    await swarm.run(plan)
    rates = {n: pipeline.timing.rates() for n, pipeline in swarm.pipelines.items()}
    assert {n: sorted(r) for n, r in rates.items()} == {
        "s0a": ["s1a", "s3a"],
        "s1a": ["s0a", "s2a"],
        "s2a": ["s1a", "s3a"],
        "s3a": ["s0a", "s2a"],
    }
    assert 0 < rates["s1a"]["s2a"] < 60


async def test_bf16_on_the_wire_stays_close(make_swarm):
    swarm, plan = await begun(make_swarm(wire="bf16").fill(replicas=1), 2)
    await swarm.run(plan)
    mine, _ = await swarm.gradients()
    theirs, total = swarm.reference(plan)
    assert sum(r.loss_sum for r in swarm.results) == pytest.approx(total, rel=1e-3)
    for name, wanted in theirs.items():
        assert torch.norm(mine[name] - wanted) <= 0.02 * torch.norm(wanted) + 1e-6, name


async def test_gradients_of_a_tied_model(make_swarm):
    swarm = make_swarm()
    swarm.model = replace(swarm.model, tied=True)
    swarm.unsplit = type(swarm.unsplit)(swarm.model)
    _, plan = await begun(swarm.fill(replicas=1), 2)
    await swarm.run(plan)
    await swarm.check(plan)


@pytest.mark.parametrize(
    ("raised", "fault", "why"),
    [
        (AlreadyThere(PeerId("s1a"), ""), AlreadyThere, None),
        (asyncio.CancelledError(), PeerFault, "its connection was closed"),
        (None, PeerFault, "it has died"),
    ],
)
async def test_an_input_that_does_not_come_is_not_a_task_error(
    make_swarm, monkeypatch, raised, fault, why
):
    swarm = await make_swarm().fill(replicas=1)
    pipeline = swarm.pipelines["s2a"]

    async def channel(peer):
        if raised is not None:
            raise raised
        asyncio.get_running_loop().call_soon(pipeline.gone, peer)
        await asyncio.Event().wait()

    monkeypatch.setattr(pipeline.host.transport, "channel", channel)
    with pytest.raises(fault, match=why):
        await pipeline.hops.fetcher._ask(PeerId("s1a"), Key(3, 0, 2), (), "hash")
    await asyncio.sleep(0)
    assert "task-died" not in swarm.ears["s2a"].events


async def test_the_time_of_a_note_counts_its_dial(make_swarm, monkeypatch):
    pipeline = await make_swarm(forward_timeout_s=0.01).add("s0a")

    async def dial(peer):
        await asyncio.Event().wait()

    monkeypatch.setattr(pipeline.host.transport, "channel", dial)
    async with asyncio.timeout(10):
        with pytest.raises(PeerFault, match="no answer in time"):
            await pipeline.hops.calls.tell(PeerId("s1a"), "Counted", pb.CountedNote())


async def test_the_hop_timeout_stretches_with_the_plans_deadline(make_swarm):
    clock = VirtualClock(8.0)
    swarm = await make_swarm(forward_timeout_s=2.0).fill(replicas=1, usual_s=10.0, clock=clock)
    pipeline = swarm.pipelines["s1a"]
    for deadline_s, hop_s in ((5.0, 2.0), (30.0, 6.0), (1e9, 2.0 * STRETCH_MOST)):
        pipeline.set_plan(swarm.plan(1, epoch=int(deadline_s), deadline_s=deadline_s))
        assert pipeline.hops.deadlines.hop_s == pytest.approx(hop_s)
    patience = pipeline.host.transport.patience
    patience.woke(0.0, 4.0)
    patience.woke(4.0, 8.0)
    late_s = patience.slack(8.0)
    assert late_s > 3.0, "timers were late twice"
    assert pipeline.hops.deadlines.hop_s == pytest.approx(2.0 * STRETCH_MOST + late_s)
