"""Streaming between simulated cells: what plans send, what lands, and what is left to the outer
round itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from node.averaging.strategies.outer import OuterSettings
from node.core.journey import Plan
from node.sim.setup import Setup, toy_parts
from node.training.protocol.meetings import fragment, meeting, number, pieces
from tests.sim.test_switch import Watched

STREAM = OuterSettings("butterfly", "deltas", 6, "nesterov", fragments=2, overlap=2, mixing=0.5)
SETUP = Setup(
    ends=2,
    stages=1,
    parts=toy_parts(1, 4),
    replicas=4,
    epochs=20,
    micro_batches=4,
    cell=2,
    outer=STREAM,
    spread_s=0.0,
)


def parts_of(plan: Plan, setup: Setup) -> Mapping[int, set[str]]:
    """The parts that somebody averages, by stage."""
    unit_parts = {unit: plan.averagers(unit).keys() for unit in plan.units}
    return {
        stage: set(names) & {n for of in unit_parts.values() for n in of}
        for stage, names in setup.names.items()
    }


@pytest.mark.parametrize("overlap", [0, 2])
def test_plans_send_and_land_the_same_fragment_in_its_turn(overlap: int) -> None:
    setup = replace(
        SETUP, outer=replace(STREAM, overlap=overlap, mixing=STREAM.mixing * bool(overlap))
    )
    swarm = Watched(setup, 3)
    swarm.finish()
    s, plans = setup.outer, {p.epoch: p for p in swarm.plans.values()}
    landed = {e: p for e, p in plans.items() if p.fragment}
    assert {e: p.fragment for e, p in landed.items()} == {3: 1, 7: 2, 11: 1, 15: 2}
    assert {e: p.sends for e, p in plans.items() if p.sends} == (
        {e - 2: n + 1 for n, e in enumerate(landed)} if overlap else {}
    )
    for epoch, plan in landed.items():
        due = {
            stage: set(pieces({p.name: p.bytes for p in of}, 2)[plan.fragment - 1])
            for stage, of in setup.parts.items()
        }
        assert parts_of(plan, setup) == due
        assert fragment(s, epoch, setup.epochs) == plan.fragment
        if overlap:
            sent = meeting(plans[epoch - 2], s.fragments)
            assert (sent.outer, parts_of(sent, setup)) == (plan.outer, due)
            assert sent.paths == ()
            assert plans[epoch - 2].paths, "it is an epoch like any other"
    assert plans[19].outer == number(19, s.gap, 20)
    assert plans[19].fragment == 0
    assert "epoch-abandoned" not in swarm.watch.counts
    assert len({p.digest for p in swarm.live(1)}) == 1, "the last round of a run carries everything"


@pytest.mark.parametrize("epochs", [10, 11])
def test_a_run_may_end_where_a_round_would_be_due_if_it_went_on(epochs: int) -> None:
    setup = replace(SETUP, epochs=epochs)
    assert bool(number(epochs, STREAM.gap, epochs)) == (epochs == 11)
    swarm = Watched(setup, 3)
    swarm.finish()
    assert all(p.member.at.epoch == epochs for p in swarm.live())
