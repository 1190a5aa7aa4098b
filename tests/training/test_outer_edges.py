"""Cells of a stage that average along directed edges: real exchanges, real parameters, gradients
that are made up."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.reference.mixing import mixing
from node.averaging.strategies.diloco import OuterState, outer_step, pseudo_gradient
from node.averaging.strategies.outer import OuterSettings, strategy_of
from node.averaging.strategies.strategy import Edges
from node.core.ids import PeerId
from node.core.journey import Plan, PlanMember, in_cell
from node.training.protocol import events as ev
from node.training.protocol.edges import WHOLE, mass_after, targets
from node.training.protocol.meetings import Meetings
from tests.training.conftest import SHAPES, Peer, Rig
from tests.training.test_outer_rounds import inner

RING = OuterSettings("ring", "parameters", 1)
PUSH_SUM = OuterSettings("push-sum", "parameters", 1)
STATE = OuterSettings("ring", "state", 1, "nesterov")
STAGE = 4 * sum(math.prod(shape) for shape in SHAPES.values())


def along(
    rig: Rig, cells: Sequence[Sequence[Peer]], after: Plan, mass: Mapping[int, int] | None = None
) -> Plan:
    """An outer round as the leader plans it along the edges of the rig's strategy; ``mass``: of the
    cells, all the same if it is left out."""
    plan, outer = inner(rig, cells, after), (after.epoch + 1) // 2 + 1
    meetings = Meetings(rig.outer, {1: {n: 4 for n in SHAPES}}, 3, 100)
    members = tuple(replace(m, group=m.cell) for m in plan.members)
    reducers: dict[str, PeerId] = {}
    for i in range(len(cells)):
        owners = meetings.averagers(1, [m for m in members if m.cell == i], ())
        reducers |= {in_cell(name, i): peer for name, peer in owners.items()}
    senders = {
        (1, cell): among for cell, among in meetings.senders(range(len(cells)), outer).items()
    }
    weigh = mass or (
        dict.fromkeys(range(len(cells)), WHOLE) if rig.outer.strategy == "push-sum" else {}
    )
    return replace(
        plan,
        members=members,
        paths=(),
        outer=outer,
        reducers=reducers,
        senders=senders,
        mass={(1, c): m for c, m in weigh.items()},
    )


def matrix(rig: Rig, plan: Plan) -> np.ndarray:
    meeting = strategy_of(rig.outer).meet(len(plan.cells(1)), plan.outer - 1, 3)
    assert isinstance(meeting, Edges)
    return mixing(meeting, np.ones(len(plan.cells(1)), np.bool_))


def close(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def mixed(
    row: Sequence[float], before: Sequence[Mapping[str, torch.Tensor]]
) -> dict[str, torch.Tensor]:
    total = sum(row)
    return {
        n: sum(w * values[n] for w, values in zip(row, before, strict=True)) / total for n in SHAPES
    }  # pyright: ignore


@pytest.mark.parametrize(
    "settings", [RING, PUSH_SUM, replace(PUSH_SUM, fanout=2)], ids=["ring", "push-sum", "two"]
)
async def test_every_cell_makes_its_row_of_the_strategys_matrix(
    rig: Rig, settings: OuterSettings
) -> None:
    """Cells of one and of two, two rounds; what the members say of what arrived makes the next
    masses."""
    rig.outer, rig.deadline_s = settings, 60.0
    peers = await rig.add("a", "b", "c", "d", "e")
    cells, plan = [peers[:2], [peers[2]], [peers[3]], [peers[4]]], None
    mass = (
        {0: WHOLE, 1: 2 * WHOLE, 2: WHOLE // 2, 3: WHOLE // 2}
        if settings.strategy == "push-sum"
        else None
    )
    for _ in range(2):
        plan = await rig.epoch(inner(rig, cells, plan), *peers)
        before = [cell[0].parameters() for cell in cells]
        plan = along(rig, cells, plan, mass)
        await rig.epoch(plan, *peers)
        weigh = [1.0] * 4 if mass is None else [float(m) for m in mass.values()]
        for i, row in enumerate(matrix(rig, plan)):
            close(
                cells[i][0].parameters(),
                mixed([a * w for a, w in zip(row, weigh, strict=True)], before),
            )
        assert peers[0].work.stage.digest == peers[1].work.stage.digest
        for i, cell in enumerate(cells):
            assert {p.work.arrived for p in cell} == {tuple(sorted({i, *plan.senders[1, i]}))}
            if len(cell) == 1:
                assert cell[0].work.outer.nbytes == len(targets(plan, (1, i))) * STAGE, (
                    "what it has given to others"
                )
        if mass is not None:
            expected = matrix(rig, plan) @ weigh
            mass = {
                c: m
                for (_, c), m in mass_after(
                    plan, {(1, i): c[0].work.arrived for i, c in enumerate(cells)}
                ).items()
            }
            assert list(mass.values()) == pytest.approx(list(expected), abs=4)
            assert sum(mass.values()) == 4 * WHOLE
    assert not [
        e
        for p in peers
        for kind in ("gift-failed", "owner-failed", "state-lost")
        for e in p.events(kind)
    ]


async def test_a_dead_speaker_leaves_the_mass_in_its_cell(
    rig: Rig,
) -> None:
    """Of the cell of a and b the one dies that speaks and averages for it: the others go on without
    it, b repairs."""
    rig.outer, rig.deadline_s = PUSH_SUM, 60.0
    peers = await rig.add("a", "b", "c", "d")
    a, b, c, d = peers
    cells = [[a, b], [c], [d]]
    plan = await rig.epoch(inner(rig, cells, None), *peers)
    before = {p.name: p.parameters() for p in peers}
    plan = along(rig, cells, plan)
    dead = (a, b)[plan.outer % 2]
    other = b if dead is a else a
    assert plan.senders == {(1, 0): (2,), (1, 1): (0,), (1, 2): (1,)}
    await rig.begin(plan, *peers)
    await rig.net.kill(dead.me)
    living = [p for p in peers if p is not dead]
    r = rig.round(plan, 0)

    async def one(p: Peer) -> ev.RoundEnded:
        ended = asyncio.ensure_future(p.work.average(plan, r, False))
        while not ended.done():
            # the leader's word, which counts once the round is open here
            p.work.rounds.gone(dead.me)
            await asyncio.wait([ended], timeout=0.05)
        return await ended

    ended = dict(
        zip([p.name for p in living], await asyncio.gather(*map(one, living)), strict=True)
    )
    assert ended[other.name].missing
    assert not ended["c"].missing
    owners = dict.fromkeys(ended[other.name].missing, other.me)
    (again,) = await rig.average(plan, other, attempt=1, dead=(dead.me,), owners=owners)
    assert not again.missing
    for p in (c, d):
        await p.work.adopt(plan)
    assert [p.work.arrived for p in (other, c, d)] == [(0,), (1,), (1, 2)]
    half = {n: (before[other.name][n] + before["d"][n]) / 2 for n in SHAPES}
    close(
        other.parameters(),
        {n: before[other.name][n] if n in again.holds and n in owners else half[n] for n in SHAPES},
    )
    close(c.parameters(), before["c"])
    close(d.parameters(), mixed([1, 1], [before["c"], before["d"]]))
    mass = mass_after(
        plan, {(1, 0): other.work.arrived, (1, 1): c.work.arrived, (1, 2): d.work.arrived}
    )
    assert mass == {(1, 0): WHOLE, (1, 1): WHOLE // 2, (1, 2): 3 * WHOLE // 2}


async def test_anchors_and_momentum_travel_along_edges_too(rig: Rig) -> None:
    rig.outer, rig.deadline_s = STATE, 60.0
    peers = await rig.add("a", "b", "c", "d")
    cells = [[p] for p in peers]
    states, plan = [OuterState.begin(p.parameters()) for p in peers], None
    for _ in range(2):
        plan = await rig.epoch(inner(rig, cells, plan), *peers)
        stepped = [
            outer_step(s, pseudo_gradient(s, p.parameters()), STATE)
            for s, p in zip(states, peers, strict=True)
        ]
        plan = along(rig, cells, plan)
        await rig.epoch(plan, *peers)
        rows = matrix(rig, plan)
        states = [
            OuterState(
                mixed(row, [s.anchor for s in stepped]), mixed(row, [s.momentum for s in stepped])
            )
            for row in rows
        ]
        for state, p in zip(states, peers, strict=True):
            close(p.parameters(), state.anchor)
            close(p.anchored.momentum, state.momentum)


async def test_a_joiner_listens_to_the_round_of_one_cell(rig: Rig) -> None:
    rig.outer, rig.deadline_s = RING, 60.0
    peers = await rig.add("a", "b", "c", "d")
    cells = [[p] for p in peers]
    plan = await rig.epoch(inner(rig, cells, None), *peers)
    (e,) = await rig.add("e")
    plan = along(rig, cells, plan)
    plan = replace(plan, members=(*plan.members, PlanMember(e.me, 1, 1.0, False, 1, 1)))
    await rig.epoch(plan, *peers, e)
    assert e.work.stage.digest == peers[1].work.stage.digest != peers[3].work.stage.digest
    assert e.work.arrived == (0, 1, 2)


async def test_a_plan_with_other_edges_or_extra_mass_is_refused(rig: Rig) -> None:
    rig.outer, rig.deadline_s = PUSH_SUM, 60.0
    peers = await rig.add("a", "b", "c")
    a, cells = peers[0], [[p] for p in peers]
    plan = await rig.epoch(inner(rig, cells, None), *peers)
    plan = along(rig, cells, plan)
    assert a.work.objection(plan) == ""
    assert "edges" in a.work.objection(replace(plan, senders={**plan.senders, (1, 0): (1, 2)}))
    await rig.epoch(plan, *peers)
    mass = mass_after(plan, {(1, i): p.work.arrived for i, p in enumerate(peers)})
    following = replace(inner(rig, cells, plan), paths=(), mass=mass)
    assert a.work.objection(following) == ""
    more = replace(following, mass={**mass, (1, 0): mass[1, 0] + 1})
    assert "add up" in a.work.objection(more)
    assert a.work.objection(replace(more, term=more.term + 1)) == "", (
        "there may have been a plan between that is not known here"
    )
