"""Push-sum between cells under faults: from plan to plan no mass comes from nowhere, and none goes
but with a cell."""

from __future__ import annotations

import pytest

from node.averaging.strategies.outer import OuterSettings
from node.core.ids import PeerId
from node.core.journey import Plan
from node.sim.faults import strike
from node.sim.scenarios import lay
from node.sim.setup import Setup, toy_parts
from node.training.protocol.edges import WHOLE
from node.training.protocol.plan_context import makes
from node.training.protocol.plan_validation import of_edges, of_mass
from node.training.protocol.rules import Rules, levels
from tests.sim.outcomes import held
from tests.sim.test_planned import PlansKept
from tests.sim.test_switch import GOSSIP, Watched

SETUPS = {
    "pairs": Setup(
        ends=3,
        replicas=6,
        epochs=10,
        micro_batches=4,
        cell=2,
        outer=OuterSettings("push-sum", every=1),
    ),
    "singles": Setup(
        stages=1,
        parts=toy_parts(1, 3),
        replicas=7,
        epochs=12,
        cell=1,
        outer=OuterSettings("push-sum", every=1, fanout=2),
    ),
}


def mates(plan: Plan, stage: int, cell: int) -> set[PeerId]:
    return {m.peer for m in plan.cell(stage, cell)}


@pytest.mark.parametrize("name", SETUPS)
def test_mass_is_conserved_except_for_lost_cells(name: str) -> None:
    moved = flowed = 0
    for seed in range(7):
        make = PlansKept()
        held(SETUPS[name], lay(("random",), SETUPS[name], seed), make)
        made = {makes(plan, ()): plan for plan in make.plans if plan.outer}
        for plan in make.plans:
            assert set(plan.mass) == {
                (s, c) for s in {m.stage for m in plan.members} for c in plan.cells(s)
            }
            assert min(plan.mass.values()) > 0
            before = made.get(plan.base)
            told = before if before is not None and before.term + 1 == plan.term else None
            honest = of_edges(plan, SETUPS[name].outer) or of_mass(plan, SETUPS[name].outer, told)
            assert honest == "", "no honest plan is refused"
            if before is None:
                continue
            for stage in {stage for stage, _ in plan.mass}:
                was, now = (
                    {c: w for (s, c), w in p.mass.items() if s == stage} for p in (before, plan)
                )
                flowed += (stage, min(was)) in before.senders
                # A number that another cell has now says nothing: the one before it is gone.
                both = [c for c in now if mates(before, stage, c) & mates(plan, stage, c)]
                if was.keys() == now.keys() == set(both):
                    assert sum(was.values()) == sum(now.values())
                    moved += was != now
                elif was.keys() > now.keys():
                    assert (
                        sum(now.values()) <= sum(was.values())
                        or sum(now.values()) <= len(now) * WHOLE
                    )
    assert flowed > 50
    assert moved > 3, "some of what was sent has not arrived"


def test_a_swarm_switches_to_push_sum_and_back_despite_deaths() -> None:
    there = Rules(1, OuterSettings("push-sum", every=1), 1, "push-sum")
    back = Rules(1, OuterSettings("ring", every=1), 2, "ring")
    rings = 0
    for seed in range(40, 44):
        swarm = Watched(GOSSIP, seed, there, back)
        for fault in lay(("random",), GOSSIP, seed).faults:
            swarm.world.push(fault.at, strike, swarm, fault)
        for at, text in ((2.0, "push-sum"), (8.0, "ring")):
            swarm.world.push(at, swarm.tell, text)
        swarm.finish()
        for plan in swarm.plans.values():
            assert bool(plan.mass) == (plan.change == "push-sum" and not levels(plan))
            if levels(plan):
                assert not plan.senders
        first = [p for p in swarm.plans.values() if p.mass and p.epoch == p.since + 1]
        assert first
        assert all(set(p.mass.values()) == {WHOLE} for p in first)
        rings += any(p.senders and not p.mass for p in swarm.plans.values())
    assert rings, "what dies may leave one cell, and that has no neighbours"
