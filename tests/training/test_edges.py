"""Outer rounds along directed edges: who sends to whom, what weighs how much, and that no mass is
made or lost."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from random import Random
from typing import Any

import numpy as np
import pytest

from benchmarks.reference.mixing import mixing
from node.averaging.strategies.outer import OuterSettings, strategy_of
from node.averaging.strategies.strategy import Edges
from node.core import samples as order
from node.core.ids import PeerId
from node.core.journey import Hop, Path, Plan, PlanMember, Unit, Version
from node.training.leader.attempt import EpochAttempt
from node.training.leader.draft import draft
from node.training.leader.leader import Leader
from node.training.leader.roster import Roster
from node.training.protocol import events as ev
from node.training.protocol.edges import WHOLE, arrived, flows, mass_after, mass_of, party, targets
from node.training.protocol.meetings import Meetings, speakers
from node.training.protocol.plan_context import Memory, PlanContext, makes, worked_after
from node.training.protocol.plan_validation import of_edges, of_mass, of_work
from tests.training.run_facts import facts
from tests.training.test_leader import S1, S2, T1, E, commits, heard, led, next_plan, tell

P = [PeerId(f"p{i:02d}") for i in range(40)]
SIZES = {1: {"a": 100, "b": 60, "c": 50}}


def meetings(strategy: str, **more: Any) -> Meetings:
    return Meetings(OuterSettings(strategy, every=1, **more), SIZES, 3, 100)


def plan_of(cells: list[int], senders: dict[int, tuple[int, ...]], mass: dict[int, int]) -> Plan:
    members = tuple(PlanMember(P[i], 1, cell=c, group=c) for i, c in enumerate(cells))
    units = {(1, cell): among for cell, among in senders.items()}
    return Plan(
        5,
        1,
        P[0],
        members,
        (),
        {},
        outer=3,
        senders=units,
        mass={(1, c): m for c, m in mass.items()},
    )


@pytest.mark.parametrize("strategy", ["ring", "push-sum"])
@pytest.mark.parametrize("count", [2, 3, 4, 7])
def test_without_failures_values_follow_the_mixing_matrix(strategy: str, count: int) -> None:
    """Values in fractions: what differs is what shares that are whole numbers leave of a third of
    2^20."""
    settings = OuterSettings(
        strategy, every=1, fanout=2 if strategy == "push-sum" and count > 4 else 1
    )
    meet = Meetings(settings, SIZES, 3, 100)
    cells = list(range(10, 10 + count))
    values = [Fraction(i * i + 1) for i in range(count)]
    x, w = np.array([float(v) for v in values]), np.ones(count)
    mass = dict.fromkeys(cells, WHOLE) if strategy == "push-sum" else {}
    for number in range(1, 6):
        senders = meet.senders(cells, number)
        plan = plan_of(cells, senders, mass)
        weigh = [flows(plan, (1, cell)) for cell in cells]
        before = dict(zip(cells, values, strict=True))
        values = [
            sum((before[c] * n for c, n in f.items()), Fraction(0)) / sum(f.values()) for f in weigh
        ]
        mass = {c: m for (_, c), m in mass_after(plan, {(1, c): senders[c] for c in cells}).items()}
        meeting = strategy_of(settings).meet(count, number - 1, 3)
        assert isinstance(meeting, Edges)
        matrix = mixing(meeting, np.ones(count, np.bool_))
        x, w = matrix @ x, matrix @ w
        if strategy == "push-sum":
            assert sum(mass.values()) == count * WHOLE
            assert [m / WHOLE for m in mass.values()] == pytest.approx(list(w), abs=1e-5)
        assert [float(v) for v in values] == pytest.approx(list(x / w), rel=1e-5)
    if (strategy, count) == ("push-sum", 4):
        assert len(set(values)) == 1, "four cells with one neighbour agree exactly after two rounds"


def test_a_cell_keeps_unsent_mass_and_a_tiny_one_sends_nothing() -> None:
    plan = plan_of([0, 1, 2], {0: (2,), 1: (0, 2), 2: (1,)}, {0: 7, 1: 1, 2: 9})
    assert [targets(plan, (1, c)) for c in range(3)] == [(1,), (2,), (0, 1)]
    assert flows(plan, (1, 0)) == {0: 4, 2: 3}
    assert flows(plan, (1, 1)) == {1: 1, 0: 3, 2: 3}, "7 // 2 and 9 // 3"
    assert flows(plan, (1, 2)) == {2: 3}, "of 1 nothing can be given away"
    everything = {(1, 0): (0, 2), (1, 1): (0, 1, 2), (1, 2): (1, 2)}
    assert mass_after(plan, everything) == {(1, 0): 7, (1, 1): 7, (1, 2): 3}
    assert mass_after(plan, {}) == plan.mass
    assert mass_after(plan, {(1, 1): (0, 5), (1, 9): (0,)}) == {(1, 0): 4, (1, 1): 4, (1, 2): 9}, (
        "strangers bring nothing"
    )


def test_a_round_awaits_senders_and_a_repair_awaits_none() -> None:
    plan = plan_of([0, 0, 1, 1, 2], {0: (1, 2)}, {0: WHOLE, 1: WHOLE, 2: 1})
    listener = PlanMember(PeerId("q"), 1, current=False, cell=0, group=0)
    plan = replace(plan, members=(*plan.members, listener))
    cell, weigh = party(plan, (1, 0), 0, ())
    assert cell == {P[0], P[1], listener.peer}
    assert weigh == {P[0]: WHOLE, P[1]: WHOLE, P[3]: WHOLE // 2}, (
        "they take turns, and of next to nothing nothing is given"
    )
    assert party(plan, (1, 0), 0, (P[3], P[0])) == (
        {P[1], listener.peer},
        {P[1]: WHOLE, P[2]: WHOLE // 2},
    )
    assert party(plan, (1, 0), 1, ()) == (cell, {P[0]: WHOLE, P[1]: WHOLE})


def test_only_who_is_in_every_part_has_arrived() -> None:
    plan = plan_of([0, 0, 1, 2], {0: (1, 2)}, {})
    assert arrived(plan, (1, 0), [(P[0], P[2], P[3]), (P[1], P[2], P[3])]) == (0, 1, 2)
    assert arrived(plan, (1, 0), [(P[0], P[2], P[3]), (P[1], P[3])]) == (0, 2)
    assert arrived(plan, (1, 0), [(P[2],), (P[3],)]) == (0,)


def work(do: Callable[[], object]) -> int:
    """Lines of Python that are run, each turn of a loop counted: what takes time, and is the same
    on every machine."""
    lines, before = 0, sys.gettrace()

    def see(frame: Any, event: str, arg: Any) -> Any:
        nonlocal lines
        lines += event == "line"
        return see

    sys.settrace(see)
    try:
        do()
    finally:
        sys.settrace(before)
    return lines


def test_repeated_questions_of_a_plan_scale_with_the_cells() -> None:
    masses, waits, turns = [], [], []
    for count in (50, 200):
        cells = list(range(count))
        senders = meetings("push-sum", fanout=2).senders(cells, 1)
        plan = plan_of([0], senders, dict.fromkeys(cells, WHOLE))
        members = tuple(PlanMember(PeerId(f"p{c:03d}"), 1, cell=c, group=c) for c in cells)
        attempt = EpochAttempt(replace(plan, members=members), 0.0, 1.0)
        masses.append(
            work(
                lambda plan=plan, told=senders: mass_after(
                    plan, {(1, c): among for c, among in told.items()}
                )
            )
        )
        waits.append(work(lambda attempt=attempt: attempt.awaited))
        together = replace(plan, members=tuple(replace(m, group=0) for m in members))
        turns.append(work(lambda plan=together: speakers(plan, (1, 0), ())))
    assert masses[1] < 5 * masses[0]
    assert waits[1] < 5 * waits[0], "after every word that a member has committed"
    assert turns[1] < 5 * turns[0]


def split(
    before: dict[int, int],
    cells: list[int],
    parents: dict[int, int],
    homes: list[int] | None = None,
) -> dict[int, int]:
    members = [PlanMember(P[i], 1, cell=c) for i, c in enumerate(cells)]
    home = dict(zip(P, homes or cells, strict=False))
    found = mass_of(
        {(1, c): m for c, m in before.items()},
        members,
        {(1, c): p for c, p in parents.items()},
        home.__getitem__,
    )
    return {cell: m for (_, cell), m in found.items()}


def test_split_cells_share_their_mass_and_merged_ones_add_it() -> None:
    assert split({}, [0, 1, 1, 2], {0: -1, 1: -1, 2: -1}) == {0: WHOLE, 1: WHOLE, 2: WHOLE}
    assert split({0: WHOLE + 1, 3: WHOLE}, [0, 4, 3], {4: 0}) == {
        0: WHOLE // 2 + 1,
        4: WHOLE // 2,
        3: WHOLE,
    }
    assert split({0: WHOLE, 3: WHOLE, 5: 9}, [0, 0, 3], {}, [0, 3, 3]) == {0: WHOLE, 3: WHOLE}, (
        "cell 5 has died"
    )
    assert split({0: WHOLE, 1: 7}, [0, 0], {}, [0, 1]) == {0: WHOLE + 7}
    assert split({0: 1, 1: 2 * WHOLE}, [0, 2, 1], {2: 0}) == {0: 1, 2: 1, 1: 2 * WHOLE}, (
        "nobody has nothing"
    )
    assert split({0: WHOLE // 2, 1: 5, 2: 9 * WHOLE}, [0, 1], {}) == {0: WHOLE, 1: 10}, (
        "most of it has died: the rest counts twice"
    )


@pytest.mark.parametrize("seed", range(20))
def test_failures_conserve_mass_except_for_the_dead(seed: int) -> None:
    dice = Random(seed)
    count = dice.randint(2, 9)
    meet = meetings("push-sum", fanout=dice.randint(1, 3))
    mass = dict.fromkeys(range(count), WHOLE)
    for number in range(1, 60):
        cells = sorted(mass)
        if len(cells) > 2 and dice.random() < 0.1:
            dead = dice.choice(cells)
            total = sum(mass.values()) - mass.pop(dead)
            left = split(mass, sorted(mass), {})
            factor = sum(left.values()) // total
            assert left == {c: factor * m for c, m in mass.items()}
            mass, cells = left, sorted(mass)
        senders = meet.senders(cells, number)
        plan = plan_of(cells, senders, mass)
        for cell in cells:
            assert sum(flows(plan, (1, cell)).values()) > 0
        told: dict[Unit, tuple[int, ...]] = {
            (1, c): tuple(s for s in senders[c] if dice.random() < 0.7)
            for c in cells
            if dice.random() < 0.9
        }
        after = {c: m for (_, c), m in mass_after(plan, told).items()}
        assert sum(after.values()) == sum(mass.values())
        assert min(after.values()) > 0
        mass = after


def roster_of(version: Version, cells: list[int], told: dict[int, tuple[int, ...]]) -> Roster:
    roster = Roster(1)
    for i, cell in enumerate(cells):
        roster.hear(
            ev.Heartbeat(P[i], 1, version, f"d{cell}", cell=cell, arrived=told.get(i, ())), 0.0
        )
    return roster


def sharing(
    stage: int, able: list[tuple[PeerId, float]], previous: object, *room: object
) -> dict[str, PeerId]:
    return dict.fromkeys(SIZES[stage], able[0][0])


def test_the_next_plan_knows_what_arrived_whoever_makes_it() -> None:
    """The leader that committed the round and one that only knows the plan, from what all say, come
    to the same masses."""
    meet = meetings("push-sum")
    before = replace(
        plan_of([0, 0, 1, 1, 2, 2], meet.senders([0, 1, 2], 1), dict.fromkeys(range(3), WHOLE)),
        lineage="ab" * 16,
    )
    version = makes(before, ())
    # Cell 2: one that copied the result knows nothing, and one that was there does.
    told = {0: (0, 2), 1: (0, 2), 2: (1,), 3: (1,), 4: (), 5: (1, 2)}
    roster = roster_of(version, [0, 0, 1, 1, 2, 2], told)
    roster.agree(version)
    memory = Memory(lambda c: None, lambda s: order.WHOLE, lambda v: None, None, ())
    memory.cursor_after = lambda plan, dropped: order.WHOLE  # type: ignore[method-assign]
    memory.committed(version, before, {}, (), 0)
    new = Memory(lambda c: None, lambda s: order.WHOLE, lambda v: None, before, ())
    new.cursor_after = lambda plan, dropped: order.WHOLE  # type: ignore[method-assign]
    plans = []
    for past in (memory.past(version, 0, 1), new.past(version, 0, 1)):
        assert past is not None
        made = draft(roster, version, past, sharing, 2, meet, 2)
        plans.append(made)
        half = WHOLE // 2
        assert made.mass == {(1, 0): WHOLE + half, (1, 1): half, (1, 2): WHOLE}, (
            "1 had nothing of 0, which keeps it"
        )
        assert made.senders == {(1, c): s for c, s in meet.senders([0, 1, 2], 2).items()}
        assert {m.group for m in made.members} == {0, 1, 2}
    assert plans[0] == plans[1]
    again = draft(
        roster, version, PlanContext(order.WHOLE, {}, 0, mass=plans[0].mass), sharing, 2, meet, 2
    )
    assert again.mass == plans[0].mass, (
        "a plan of the same version again: what arrived is counted once"
    )
    assert (
        draft(
            roster, version, PlanContext(order.WHOLE, {}, 0), sharing, 2, meetings("ring"), 2
        ).mass
        == {}
    )


def test_edges_never_loop_and_a_large_fanout_shrinks() -> None:
    for strategy, fanout in (("ring", 1), ("push-sum", 1), ("push-sum", 3)):
        for count in range(2, 9):
            for number in range(1, 6):
                senders = meetings(strategy, fanout=fanout).senders(range(0, 3 * count, 3), number)
                assert len(senders) == count
                assert all(
                    cell not in among and len(set(among)) == len(among) > 0
                    for cell, among in senders.items()
                )
    assert meetings("push-sum").senders([4], 1) == meetings("ring").senders([4], 1) == {}
    assert meetings("gossip").senders([1, 2], 1) == {}
    assert meetings("ring").groups([2, 5], 1) == ({2: 2, 5: 5}, ())


def test_masses_pass_from_leader_to_leader() -> None:
    sizes = {stage: {f"s{stage}": 4} for stage in range(3)}
    settings = facts(cell=1, meetings=Meetings(OuterSettings("push-sum", every=1), sizes, 3, 100))
    third = PeerId("stage1c")
    leader = led(settings, [heard(p) for p in (E, S1, T1, third, S2)])
    first = next_plan(leader.handle(ev.ClockTick(), 2.0))
    plan = next_plan(commits(leader, first, 3.0))
    cell = {m.peer: m.cell for m in plan.members if m.stage == 1}
    (a, b, c) = sorted(cell, key=lambda p: cell[p])
    assert plan.outer
    assert plan.senders == {(1, 0): (2,), (1, 1): (0,), (1, 2): (1,)}, (
        "the other stages have one cell"
    )
    assert plan.mass == {(0, 0): WHOLE, (1, 0): WHOLE, (1, 1): WHOLE, (1, 2): WHOLE, (2, 0): WHOLE}
    leader.handle(ev.Unreachable(b), 4.0)
    came = {E: (), S2: (), a: (0, 2), c: (2,)}
    done = [
        x
        for p, told in came.items()
        for x in leader.handle(ev.Committed(p, plan.hash, 0, f"d {p}", 1.0, arrived=told), 4.0)
    ]
    following = next_plan(done)
    half = WHOLE // 2
    expected = {(0, 0): WHOLE, (1, 0): WHOLE + half, (1, 2): half, (2, 0): WHOLE}
    assert following.mass == expected, (
        "what cell 0 had for the dead one it keeps, and that one has taken its own with it"
    )
    other = Leader(PeerId("ends0"), settings)
    version = makes(plan, ())
    there = [
        replace(heard(p, version, 9), cell=cell.get(p, 0), digest=f"d {p}", arrived=told)
        for p, told in came.items()
    ]
    tell(other, [heard(PeerId("ends0")), *there], 5.0)
    other.handle(ev.ClockTick(), 7.0)
    again = next_plan(other.handle(ev.Recalled(version, plan, ()), 7.1))
    assert {unit: mass for unit, mass in again.mass.items() if unit[0]} == {
        u: m for u, m in expected.items() if u[0]
    }


def weighed() -> tuple[Plan, Plan]:
    """A round of three cells along push-sum's edges, and the plan after it."""
    meet = meetings("push-sum")
    plan = plan_of([0, 1, 2], meet.senders([0, 1, 2], 3), {0: WHOLE, 1: 2 * WHOLE, 2: WHOLE // 2})
    told: dict[Unit, tuple[int, ...]] = {
        (1, c): (c, *among) for c, among in meet.senders([0, 1, 2], 3).items()
    }
    return plan, replace(plan, epoch=6, outer=0, senders={}, mass=mass_after(plan, told))


@pytest.mark.parametrize("strategy", ["ring", "push-sum"])
def test_edges_that_are_not_the_strategys_are_objected_to(strategy: str) -> None:
    settings = OuterSettings(strategy, every=1)
    right = Meetings(settings, SIZES, 3, 100).senders([0, 1, 2, 3], 3)
    plan = plan_of([0, 1, 2, 3], right, {})
    assert of_edges(plan, settings) == ""
    for among in (
        {**right, 0: (7,)},
        {**right, 0: (0,)},
        {**right, 0: ()},
        {**right, 0: (1, 2, 3)},
        {**right, 7: (0,)},
        {},
    ):
        assert "edges" in of_edges(plan_of([0, 1, 2, 3], among, {}), settings), among
    later = plan_of([0, 1, 2, 3], Meetings(settings, SIZES, 3, 100).senders([0, 1, 2, 3], 4), {})
    assert (of_edges(later, settings) == "") == (strategy == "ring"), "those of another round"
    assert of_edges(plan, OuterSettings("butterfly", every=1)), (
        "and none where cells meet in groups"
    )
    assert of_edges(replace(plan, outer=0), settings), "or in an epoch of micro-batches"
    together = replace(plan, members=tuple(replace(m, group=0) for m in plan.members))
    assert "group" in of_edges(together, settings)
    lost = replace(plan, members=(*plan.members, PlanMember(PeerId("q"), 2, current=False)))
    assert of_edges(lost, settings) == "", "a stage of listeners has no cells"
    assert "edges" in of_edges(replace(lost, senders={**plan.senders, (2, 0): (1,)}), settings)


def test_work_that_no_plan_gave_is_objected_to() -> None:
    """Two cells of two; cell 1 had three of the four micro-batches, and two from before."""
    first = replace(plan_of([0, 0, 1, 1], {}, {}), outer=0)
    taken = (1, 2, 3, 3)
    paths = tuple(Path(i, P[0], (i,), (Hop(1, P[p]),)) for i, p in enumerate(taken))
    before = replace(first, paths=paths, worked={(1, 1): 2})
    assert worked_after(before, ()) == {(1, 0): 1, (1, 1): 5}
    for told in ({(1, 0): 1, (1, 1): 5}, {(1, 0): 1, (1, 1): 4}, {(1, 1): 5, (1, 2): 5}, {}):
        assert of_work(replace(first, worked=told), before) == "", told
    for told in ({(1, 0): 1, (1, 1): 6}, {(1, 0): 1 << 40}, {(2, 0): 1}):
        assert "worked more" in of_work(replace(first, worked=told), before), told
        assert of_work(replace(first, worked=told), None) == "", "nothing to compare with"
    assert "worked more" in of_work(before, replace(before, outer=1, paths=())), (
        "who has met others begins anew"
    )


def test_masses_that_no_plan_leaves_are_objected_to() -> None:
    settings, (before, plan) = OuterSettings("push-sum", every=1), weighed()
    assert of_mass(before, settings, None) == of_mass(plan, settings, before) == ""

    def with_mass(**changed: int) -> Plan:
        return replace(
            plan, mass=plan.mass | {(1, int(cell[1:])): mass for cell, mass in changed.items()}
        )

    assert "add up" in of_mass(with_mass(c0=plan.mass[1, 0] + 1), settings, before)
    assert "add up" in of_mass(with_mass(c0=plan.mass[1, 0] - 1), settings, before)
    assert of_mass(with_mass(c0=plan.mass[1, 0] + 1), settings, None) == "", (
        "nothing to compare with"
    )
    assert "above 0" in of_mass(
        with_mass(c0=0, c1=plan.mass[1, 0] + plan.mass[1, 1]), settings, before
    )
    assert "of its cells" in of_mass(with_mass(c7=WHOLE), settings, before)
    assert "of its cells" in of_mass(replace(plan, mass={}), settings, before)
    assert "of its cells" in of_mass(plan, OuterSettings("ring", every=1), before), (
        "a ring has none"
    )
    assert "half" in of_mass(with_mass(c0=1, c1=1, c2=1), settings, None)
    anew = with_mass(c0=WHOLE, c1=WHOLE, c2=WHOLE)
    assert of_mass(anew, settings, before) == "", (
        "where nobody remembers the plan before all begin anew"
    )


def test_masses_are_believed_as_far_as_they_can_be_true() -> None:
    settings, (before, plan) = OuterSettings("push-sum", every=1), weighed()
    left = replace(
        plan, members=plan.members[:2], mass={u: m for u, m in plan.mass.items() if u[1] < 2}
    )
    assert of_mass(left, settings, before) == "", "the third has taken its mass along"
    assert "add up" in of_mass(
        replace(left, mass={(1, 0): 3 * WHOLE, (1, 1): WHOLE}), settings, before
    ), "more than there was"
    new = PlanMember(P[9], 1, cell=5, group=5)
    more = replace(plan, members=(*plan.members, new), mass={**plan.mass, (1, 5): WHOLE})
    assert of_mass(more, settings, before) == ""
    assert "add up" in of_mass(
        replace(more, mass={**more.mass, (1, 5): WHOLE + 1}), settings, before
    )
    half = plan.mass[1, 1] // 2
    cut = replace(more, mass={**plan.mass, (1, 1): plan.mass[1, 1] - half, (1, 5): half})
    assert of_mass(cut, settings, before) == ""
    assert "add up" in of_mass(replace(cut, mass={**cut.mass, (1, 5): half - 1}), settings, before)
    reborn = replace(
        plan, mass={**plan.mass, (1, 0): 1}, digests={(1, 0): "a", (1, 1): "b", (1, 2): "c"}
    )
    assert "add up" in of_mass(reborn, settings, before)
    again = replace(reborn, digests={**reborn.digests, (1, 0): "b"})
    assert of_mass(again, settings, before) == "", (
        "what holds another's parameters may be a new cell with an old number"
    )
