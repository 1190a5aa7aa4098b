"""The losses before the first step: measured by the leader, carried by every plan, compared with
the losses after training."""

from dataclasses import replace
from typing import Any

import pytest

from node.core.journey import UNKNOWN, Losses, Plan, Version
from node.epoch import events as ev
from node.epoch.leader.deadlines import FIRST
from node.epoch.leader.leader import Leader, Phase
from node.epoch.plan_context import PastPlan, PlanContext
from node.scheduler.costs import Measured
from tests.training.run_facts import facts
from tests.training.test_leader import (
    S1,
    S2,
    E,
    begun,
    commits,
    heard,
    kinds,
    led,
    next_plan,
    recalled,
    tell,
    the_plan,
)

KEEPS: dict[str, Any] = {"reference": True, "eval_every": 1, "warmup": 2, "advice": "go slower"}
BEFORE = 4.5


def measuring(**kw: Any) -> tuple[Leader, ev.Evaluate]:
    """A young leader of a run that keeps the losses before its first step, and its request."""
    leader = led(facts(**KEEPS | kw), [heard(E), heard(S1), heard(S2)])
    done = leader.handle(ev.ClockTick(), 2.0)
    assert the_plan(done) is None
    (asked,) = (a for a in done if isinstance(a, ev.Evaluate))
    return leader, asked


def evaluated(leader: Leader, plan: Plan, loss: float, now: float) -> list[Any]:
    """Commit and evaluate the epoch of a plan; returns the leader's actions."""
    commits(leader, plan, now)
    return leader.handle(ev.Evaluated(plan.epoch + 1, loss), now + 0.5)


def warned(actions: list[Any]) -> list[ev.RecordFact]:
    return [a for a in actions if isinstance(a, ev.RecordFact) and a.kind == "worse-than-before"]


def test_the_held_out_loss_is_measured_once_before_the_first_plan() -> None:
    leader, asked = measuring()
    assert asked.epoch == 0
    assert {(m.stage, m.peer) for m in asked.plan.members} == {(0, E), (1, S1), (2, S2)}
    plan = next_plan(leader.handle(ev.Evaluated(0, BEFORE), 3.0))
    assert plan.reference == Losses(0.0, BEFORE)
    assert plan.loss_val == BEFORE


def test_the_first_measurement_has_the_time_of_an_epoch() -> None:
    operations = (1e12, 2e12, 2e12)
    leader = led(facts(**KEEPS, operations=operations, target_batch=16), [])
    costs = Measured(tera_s=1.0)
    done = tell(leader, [heard(p, costs=costs) for p in (E, S1, S2)], 0.0)
    done = leader.handle(ev.ClockTick(), 2.0)
    (asked,) = (a for a in done if isinstance(a, ev.Evaluate))
    # Four micro-batches at the busiest peer, and one through all stages.
    assert asked.plan.deadline_s == pytest.approx(FIRST * (4 * 2.0 + 5.0))
    until = 2.0 + asked.plan.deadline_s
    tell(leader, [heard(p, costs=costs) for p in (E, S1, S2)], until)
    assert the_plan(leader.handle(ev.ClockTick(), until - 0.5)) is None
    assert the_plan(leader.handle(ev.ClockTick(), until)) is not None


def test_every_later_plan_carries_both_losses() -> None:
    leader, _ = measuring()
    plan = next_plan(leader.handle(ev.Evaluated(0, BEFORE), 3.0))
    plan = next_plan(evaluated(leader, plan, 4.0, 4.0))
    first = leader.losses.training
    assert first > 0
    for now in (6.0, 8.0):
        assert plan.reference == Losses(first, BEFORE)
        plan = next_plan(evaluated(leader, plan, 4.0, now))
        assert Plan.parse(plan.canonical()) == plan
    heir = Leader(S1, facts(**KEEPS), history=PastPlan(plan))
    assert heir.losses.reference == plan.reference
    assert PlanContext.before(plan).reference == plan.reference
    assert PlanContext.after(plan, (), {}, 0).reference == plan.reference


def test_a_leader_goes_on_from_the_losses_in_a_checkpoint() -> None:
    at = Version(5, "aa" * 16)
    known = Losses(4.25, BEFORE)

    def recall(version: Version) -> PlanContext:
        return replace(recalled(version), reference=known)

    notes = [heard(p, at, 900) for p in (E, S1, S2)]
    leader, plan = begun(notes, recall=recall, **KEEPS)
    assert plan.reference == known
    assert warned(evaluated(leader, plan, 9.0, 3.0)), "worse than the loss in the checkpoint"


@pytest.mark.parametrize("answers", [True, False])
def test_a_loss_that_cannot_be_measured_holds_nobody_up(answers: bool) -> None:
    leader, _ = measuring()
    if answers:
        done = leader.handle(ev.Evaluated(0, 0.0), 3.0)
        assert "evaluated" not in kinds(done)
    else:
        assert the_plan(leader.handle(ev.ClockTick(), 3.0)) is None
        for p in (E, S1, S2):
            leader.handle(heard(p), 22.0)
        done = leader.handle(ev.ClockTick(), 22.5)
    plan = next_plan(done)
    assert plan.reference == UNKNOWN
    assert leader.handle(ev.Evaluated(0, BEFORE), 23.0) == [], "too late"
    plan = next_plan(evaluated(leader, plan, 9.0, 24.0))
    assert plan.reference == Losses(leader.losses.training, 0.0)


def test_other_runs_measure_nothing_and_their_plans_are_as_before() -> None:
    _, plan = begun()
    assert plan.reference == UNKNOWN
    assert b"reference" not in plan.canonical()
    _, plan = begun(**KEEPS | {"eval_every": 0})
    assert plan.epoch == 0


def test_a_worse_model_is_said_once_after_the_warm_up() -> None:
    leader, _ = measuring()
    plan = next_plan(leader.handle(ev.Evaluated(0, BEFORE), 3.0))
    found = []
    for turn, loss in enumerate((4.6, 4.4, 4.7, 4.8)):
        done = evaluated(leader, plan, loss, 4.0 + 2 * turn)
        found.append(len(warned(done)))
        if said := warned(done):
            assert said[0].level == "warning"
            for part in ("4.700", "4.500", "go slower"):
                assert part in said[0].text
        plan = next_plan(done)
    assert found == [0, 0, 1, 0], "rising, better, worse, still worse"
    heir = Leader(E, facts(**KEEPS), history=PastPlan(plan))
    heir.phase = Phase.EVALUATE
    heir._evaluating = 6
    assert not warned(heir.handle(ev.Evaluated(6, 4.9), 20.0)), "the leader before has said so"
