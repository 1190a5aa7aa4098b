"""Streaming DiLoCo between two cells: a round carries a fragment, the rest of what a cell has stays
its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from node.averaging.strategies.diloco import OuterState, outer_step, pseudo_gradient
from node.averaging.strategies.outer import OuterSettings
from node.core.ids import PeerId
from node.core.journey import Plan, PlanMember, in_cell
from node.training.leader.attempt import EpochAttempt
from node.training.protocol import events as ev
from node.training.protocol.meetings import fragment, number, pieces
from node.training.protocol.plan_context import makes
from node.training.protocol.rules import Rules, carries, due
from tests.training.conftest import SHAPES, Peer, Rig
from tests.training.test_outer_rounds import equal, four, inner, meeting, trained

STREAM = OuterSettings("butterfly", "deltas", 2, "nesterov", momentum=0.8, fragments=2)
SIZES = {n: 4 * torch.Size(shape).numel() for n, shape in SHAPES.items()}
PIECES = pieces(SIZES, 2)


def sending(
    rig: Rig,
    cells: Sequence[Sequence[Peer]],
    after: Plan,
    which: int,
    listeners: Sequence[tuple[Peer, int]] = (),
) -> Plan:
    plan = meeting(rig, cells, after)
    peers = sorted(p.me for cell in cells for p in cell)
    reducers = {
        name: PeerId(peers[i % len(peers)]) for i, name in enumerate(sorted(PIECES[which - 1]))
    }
    more = tuple(PlanMember(p.me, 1, 1.0, False, cell) for p, cell in listeners)
    return replace(plan, reducers=reducers, fragment=which, members=plan.members + more)


def test_fragments_hold_every_part_once_in_about_equal_bytes() -> None:
    sizes = {
        f"layers.{i}.{what}": size
        for i in range(12)
        for what, size in (("a", 4096), ("b", 1024), ("norm", 64))
    }
    for count in (1, 2, 3, 4, 5):
        made = pieces(sizes, count)
        assert sorted(n for names in made for n in names) == sorted(sizes)
        held = [sum(sizes[n] for n in names) for names in made]
        assert max(held) - min(held) <= 4096
    assert pieces(dict(reversed(sizes.items())), 3) == pieces(sizes, 3), "of names and bytes alone"
    assert pieces({"only": 8}, 3) == [{"only"}, frozenset(), frozenset()]


def test_fragments_take_turns_and_the_last_round_has_all_parts() -> None:
    s = replace(STREAM, every=6, fragments=3)
    rounds = {e: fragment(s, e, 12) for e in range(12) if number(e, s.gap, 12)}
    assert rounds == {2: 1, 5: 2, 8: 3, 11: 0}
    assert {e: fragment(s, e, 20) for e in (11, 14, 19)} == {11: 1, 14: 2, 19: 0}
    assert all(fragment(replace(s, fragments=1), e, 20) == 0 for e in range(20))
    ends = [n for n in range(3, 30) if number(n, s.gap, n)]
    assert ends, "some runs end where a round would be due if they went on"
    assert not any(carries(Rules(1, s), 0, n, n) for n in ends), (
        "the plan that ends a run carries nothing"
    )
    changed = Rules(1, s, 1, "by the owner")
    assert (due(changed, 5, 5, 20), carries(changed, 5, 5, 20)) == (2, 0), "a change levels"
    assert (due(changed, 5, 8, 20), carries(changed, 5, 8, 20)) == (3, 3)


async def test_a_round_steps_its_fragment_and_leaves_cells_the_rest(rig: Rig) -> None:
    rig.outer = STREAM
    cells = await four(rig)
    (a, b), (c, d) = cells
    everybody, plan, state = (a, b, c, d), None, OuterState.begin(a.parameters())
    for which in (1, 2, 1):
        plan = await rig.epoch(inner(rig, cells, plan), *everybody)
        before = {p.name: p.parameters() for p in everybody}
        moved = [
            pseudo_gradient(state, {n: before[p][n] for n in PIECES[which - 1]}) for p in ("a", "c")
        ]
        state = outer_step(state, {n: (moved[0][n] + moved[1][n]) / 2 for n in moved[0]}, STREAM)
        plan = await rig.epoch(sending(rig, cells, plan, which), *everybody)
        assert equal(a, b)
        assert equal(c, d)
        assert not equal(a, c)
        for p in everybody:
            for n, t in p.parameters().items():
                if n in PIECES[which - 1]:
                    torch.testing.assert_close(t, state.anchor[n], rtol=1e-5, atol=1e-6)
                    torch.testing.assert_close(
                        p.anchored.momentum[n], state.momentum[n], rtol=1e-5, atol=1e-6
                    )
                else:
                    assert torch.equal(t, before[p.name][n])
            assert all(torch.equal(p.anchored.anchor[n], a.anchored.anchor[n]) for n in SHAPES)
    streamed = max(p.work.outer.nbytes for p in everybody)
    plan = await rig.epoch(inner(rig, cells, plan), *everybody)
    await rig.epoch(meeting(rig, cells, plan), *everybody)
    assert len({p.work.stage.digest for p in everybody}) == 1, "everything travelled"
    assert streamed < 0.7 * max(p.work.outer.nbytes for p in everybody)


async def test_a_peer_that_missed_parts_copies_the_outer_step(
    rig: Rig,
) -> None:
    cells, everybody, plan = await trained(rig, STREAM)
    (a, b), (c, d) = cells
    was = d.parameters()
    plan = sending(rig, cells, plan, 1)
    await rig.begin(plan, *everybody)
    d.work.anchor.state = (
        None  # it has come back without its anchor, so that what it gathers means nothing to it
    )
    d.work.anchor.residual.words = {n: torch.ones(shape) for n, shape in SHAPES.items()}
    ended = await rig.average(plan, *everybody)
    assert [bool(e.missing) for e in ended] == [False, False, False, True]
    got = await d.work.copy(plan, rig.round(plan, 1, sources=(a.me, b.me)))
    assert not got.missing
    await d.work.adopt(plan)
    assert equal(c, d)
    assert not equal(a, d)
    assert all(torch.equal(d.parameters()[n], was[n]) for n in PIECES[1])
    assert d.work.anchor.residual.words.keys() == PIECES[1], "and what it owes of that"
    assert all(torch.equal(d.anchored.momentum[n], a.anchored.momentum[n]) for n in SHAPES)


async def test_a_listener_takes_all_of_it_from_its_own_cell(rig: Rig) -> None:
    cells, (a, b, c, d), plan = await trained(rig, STREAM)
    (e,) = await rig.add("e")
    plan = sending(rig, cells, plan, 1, [(e, 1)])
    everybody = (a, b, c, d, e)
    await rig.begin(plan, *everybody)
    ended = await rig.average(plan, *everybody)
    assert [len(x.missing) for x in ended] == [0, 0, 0, 0, len(SHAPES)], (
        "a fragment makes nobody current"
    )
    assert e.work.outer.nbytes == 0, "and is not sent to it"
    for sources, missing in (((a.me, b.me), True), ((a.me, b.me, c.me), False)):
        got = await e.work.copy(plan, rig.round(plan, 1, sources=sources))
        assert bool(got.missing) is missing, "another cell's parameters are not its own"
    await e.work.adopt(plan)
    assert equal(e, c)
    assert e.work.anchor.state is not None
    await rig.epoch(inner(rig, [[a, b], [c, d, e]], plan), *everybody)
    assert equal(e, c)


async def test_an_undone_fragment_round_restores_the_earlier_state(rig: Rig) -> None:
    cells, (a, b, c, d), plan = await trained(rig, replace(STREAM, codec="int4", feedback=True))
    first = sending(rig, cells, plan, 1)
    state = a.work.anchor.state
    await rig.epoch(first, a, b, c, d)
    after = a.parameters()
    again = sending(rig, cells, plan, 1)
    await rig.begin(again, a, b, c, d)
    assert a.work.anchor.state is state
    assert all(p.work.anchor.residual.words == {} for p in (a, b, c, d))
    await rig.averaged(again, a, b, c, d)
    assert all(torch.equal(t, after[n]) for n, t in a.parameters().items())


def members(*cells: str, listeners: str = "") -> tuple[PlanMember, ...]:
    found = [PlanMember(PeerId(p), 1, 1.0, True, i) for i, peers in enumerate(cells) for p in peers]
    return (*found, *(PlanMember(PeerId(p), 1, 1.0, False, 0) for p in listeners))


def plan_of(fragment: int, *cells: str, listeners: str = "") -> Plan:
    everybody = members(*cells, listeners=listeners)
    owners = {in_cell(n, i): PeerId(peers[0]) for i, peers in enumerate(cells) for n in SHAPES}
    reducers = {n: PeerId(cells[-1][0]) for n in (PIECES[fragment - 1] if fragment else SHAPES)}
    return Plan(
        4, 1, PeerId("z"), everybody, (), owners, outer=2, reducers=reducers, fragment=fragment
    )


def says(attempt: EpochAttempt, **digests: str) -> None:
    for peer, digest in digests.items():
        attempt.outcomes[PeerId(peer)] = ev.Committed(PeerId(peer), attempt.plan.hash, 0, digest)


def test_a_leader_compares_digests_within_cells_only() -> None:
    streamed, whole = (
        EpochAttempt(plan_of(which, "a", "bcd", listeners="l"), 0.0, 1.0) for which in (1, 0)
    )
    for attempt in (streamed, whole):
        says(attempt, a="x", l="x", b="y", c="y", d="z")
    assert streamed.digests() == ({(1, 0): "x", (1, 1): "y"}, [(1, PeerId("d"))])
    assert len(whole.digests()[1]) == 3, "there they all hold the same"
    for attempt in (streamed, whole):
        attempt.outcomes.clear()
        attempt.dead.add(PeerId("a"))
    assert [m.peer for m in streamed.awaited] == ["b", "c", "d"]
    assert [m.peer for m in whole.awaited] == ["b", "c", "d", "l"], (
        "there the mean makes it current"
    )
    says(streamed, b="y")
    assert streamed.digests() == ({(1, 1): "y"}, [])
    streamed.attempts[1, 0] = 1
    [again] = streamed.repair((1, 0), [], lambda *_: {}, 9.0)
    assert (again.sources, again.digest) == ((PeerId("b"),), ""), "each has its cell's"
    says(streamed, l="x")
    assert [m.peer for m in streamed.awaited] == ["b", "c", "d", "l"], (
        "it had copied before its cell died"
    )


@pytest.mark.parametrize("wrong", ["another fragment", "other parts", "all parts"])
async def test_a_plan_with_other_parts_than_due_is_refused(rig: Rig, wrong: str) -> None:
    rig.outer = STREAM
    cells = await four(rig)
    a = cells[0][0]
    plan = replace(sending(rig, cells, inner(rig, cells, None), 1), outer=1)
    assert a.work.objection(plan) == ""
    worse = {
        "another fragment": replace(sending(rig, cells, inner(rig, cells, None), 2), outer=1),
        "other parts": replace(plan, reducers={n: a.me for n in PIECES[1]}),
        "all parts": replace(plan, fragment=0),
    }[wrong]
    assert a.work.objection(worse)
    assert Plan.parse(plan.canonical()) == plan
    assert makes(plan, ()) != makes(replace(plan, fragment=2), ())
