"""A swarm in one process whose activations travel in few bits, by run or by link."""

from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from node.core.ids import PeerId
from node.core.journey import Hop, Path, Plan, PlanMember
from node.pipeline.events import Computed, Direction, Passed, Settled
from node.pipeline.rounding import PEERS_KEPT, SentRounding
from node.pipeline.route import wire_of
from node.pipeline.settings import PipelineSettings
from node.scheduler.link_formats import links
from tests.pipeline.conftest import begun, dies_at

ERROR = {"int8": 0.01, "int4": 0.15}
GRADIENT = {"int8": 0.03, "int4": 0.35}
"""Bounds on the relative error of a gradient through six crossings."""


def coarse(plan: Plan, wire: str = "int4", *between: tuple[str, str]) -> Plan:
    """The plan with this format for these links; by default for all."""
    named = [(PeerId(a), PeerId(b)) for a, b in between] or [*links(plan.paths)]
    return replace(plan, wires=dict.fromkeys(named, wire))


@pytest.mark.parametrize("wire", ERROR)
@pytest.mark.parametrize("by_link", [False, True])
async def test_losses_and_gradients_stay_close(make_swarm, wire, by_link):
    swarm = make_swarm(wire="bf16" if by_link else wire)
    await swarm.fill(replicas=1)
    plan = swarm.plan(4)
    if by_link:
        plan = coarse(plan, wire)
    swarm.adopt(plan)
    await swarm.run(plan, counted=True)
    mine, _ = await swarm.gradients()
    theirs, total = swarm.reference(plan)
    assert sum(r.loss_sum for r in swarm.results) == pytest.approx(total, rel=0.01)
    for name, wanted in theirs.items():
        off = torch.norm(mine[name] - wanted) / torch.norm(wanted)
        assert off <= GRADIENT[wire], name
    for name, pipeline in swarm.pipelines.items():
        sent = pipeline.rounding.peers()
        assert {rounding.wire for rounding in sent.values()} == {wire}
        assert len(sent) == 2, name
        measured = [rounding for rounding in sent.values() if rounding.measured]
        assert measured
        assert all(0 < rounding.error < ERROR[wire] for rounding in measured)


async def test_only_the_links_of_the_plan_are_coarse(make_swarm):
    swarm = make_swarm(wire="bf16")
    await swarm.fill(replicas=1)
    plan = swarm.adopt(coarse(swarm.plan(3), "int4", ("s1a", "s2a"), ("s3a", "s2a")))
    await swarm.run(plan, counted=True)
    wires = {
        (name, peer): rounding.wire
        for name, pipeline in swarm.pipelines.items()
        for peer, rounding in pipeline.rounding.peers().items()
    }
    assert {ends for ends, wire in wires.items() if wire == "int4"} == {
        ("s1a", "s2a"),
        ("s3a", "s2a"),
    }
    assert set(wires.values()) == {"int4", "bf16"}


@pytest.mark.parametrize(
    ("event", "way"),
    [
        (Passed, Direction.FORWARD),
        (Settled, Direction.FORWARD),
        (Computed, Direction.BACKWARD),
        (Passed, Direction.BACKWARD),
    ],
)
async def test_a_replica_gets_the_same_bytes_as_the_one_that_died(make_swarm, event, way):
    """The plan has int4 for the links of the replica that dies, and bf16 for those of the other."""
    came = defaultdict(list)

    def watching(name, guard):
        objection = guard.objection

        def watched(way, stage, sender, index, reader):
            came[index, way, stage].append((name, reader.wire, bytes(reader.raw()[0].numpy())))
            return objection(way, stage, sender, index, reader)

        guard.objection = watched

    swarm = make_swarm(wire="fp32")
    await swarm.fill(replicas=2)
    for name, pipeline in swarm.pipelines.items():
        watching(name, pipeline.hops.guard)
    plan = swarm.plan(6)
    dying = [link for link in links(plan.paths) if "s2a" in link]
    plan = swarm.adopt(coarse(plan, "int4", *dying))
    died = dies_at(swarm, "s2a", event, way)
    await swarm.run(plan, counted=True)
    assert died.is_set()
    assert not [t.faults for t in swarm.net.transports.values() if t.faults]
    assert all(len({data for _, _, data in tensors}) == 1 for tensors in came.values())
    assert any(len(tensors) > 1 for tensors in came.values())
    by_the_other = {wire for of in came.values() for name, wire, _ in of if name == "s2b"}
    assert by_the_other == {"fp32", "int4"}
    total = sum(float(swarm.loss(path)[0].detach()) for path in plan.paths)
    assert sum(r.loss_sum for r in swarm.results) == pytest.approx(total, rel=0.01)


async def test_a_sender_of_another_format_than_the_plans_is_at_fault(make_swarm):
    swarm = make_swarm(wire="bf16")
    await swarm.fill(replicas=2)
    plan = swarm.adopt(coarse(swarm.plan(4), "int4"))
    swarm.pipelines["s2a"].hops.planned.wires_of = lambda key: dict.fromkeys(Direction, "int8")
    await swarm.run(plan, counted=True)
    faults = [(peer, why) for t in swarm.net.transports.values() for peer, why, _ in t.faults]
    assert {peer for peer, _ in faults} == {"s2a"}
    assert all("format" in why for _, why in faults)


async def test_a_scale_that_is_not_finite_is_refused(make_swarm):
    swarm, plan = await begun(make_swarm(wire="int4").fill(replicas=2), 4)
    math = swarm.pipelines["s2a"].math
    job = math.forward

    def worse(work):
        job(work)
        raw = torch.frombuffer(bytearray(work.output), dtype=torch.uint8)
        raw[:4].view(torch.float32)[0] = float("nan")
        work.output = raw.numpy().data

    math.forward = worse
    await swarm.run(plan, counted=True)
    faults = [(peer, why) for t in swarm.net.transports.values() for peer, why, _ in t.faults]
    assert {peer for peer, _ in faults} == {"s2a"}
    assert all("scale" in why for _, why in faults)
    assert (await swarm.pipelines["s2a"].take_gradients(3))[1] == 0


@pytest.mark.parametrize("wire", ERROR)
async def test_forward_only_work_travels_as_bf16(make_swarm, wire):
    swarm = make_swarm(wire=wire)
    await swarm.fill(replicas=1)
    path = swarm.plan(1).paths[0]
    tokens, targets = swarm.batch(path)
    loss, count = await swarm.pipelines["s0a"].evaluate(path.hops, tokens, targets)
    wanted, total = swarm.loss(path)
    assert count == total
    # Closer than int4 can be.
    assert loss == pytest.approx(float(wanted.detach()), rel=1e-3)
    logits = await swarm.pipelines["s0a"].logits(path.hops, tokens)
    exact = swarm.unsplit.logits(tokens)[:, -1]
    assert torch.norm(logits - exact) <= 0.02 * torch.norm(exact)


def test_a_tensor_has_the_format_of_the_planned_link_whoever_sends_it() -> None:
    origin, a, b = (PeerId(p) for p in ("o", "a", "b"))
    path = Path(0, origin, (0,), (Hop(1, a), Hop(2, b)))
    members = (PlanMember(origin, 0), PlanMember(a, 1), PlanMember(b, 2))
    plan = Plan(0, 1, origin, members, (path,), {}, wires={(a, b): "int4", (b, a): "int8"})
    found = {
        (position, way): wire_of(plan, path, position, way)
        for position in range(4)
        for way in Direction
    }
    assert {at: wire for at, wire in found.items() if wire} == {
        (1, Direction.FORWARD): "int4",
        (2, Direction.BACKWARD): "int8",
    }


def test_formats_of_a_run_fall() -> None:
    def wires(wire: str, least: str = "") -> tuple[str, ...]:
        return PipelineSettings(wire=wire, wire_least=least).wires

    assert wires("fp32") == ("fp32",)
    assert wires("int4") == ("int4",)
    assert wires("fp32", "int4") == ("fp32", "bf16", "int8", "int4")
    assert wires("fp16", "int8") == ("fp16", "int8")
    assert wires("bf16", "int4") == ("bf16", "int8", "int4")
    for wire, least in (("int8", "bf16"), ("bf16", "bf16"), ("bf16", "fp16"), ("int4", "int8")):
        assert len(wires(wire, least)) < 2


def test_an_error_is_of_one_format_and_peers_are_bounded() -> None:
    rounding = SentRounding()
    a = PeerId("a")
    rounding.sent(a, "int4", 0.1)
    rounding.sent(a, "int4", 0.2)
    rounding.sent(a, "int4", None)
    found = rounding.peers()[a]
    assert (found.wire, found.measured, found.error) == ("int4", 2, pytest.approx(0.15))
    rounding.sent(a, "bf16", None)
    assert (rounding.peers()[a].measured, rounding.peers()[a].error) == (0, 0.0)
    for i in range(PEERS_KEPT):
        rounding.sent(PeerId(f"p{i}"), "bf16", None)
    assert len(rounding.peers()) == PEERS_KEPT
    assert a not in rounding.peers()
