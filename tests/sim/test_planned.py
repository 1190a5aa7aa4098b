"""Planned paths in the simulated swarm: the leader's router, its searches and skips under
faults."""

import dataclasses
from typing import Any

import pytest

from node.core.journey import Plan
from node.epoch import events as ev
from node.epoch.leader.leader import Leader
from node.scheduler.settings import SchedulerSettings
from node.sim.faults import Fault, Schedule, lay
from node.sim.setup import Setup, WorkTimes, toy_parts
from node.sim.swarm import MachineFactory
from tests.sim.outcomes import finished

SETUP = Setup(
    stages=3,
    replicas=2,
    micro_batches=6,
    epochs=8,
    parts=toy_parts(3, 2),
    work=WorkTimes(unequal=2.0),
    may_skip=0.34,
    scheduler=SchedulerSettings("planned", skip=0.34),
)


class PlansKept:
    """Every plan that any leader of a run makes, with its layout."""

    def __init__(self) -> None:
        self.plans = list[Plan]()
        self.how = set[str]()
        kept = self

        class Watched(Leader):
            def handle(self, event: Any, now: float) -> list[Any]:
                actions = super().handle(event, now)
                kept.plans += [a.plan for a in actions if isinstance(a, ev.SendPlan)]
                if self.planning.routing.laid is not None:
                    kept.how.add(self.planning.routing.laid.how)
                return actions

        self.make = MachineFactory(leader=Watched)


@pytest.mark.parametrize("scenario", ["quiet", "kill", "leader-kill", "liar", "random"])
def test_planned_skips_hold_under_faults(scenario: str) -> None:
    laid = set[str]()
    for seed in range(2):
        seen = PlansKept()
        finished(SETUP, lay((scenario,), SETUP, seed), seen.make)
        laid |= seen.how
        paths = [p for plan in seen.plans for p in plan.paths]
        assert {len(p.hops) for p in paths} == {2}
        if scenario == "quiet":
            assert all(sum(plan.forecast) > 0 for plan in seen.plans[2:] if plan.paths)
            assert {(p.origin, h.stage) for p in paths for h in p.hops} == {
                (o, s) for o in {p.origin for p in paths} for s in (1, 2, 3)
            }
    if scenario == "quiet":
        assert "search" in laid


@pytest.mark.parametrize(("every", "back_from"), [(1, "the newest"), (3, "an older")])
def test_a_stage_without_its_last_peer_is_skipped_and_returns(every: int, back_from: str) -> None:
    """Twelve seconds without the only peer of stage 2; its disk has the version it died at, or one
    of some epochs before."""
    setup = dataclasses.replace(
        SETUP,
        replicas=1,
        epochs=36,
        checkpoint_every=every,
        work=dataclasses.replace(SETUP.work, checkpoint_s=0.1),
    )
    seen = PlansKept()
    outcome = finished(
        setup, Schedule(1, (Fault(11.0, "outage", stage=2, seconds=12.0),)), seen.make
    )
    assert outcome.counts["stage-left-out"] == outcome.counts["stage-back"] == 1
    assert outcome.counts["epoch-abandoned"] == 1
    assert "went-back" not in outcome.counts
    visited = [{h.stage for p in plan.paths for h in p.hops} for plan in seen.plans if plan.paths]
    around = [plan for plan in seen.plans if plan.paths and plan.stage(2) == ()]
    assert len(around) >= 4
    assert {1, 3} in visited
    assert visited[-1] == {1, 2, 3}
    (held,) = {plan.stood[2] for plan in around}
    back = next(plan for plan in seen.plans if plan.epoch > around[-1].epoch and plan.stage(2))
    assert [member.current for member in back.stage(2)] == [True]
    assert (back.stood[2] == held) == (back_from == "the newest")
    assert back.stood[2].epoch <= held.epoch
    assert seen.plans[-1].stood == {}, "the run ends with every stage"


def test_a_stage_that_lost_all_its_work_keeps_its_parameters() -> None:
    """An ends peer dies, and with it every micro-batch that visited the only peer of a stage: its
    round has nothing to step."""
    setup = dataclasses.replace(SETUP, replicas=1, checkpoint_every=3)
    outcome = finished(setup, lay(("mass-kill",), setup, 2))
    assert "epoch-abandoned" not in outcome.counts
