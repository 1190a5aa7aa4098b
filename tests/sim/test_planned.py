"""Planned paths in the simulated swarm: the leader's router, its searches and skips under faults."""

from __future__ import annotations

from typing import Any

import pytest

from node.core.ids import PeerId
from node.core.journey import Plan
from node.scheduler.settings import SchedulerSettings
from node.sim.run import run
from node.sim.scenarios import lay
from node.sim.setup import Setup, toy_parts
from node.sim.swarm import Machines
from node.training import events as ev
from node.training.leader import Leader, RunFacts

SETUP = Setup(
    stages=3, replicas=2, micro_batches=6, epochs=8, parts=toy_parts(3, 2), unequal=2.0, may_skip=0.34,
    scheduler=SchedulerSettings("planned", skip=0.34),
)  # fmt: skip


class _Watched(Machines):
    """Keeps every plan that any leader makes, and how it was laid."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []
        self.how: set[str] = set()

    def leader(self, me: PeerId, facts: RunFacts, **history: Any) -> Leader:
        kept = self

        class Watched(Leader):
            def handle(self, event: Any, now: float) -> list[Any]:
                actions = super().handle(event, now)
                kept.plans += [a.plan for a in actions if isinstance(a, ev.SendPlan)]
                if self.routing.laid is not None:
                    kept.how.add(self.routing.laid.how)
                return actions

        return Watched(me, facts, **history)


@pytest.mark.parametrize("scenario", ["quiet", "kill", "leader-kill", "liar", "random"])
def test_planned_skips_hold_under_faults(scenario: str) -> None:
    for seed in range(2):
        seen = _Watched()
        outcome = run(SETUP, lay((scenario,), SETUP, seed), seen)
        assert outcome.violation is None, f"seed {seed}: {outcome.violation}\n{outcome.schedule.to_json()}"
        assert outcome.finished
        paths = [p for plan in seen.plans for p in plan.paths]
        assert {len(p.hops) for p in paths} == {2}
        if scenario == "quiet":
            assert "search" in seen.how
            assert all(sum(plan.forecast) > 0 for plan in seen.plans[2:] if plan.paths)
            assert {(p.origin, h.stage) for p in paths for h in p.hops} == {
                (o, s) for o in {p.origin for p in paths} for s in (1, 2, 3)
            }
