"""Times at which a cell divides; it stays whole where one of the two could not work."""

from typing import Any

import pytest

from node.averaging.strategies.outer import OuterSettings
from node.consensus.rules import Rules
from node.core.errors import OutOfResources
from node.core.ids import CellId, PeerId
from node.core.journey import Plan, PlanMember, Version
from node.core.samples import SampleClass
from node.epoch import events as ev
from node.epoch.leader.leader import Leader
from node.epoch.plan_context import PastPlan
from tests.training.run_facts import assign, facts
from tests.training.test_leader import heard, with_ways

PEERS = [PeerId(f"{p}{n}") for p in ("ends", "stage1", "stage2") for n in "ab"]
AT = Version(9, "a" * 32)
CELL = CellId("ab" * 8)
RULES = Rules(1, OuterSettings("gossip", window_s=60.0))


def plans(
    bits: int = 0, apart: tuple[tuple[PeerId, PeerId], ...] = (), **kw: Any
) -> tuple[Leader, list[Plan]]:
    """A leader of a cell with twice the peers that a cell may have, and its plans of 5 seconds.
    `bits`: number of times that the samples were halved; `apart`: pairs that do not reach each
    other."""
    history = Plan(
        AT.epoch,
        5,
        PEERS[0],
        tuple(PlanMember(p, heard(p).stage) for p in PEERS),
        (),
        {f"s{stage}": PEERS[2 * stage] for stage in range(3)},
        lineage=AT.lineage,
        cursor=(SampleClass(0, bits, 0),),
        tokens=500,
        cell_id=CELL,
    )
    known = facts(read=lambda change: RULES, prove=True, **kw)
    leader = Leader(PEERS[0], known, history=PastPlan(history), term=5, rules=RULES, cell=CELL)
    far = {frozenset(pair) for pair in apart}
    done = []
    for p in PEERS:
        reached = (q for q in PEERS if {p, q} not in far)
        done += leader.handle(with_ways(heard(p, AT, 500, term=5), *reached), 0.0)
    for now in range(5):
        done += leader.handle(ev.ClockTick(), float(now))
    return leader, [a.plan for a in done if isinstance(a, ev.SendPlan)]


@pytest.mark.parametrize(("bits", "cells"), [(31, 2), (32, 1)])
def test_a_share_that_cannot_be_halved_again_stays_whole(bits: int, cells: int) -> None:
    assert len(plans(bits)[1]) == cells


def fits_nowhere(stage: int, cell: Any, previous: Any, room: Any) -> dict[str, PeerId]:
    """In half of the cell."""
    if previous and len(cell) == 1:
        raise OutOfResources("a part fits nowhere", "add a peer")
    return assign(stage, cell, previous, room)


@pytest.mark.parametrize(
    "lacks",
    [{"apart": ((PeerId("stage1a"), PeerId("stage2a")),)}, {"assign": fits_nowhere}],
    ids=["a-way-among-who-stays", "memory"],
)
def test_a_division_that_cannot_be_planned_changes_nothing(lacks: dict[str, Any]) -> None:
    _, (plan,) = plans(**lacks)
    assert [m.peer for m in plan.members] == PEERS
    assert plan.cursor == (SampleClass(0, 0, 0),), "the cell has given no samples away"
