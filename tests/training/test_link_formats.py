"""The formats of links in a leader's plan: chosen by what peers measured, kept from plan to plan,
checked by members."""

import json
from dataclasses import replace
from typing import Any

import pytest

from node.consensus.rules import Rules
from node.core.errors import WireError
from node.core.ids import PeerId
from node.core.journey import Plan
from node.epoch import events as ev
from node.epoch.leader.routing import Routing
from node.epoch.plan_context import PastPlan
from node.epoch.plan_validation import objection
from node.pipeline.settings import PipelineSettings
from node.scheduler.costs import LinkCost, Measured
from node.scheduler.settings import SchedulerSettings
from tests.training.run_facts import facts
from tests.training.test_leader import S1, S2, E, begun, commits, heard, next_plan, tell

WIRES = {"bf16": 1000, "int8": 508, "int4": 266}
PIPELINE = PipelineSettings(stages=2, micro_batch=4, wire="bf16", wire_least="int4")


def measured(slow: float) -> list[ev.Heartbeat]:
    """Notes of one peer of each stage; a tensor from the first block stage to the second takes
    ``slow`` seconds, any other 0.05 s."""

    def costs(me: PeerId, stage: int) -> Measured:
        ways = {p: LinkCost(0.05, 0.0) for p in (E, S1, S2) if p != me}
        if me == S1:
            ways[S2] = LinkCost(slow, 0.0)
        return Measured(0.1, 0.2, ways=tuple(ways.items()))

    return [heard(p, costs=costs(p, stage)) for stage, p in enumerate((E, S1, S2))]


def planned(slow: float, **kw: Any) -> Plan:
    _, plan = begun(measured(slow), tensor=1000, wires=WIRES, **kw)
    return plan


def says(plan: Plan, pipeline: PipelineSettings = PIPELINE) -> str:
    return objection(
        plan,
        S1,
        {},
        pipeline,
        lambda change: Rules(),
        scheduler=SchedulerSettings("round-robin"),
        micro_batches=2,
    )


@pytest.mark.parametrize(("slow", "wire"), [(0.1, ""), (0.4, "int8"), (2.0, "int4")])
def test_a_link_whose_bytes_take_longer_than_the_work_gets_a_coarser_format(
    slow: float, wire: str
) -> None:
    plan = planned(slow)
    assert plan.wires.get((S1, S2), "") == wire
    assert (S2, S1) not in plan.wires
    assert (E, S1) not in plan.wires
    assert says(plan) == ""
    again = Plan.parse(plan.canonical())
    assert again == plan
    assert again.hash == plan.hash


def test_a_run_without_a_choice_has_plans_as_before() -> None:
    _, plan = begun(measured(2.0), tensor=1000)
    assert not plan.wires
    assert "wires" not in json.loads(plan.canonical())


def test_the_next_plan_keeps_a_format_while_the_link_is_near_its_limit() -> None:
    leader, plan = begun(measured(0.3), tensor=1000, wires=WIRES)
    assert plan.wires[S1, S2] == "int8"
    # Seven tenths of the busiest device's work: too little to become coarse, too much to go back.
    tell(leader, measured(0.16), 2.5)
    near = next_plan(commits(leader, plan, 3.0))
    assert near.epoch == plan.epoch + 1
    assert near.wires.get((S1, S2)) == "int8"
    fresh = planned(0.16)
    assert (S1, S2) not in fresh.wires


def test_a_new_leader_goes_on_from_the_plan_that_it_knows() -> None:
    plan = planned(0.3)
    routing = Routing(facts(tensor=1000, wires=WIRES), PastPlan(plan))
    # It has no measurements yet.
    assert routing.formats(plan.paths) == plan.wires != {}


@pytest.mark.parametrize(
    ("wires", "why"),
    [
        ({(S1, S2): "bf16"}, "do not allow"),
        ({(S1, S2): "fp16"}, "do not allow"),
        ({(S1, S2): "top-k"}, "do not allow"),
        ({(S1, S2): ""}, "do not allow"),
        ({(S1, S1): "int4"}, "no micro-batch takes"),
    ],
)
def test_a_format_that_no_leader_plans_is_refused(wires: dict, why: str) -> None:
    assert why in says(replace(planned(0.1), wires=wires))


def test_a_format_is_refused_where_the_run_has_one_alone() -> None:
    plan = planned(2.0)
    assert "do not allow" in says(plan, PipelineSettings(stages=2, micro_batch=4, wire="bf16"))
    assert "do not allow" in says(plan, replace(PIPELINE, wire_least="int8"))


@pytest.mark.parametrize(
    "rows",
    [
        [[0, 1, "int4"], [0, 1, "int8"]],
        [[0, 0, "int4"]],
        [[0, 99, "int4"]],
        [[0, 1, "a format with a long name"]],
        [[0, 1, 4]],
        [[0, 1]],
        [[-1, 1, "int4"]],
        [[0, 1, "int4"]] * 20_000,
        {"0": "int4"},
        7,
    ],
)
def test_nonsense_in_place_of_formats_is_no_plan(rows: Any) -> None:
    body = json.loads(planned(0.1).canonical())
    body["wires"] = rows
    with pytest.raises(WireError):
        Plan.parse(json.dumps(body).encode())
