"""Sketches of the tensors of a swarm in one process: both ends of every link make the same."""

from dataclasses import replace

import pytest
import torch

from node.core.ids import PeerId
from node.epoch.peers.observations import observe
from node.model.lanes import Lanes
from node.model.stages import build
from node.pipeline.events import Crossing, Direction
from node.pipeline.visit_buffers import StageMath
from node.wire.sketch import NUMBERS
from testbed.models.visits import arrived, returned
from tests.pipeline.conftest import MODEL, begun

WIDE = replace(MODEL, d_model=64)
SEED = "ab" * 32


def reports(swarm):
    return {PeerId(name): pipeline.sketched() for name, pipeline in swarm.pipelines.items()}


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8", "int4"])
async def test_neighbours_agree_and_every_stage_is_observed(make_swarm, wire):
    swarm = make_swarm(WIDE, wire=wire, inspect=True)
    swarm, plan = await begun(swarm.fill(), 6)
    await swarm.run(plan, counted=True)
    seen = observe(plan, SEED, reports(swarm))
    assert not seen.disputes
    assert len(seen.observations) == 6 * 3 * len(Direction)
    for o in seen.observations:
        assert o.confirmed
        assert o.likeness > 0.5
        assert abs(o.growth) < 1.0
    at = {(o.index, o.kind.stage): o.peer for o in seen.observations}
    assert at == {(p.index, h.stage): h.peer for p in plan.paths for h in p.hops}


async def test_the_rounding_of_a_link_is_no_noise_of_its_peers(make_swarm):
    swarm = make_swarm(WIDE, wire="fp32", wire_least="int4", inspect=True)
    swarm, plan = await begun(swarm.fill(), 4)
    await swarm.run(plan, counted=True)
    fine = {(o.peer, o.kind, o.index): o for o in observe(plan, SEED, reports(swarm)).observations}
    links = {("s1a", "s2a"): "int4", ("s2a", "s1a"): "int4"}
    coarse = swarm.adopt(replace(plan, term=2, wires=links))
    await swarm.run(coarse, counted=True)
    seen = observe(coarse, SEED, reports(swarm))
    assert not seen.disputes
    assert len(seen.observations) == len(fine)
    ends = [o for o in seen.observations if {o.sender, o.peer, o.receiver} > {"s1a", "s2a"}]
    off = [o.likeness - fine[o.peer, o.kind, o.index].likeness for o in ends]
    assert len(off) == 8
    assert sum(off) / len(off) == pytest.approx(0.0, abs=0.25)


async def test_a_lost_peer_leaves_the_others_observed(make_swarm):
    swarm, plan = await begun(make_swarm(WIDE, inspect=True).fill(), 4)
    await swarm.kill("s2a")
    await swarm.run(plan)
    seen = observe(
        plan, SEED, {p: rows for p, rows in reports(swarm).items() if p not in swarm.dead}
    )
    assert not seen.disputes
    counted = {r.index for r in swarm.results if r.counted}
    assert {o.index for o in seen.observations} == counted
    assert "s2a" not in {o.peer for o in seen.observations}


@pytest.mark.parametrize(("inspect", "replicas"), [(False, 2), (True, 1)])
async def test_nothing_is_sketched_where_nothing_is_compared(make_swarm, inspect, replicas):
    swarm, plan = await begun(make_swarm(inspect=inspect).fill(replicas), 2)
    await swarm.run(plan, counted=True)
    assert all(rows == [] for rows in reports(swarm).values())


async def test_a_new_plan_begins_without_sketches(make_swarm):
    swarm, plan = await begun(make_swarm(inspect=True).fill(), 4)
    await swarm.run(plan, counted=True)
    assert sum(map(len, reports(swarm).values())) == 4 * 4
    swarm.adopt(swarm.plan(2, epoch=4))
    assert all(rows == [] for rows in reports(swarm).values())


class Beside(Lanes):
    """Lanes whose results come down later."""

    beside = True


def test_sketches_come_down_with_the_result() -> None:
    math = StageMath(build(MODEL, 3, 1), "fp32")
    math.sketch_as("plan")
    x, dy = torch.randn(2, 2, MODEL.seq_len, MODEL.d_model, generator=torch.Generator())
    work = arrived(x)
    math.forward(work)
    returned(math, work, dy)
    beside = StageMath(math.module, "fp32")
    beside.sketch_as("plan")
    beside.use(Beside())
    later = arrived(x)
    beside.forward(later)
    assert not later.sketches
    beside.deliver(later, beside.lanes.mark())
    assert later.sketches == {c: work.sketches[c] for c in (Crossing.INPUT, Crossing.OUTPUT)}
    assert work.sketches.keys() == set(Crossing)
    assert all(len(s.numbers) == NUMBERS and any(s.numbers) for s in work.sketches.values())
