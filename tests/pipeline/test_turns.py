"""Turns of jobs at a device: least slack first."""

from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest

from node.core.ids import PeerId
from node.core.journey import Plan
from node.pipeline.events import Direction, Key
from node.pipeline.frames import FrameShape
from node.pipeline.hops.planned import PlannedWork
from node.pipeline.machine import PipelineMachine
from node.pipeline.visit_buffers import StageMath
from tests.pipeline.conftest import STAGES, make_plan

REPLICAS = 2
LAST = STAGES + 1
WAVE = (1 + STAGES * REPLICAS) / (STAGES + 1)
"""Peers for each visit of a path."""


def work_of(plan: Plan | None) -> PlannedWork:
    machine = SimpleNamespace(plan=plan, paths={p.index: p for p in plan.paths} if plan else {})
    planned = PlannedWork(
        PeerId("s1a"),
        cast(PipelineMachine, machine),
        cast(FrameShape, None),
        cast(StageMath, None),
    )
    planned.begin()
    return planned


@pytest.fixture
def planned() -> PlannedWork:
    return work_of(make_plan(8, REPLICAS))


def tasks(planned: PlannedWork, index: int) -> list[float]:
    """Turns of the tasks of a micro-batch in the order in which it comes to them."""
    there = [planned.turn(Key(3, index, at), Direction.FORWARD) for at in range(LAST + 1)]
    back = [planned.turn(Key(3, index, at), Direction.BACKWARD) for at in reversed(range(LAST))]
    return [*there, *back]


def test_a_task_comes_a_wave_after_the_one_before(planned: PlannedWork):
    turns = tasks(planned, 5)
    assert len(turns) == 2 * LAST + 1
    assert [after - before for before, after in pairwise(turns)] == pytest.approx(
        [WAVE] * (2 * LAST)
    )
    assert turns[0] == 5


def test_the_older_of_two_micro_batches_goes_first_at_the_same_task(planned: PlannedWork):
    assert all(a < b for a, b in zip(tasks(planned, 2), tasks(planned, 3), strict=True))


def test_a_new_forward_goes_before_the_backward_of_a_much_younger_micro_batch():
    planned = work_of(make_plan(40, REPLICAS))
    forward = planned.turn(Key(3, 0, 1), Direction.FORWARD)
    assert forward < planned.turn(Key(3, 1, 1), Direction.BACKWARD)
    assert forward > planned.turn(Key(3, 0, 0), Direction.FORWARD)
    # A backward that is due goes before the forwards of later waves.
    assert planned.turn(Key(3, 0, 1), Direction.BACKWARD) < planned.turn(
        Key(3, 39, 1), Direction.FORWARD
    )


@pytest.mark.parametrize("plan", [None, make_plan(0, REPLICAS)])
def test_work_without_a_path_has_the_turn_of_any_other(plan: Plan | None):
    assert work_of(plan).turn(Key(3, 7, 1), Direction.FORWARD) == 0.0


def test_jobs_of_an_earlier_plan_go_before_those_of_a_later_one():
    planned = work_of(make_plan(8, REPLICAS))
    earlier = [turn for index in range(8) for turn in tasks(planned, index)]
    for _ in range(3):
        planned.begin()
        later = [turn for index in range(8) for turn in tasks(planned, index)]
        assert max(earlier) < min(later)
        earlier = later
