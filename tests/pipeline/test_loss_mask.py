"""Tokens that are not trained on count at no stage, whatever happens to a micro-batch."""

import pytest

from node.model.documents import NO_TARGET, UNTRAINED
from node.pipeline.events import Arrived, Computed, Direction, Settled
from protos import pipeline_pb2 as pb
from tests.pipeline.conftest import MODEL, begun, dies_at
from tests.pipeline.test_inbound import answers_to_head


def masked(swarm, *, apart: bool):
    """The swarm, which trains on half of its tokens; ``apart``: with an end of a document."""
    plain = swarm.batch

    def batch(path):
        tokens, targets = plain(path)
        targets = targets.clone()
        targets[:, ::2] = UNTRAINED
        targets[0] = UNTRAINED  # a sequence without a token to train on
        if apart:
            targets[1, 3] = NO_TARGET
        return tokens, targets

    swarm.batch = batch
    return swarm


@pytest.mark.parametrize("apart", [False, True])
async def test_every_stage_counts_the_tokens_of_the_loss(make_swarm, apart):
    swarm = masked(make_swarm(MODEL), apart=apart)
    plan = (await begun(swarm.fill(replicas=2, document_mask=apart, loss_mask=True), 4))[1]
    await swarm.run(plan, counted=True)
    await swarm.check(plan)
    each = [int((swarm.batch(path)[1] >= 0).sum()) for path in plan.paths]
    assert set((await swarm.gradients())[1].values()) == {sum(each)}


@pytest.mark.parametrize(
    ("event", "way"),
    [
        (Computed, Direction.FORWARD),
        (Settled, Direction.FORWARD),  # the replica fetches the input from the hop before
        (Arrived, Direction.BACKWARD),
    ],
)
async def test_a_replica_that_takes_over_counts_the_same(make_swarm, event, way):
    swarm = masked(make_swarm(MODEL), apart=False)
    plan = (await begun(swarm.fill(replicas=2, loss_mask=True), 1))[1]
    died = dies_at(swarm, f"s2{plan.paths[0].hops[1].peer[2]}", event, way)
    await swarm.run(plan, counted=True)
    assert died.is_set()
    wanted = int((swarm.batch(plan.paths[0])[1] >= 0).sum())
    assert set((await swarm.gradients())[1].values()) == {wanted}


async def test_numbers_that_cannot_be_are_refused_and_counted(make_swarm):
    swarm, plan = await begun(make_swarm().fill(replicas=1, loss_mask=True, document_mask=True), 1)
    faults = swarm.net.transports["s1a"].faults
    evaluate = {"purpose": pb.EVALUATE, "plan_hash": "", "epoch": 0, "untrained": 1}
    for i, more in enumerate(
        ({"untrained": 33}, {"untrained": 31, "document_ends": [1, 2]}, evaluate)
    ):
        ((verdict, reason),) = await answers_to_head(swarm, plan, **more)
        assert (verdict, "not trained on" in reason) == (pb.REFUSED, True), more
        assert len(faults) == i + 1


async def test_a_run_that_trains_on_all_tokens_takes_no_number(make_swarm):
    swarm, plan = await begun(make_swarm().fill(replicas=1), 1)
    assert await answers_to_head(swarm, plan, untrained=1) == [
        (pb.REFUSED, "1 tokens that are not trained on, at most 0")
    ]
