"""Ends of documents travel with activations, and whatever happens to a micro-batch keeps them."""

import asyncio
from dataclasses import replace

import pytest
import torch

from node.core.ids import PeerId
from node.model.documents import NO_TARGET
from node.pipeline.events import Arrived, Computed, Direction, Settled
from protos import pipeline_pb2 as pb
from tests.pipeline.conftest import DEEP, MODEL, begun, dies_at
from tests.pipeline.test_inbound import answers_to_head

END = 3
"""The token that ends a document: one of 31, so that most sequences of 8 have none or one."""


def apart(swarm):
    """The swarm with documents that end at every token END."""
    plain = swarm.batch

    def batch(path):
        tokens, targets = plain(path)
        tokens[0, 2] = tokens[1, 7] = tokens[2, 0] = tokens[2, 4] = END
        targets[:, :-1] = tokens[:, 1:]
        return tokens, targets.masked_fill(tokens == END, NO_TARGET)

    swarm.batch = batch
    return swarm


async def ready(make_swarm, replicas=2, count=6, model=MODEL, **settings):
    swarm = apart(make_swarm(model, **settings))
    return await begun(swarm.fill(replicas=replicas, document_mask=True), count)


@pytest.mark.parametrize(
    ("event", "way"),
    [
        (Computed, Direction.FORWARD),
        (Settled, Direction.FORWARD),  # the replica fetches the input from the hop before
        (Arrived, Direction.BACKWARD),
    ],
)
async def test_a_replica_that_takes_over_computes_the_same_bits(make_swarm, event, way):
    found = []
    for dies in (False, True):
        swarm, plan = await ready(make_swarm, count=1)
        name = f"s2{plan.paths[0].hops[1].peer[2]}"
        died = dies_at(swarm, name, event, way) if dies else None
        await swarm.run(plan, counted=True)
        assert died is None or died.is_set()
        found.append(((await swarm.gradients())[0], swarm.results[0].loss_sum))
    assert found[0][1] == found[1][1]
    assert found[0][0].keys() == found[1][0].keys(), "of the hop that took over, too"
    assert all(torch.equal(found[1][0][n], g) for n, g in found[0][0].items())


@pytest.mark.parametrize("model", [MODEL, DEEP])
async def test_a_hop_that_is_left_out_loses_no_document(make_swarm, model):
    swarm, plan = await ready(make_swarm, replicas=1, count=2, model=model, may_skip=0.4)
    await swarm.kill("s2a")
    done = await swarm.run(plan, counted=True)
    for path in plan.paths:
        loss, count = swarm.loss(replace(path, hops=(path.hops[0], path.hops[2])))
        assert done[path.index].tokens == count
        assert done[path.index].loss_sum == pytest.approx(loss.item(), rel=1e-5)


WRONG = ([32], [5, 5], [9, 4], list(range(33)), [0, 1 << 31])


async def test_ends_that_cannot_be_are_refused_and_counted(make_swarm):
    swarm, plan = await ready(make_swarm, replicas=1, count=1)
    faults = swarm.net.transports["s1a"].faults
    for i, ends in enumerate(WRONG):
        ((verdict, reason),) = await answers_to_head(swarm, plan, document_ends=ends)
        assert (verdict, "ends of documents" in reason) == (pb.REFUSED, True), ends
        assert [peer for peer, _, _ in faults] == [PeerId("s0a")] * (i + 1)
    evaluate = {"purpose": pb.EVALUATE, "plan_hash": "", "epoch": 0}
    for more in (
        evaluate | {"document_ends": [32]},
        evaluate | {"document_ends": [1], "purpose": 3},
    ):
        ((verdict, _),) = await answers_to_head(swarm, plan, **more)
        assert verdict == pb.REFUSED, more
    assert len(faults) == len(WRONG) + 2
    assert swarm.pipelines["s1a"].stash.used == 0


async def test_a_gradient_brings_no_ends(make_swarm):
    swarm, plan = await ready(make_swarm, replicas=1, count=1)
    sender = swarm.pipelines["s2a"].hops.sender
    held = asyncio.Event()
    send = sender.send
    waiting = []

    def hold(action):
        if action.way is Direction.FORWARD:
            return send(action)
        waiting.append(action)
        held.set()

    sender.send = hold
    running = asyncio.ensure_future(swarm.run(plan, counted=True))
    await asyncio.wait_for(held.wait(), 30)
    assert await answers_to_head(swarm, plan, "s2a", method="Backward", document_ends=[1]) == [
        (pb.REFUSED, "1 ends of documents, at most 0 belong")
    ]
    send(waiting[0])
    await running
    await swarm.check(plan)


async def test_a_run_without_the_mask_takes_no_ends(make_swarm):
    swarm, plan = await begun(make_swarm().fill(replicas=1), 1)
    assert await answers_to_head(swarm, plan, document_ends=[4]) == [
        (pb.REFUSED, "1 ends of documents, at most 0 belong")
    ]
    assert len(swarm.net.transports["s1a"].faults) == 1
