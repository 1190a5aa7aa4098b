"""Who shares an optimizer step with whom, and which cells meet: pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from node.averaging.strategies.outer import OuterSettings
from node.core.ids import ENDS, PeerId
from node.core.journey import Hop, Path, Plan, PlanMember, in_cell, of_cell
from node.training.protocol.cells import ANY, arrange, columns, lay
from node.training.protocol.meetings import Meetings, number, speakers, weights
from node.training.protocol.plan_context import worked_after

P = [PeerId(f"p{i}") for i in range(8)]
NEW = frozenset({ANY})


def at(*cells: int) -> dict[PeerId, frozenset[int]]:
    """Peers each of which can be current in one cell only; -1 for nowhere."""
    return {P[i]: frozenset({c} if c >= 0 else ()) for i, c in enumerate(cells)}


def home(*cells: int) -> dict[PeerId, int]:
    return {P[i]: c for i, c in enumerate(cells)}


@pytest.mark.parametrize(
    ("most", "sizes"), [(0, [5]), (1, [1] * 5), (2, [1, 2, 2]), (3, [2, 3]), (9, [5])]
)
def test_a_young_stage_is_cut_evenly(most: int, sizes: list[int]) -> None:
    made = arrange(dict.fromkeys(P[:5], NEW), {}, most)
    assert sorted(Counter(made.cells.values()).values()) == sizes
    assert not made.listeners
    assert set(made.parents.values()) == {ANY}


def test_without_cells_fetched_parameters_join_those_held() -> None:
    stands = {P[0]: frozenset({0}), P[1]: NEW, P[2]: NEW, P[3]: frozenset[int]()}
    made = arrange(stands, home(0, ANY, ANY, 0), 0)
    assert made.cells == dict.fromkeys(P[:4], 0)
    assert (made.listeners, made.parents) == ({P[3]}, {})
    assert arrange(stands, home(0, ANY, ANY, 0), 2).cells[P[1]] == 1, (
        "of which cell they are is not known"
    )
    apart = arrange(at(0, 1), home(0, 1), 0)
    assert set(apart.cells.values()) == {0, 1}, "until the round that levels them"


def test_members_keep_their_cell_and_joiners_get_the_smallest() -> None:
    made = arrange(at(0, 0, 1, -1), home(0, 0, 1), 2)
    assert made.cells == {P[0]: 0, P[1]: 0, P[2]: 1, P[3]: 1}
    assert (made.listeners, made.parents) == ({P[3]}, {})


def test_a_cell_that_has_grown_is_cut_and_owners_stay() -> None:
    made = arrange(at(0, 0, 0, 1, 1), home(0, 0, 0, 1, 1), 2, {P[1], P[2]})
    assert made.cells == {P[0]: 2, P[1]: 0, P[2]: 0, P[3]: 1, P[4]: 1}
    assert made.parents == {2: 0}
    assert not made.listeners


def test_where_cells_hold_the_same_nobody_has_to_listen() -> None:
    both = dict.fromkeys(P[:4], frozenset({0, 1}))
    made = arrange(both, home(0, 0, 0, 1), 2)
    assert Counter(made.cells.values()) == {0: 2, 1: 2}
    assert not made.listeners
    merged = arrange({p: both[p] for p in P[:2]}, home(0, 1), 2)
    assert len(set(merged.cells.values())) == 1


def test_a_cell_of_one_is_given_up_only_when_it_is_time() -> None:
    alone = at(0, 1, 1)
    assert len(set(arrange(alone, home(0, 1, 1), 3).cells.values())) == 2
    made = arrange(alone, home(0, 1, 1), 3, mend=True)
    assert set(made.cells.values()) == {1}
    assert made.listeners == {P[0]}
    assert not arrange(at(0, 1, 1), home(0, 1, 1), 2, mend=True).listeners, (
        "there is no room for it"
    )


def test_names_of_parts_in_cells_come_apart_again() -> None:
    owners = {in_cell("w", c): P[c % 8] for c in (0, 1, 11)}
    assert [of_cell(owners, c) for c in (0, 1, 11, 2)] == [
        {"w": P[0]},
        {"w": P[1]},
        {"w": P[3]},
        {},
    ]


def test_a_micro_batch_stays_in_its_column() -> None:
    def straight(
        ends: Sequence[tuple[PeerId, float]],
        stages: Mapping[int, Sequence[tuple[PeerId, float]]],
        samples: Sequence[tuple[int, ...]],
    ) -> tuple[Path, ...]:
        return tuple(
            Path(i, ends[0][0], s, tuple(Hop(n, stages[n][0][0]) for n in sorted(stages)))
            for i, s in enumerate(samples)
        )

    cells = {
        ENDS: {0: [(P[0], 1.0)]},
        1: {0: [(P[1], 1.0)], 3: [(P[2], 3.0)]},
        2: {1: [(P[3], 1.0)], 2: [(P[4], 3.0)]},
    }
    assert len(columns(cells)) == 2
    paths = lay(cells, [(i,) for i in range(8)], straight)
    assert [p.index for p in paths] == list(range(8))
    assert [p.samples for p in paths] == [(i,) for i in range(8)]
    ways = Counter(tuple(h.peer for h in p.hops) for p in paths)
    assert ways == {(P[1], P[3]): 2, (P[2], P[4]): 6}


@pytest.mark.parametrize(
    ("every", "outer"), [(0, []), (1, [1, 3, 5, 7, 9]), (2, [2, 5, 8, 9]), (50, [9])]
)
def test_outer_rounds_come_after_so_many_epochs_and_at_the_end(
    every: int, outer: list[int]
) -> None:
    assert [e for e in range(10) if number(e, every, 10)] == outer
    assert [number(e, every, 10) for e in outer] == list(range(1, len(outer) + 1))


def meetings(strategy: str, **more: Any) -> Meetings:
    return Meetings(
        OuterSettings(strategy, every=1, **more), {1: {"a": 100, "b": 60, "c": 50}}, 3, 100
    )


def test_groups_are_the_strategys_over_cells() -> None:
    assert meetings("butterfly").groups([0, 3, 5], 1) == ({0: 0, 3: 0, 5: 0}, ())
    pairs, _ = meetings("gossip").groups(range(8), 1)
    assert sorted(Counter(pairs.values()).values()) == [2] * 4
    moshpit = meetings("moshpit", grid=(2, 2))
    one, two = moshpit.groups(range(4), 1)[0], moshpit.groups(range(4), 2)[0]
    assert sorted(Counter(one.values()).values()) == [2, 2]
    assert {(one[c], two[c]) for c in range(4)} == {
        (a, b) for a in set(one.values()) for b in set(two.values())
    }
    assert len(set(moshpit.groups(range(6), 1)[0])) == 6, "a grid that is too small grows"
    assert (
        meetings("parameter-server").groups(range(4), 1)[1]
        == meetings("parameter-server").groups(range(4), 9)[1]
    )


def test_parts_are_divided_by_bytes_and_servers_take_all() -> None:
    members = [PlanMember(P[i], 1, 1.0, i != 3, cell=i // 2) for i in range(4)]
    spread = meetings("butterfly").averagers(1, members, ())
    assert spread == {"a": P[0], "b": P[1], "c": P[2]}
    assert set(meetings("butterfly").averagers(1, members, (1,)).values()) == {P[2]}


def test_who_serves_pushes_stays_when_others_come_and_go() -> None:
    pushes = meetings("hogwild", carries="deltas", optimizer="sgd", shards=2)
    everybody = [PlanMember(P[i], 1, 1.0, True, cell=i // 2) for i in range(8)]
    groups, cells = pushes.groups(range(4), 1)
    assert set(groups.values()) == {0}
    served = pushes.averagers(1, everybody, cells)
    assert len(set(served.values())) == 2
    assert {m.cell for m in everybody if m.peer in served.values()} == set(cells)
    for gone in {m.peer for m in everybody} - set(served.values()):
        rest = [m for m in everybody if m.peer != gone]
        assert (
            pushes.averagers(1, rest, pushes.groups(sorted({m.cell for m in rest}), 2)[1]) == served
        )
    assert pushes.groups(range(9), 1)[1] == cells or set(pushes.groups(range(9), 1)[1]) & {
        4,
        5,
        6,
        7,
        8,
    }
    listeners = [PlanMember(m.peer, 1, 1.0, m.cell not in cells, cell=m.cell) for m in everybody]
    assert len(set(pushes.averagers(1, listeners, cells).values())) == 2, (
        "who is behind serves nothing"
    )


def test_one_live_member_of_each_cell_speaks() -> None:
    members = (
        *(PlanMember(P[i], 1, 1.0, True, i // 2, 0) for i in range(4)),
        PlanMember(P[4], 1, 1.0, False, 1, 0),
        PlanMember(P[5], 1, group=7),
    )
    plan = Plan(5, 1, P[0], members, (), {}, outer=3)
    said = speakers(plan, (1, 0), ())
    assert len(said) == 2
    assert {p for p in said if p in P[:2]}
    rest = speakers(plan, (1, 0), sorted(said))
    assert len(rest) == 2
    assert not rest & said
    assert P[4] not in rest | said


def test_a_cell_weighs_its_work_only_where_all_end_equal() -> None:
    members = tuple(PlanMember(P[i], 1, 1.0, i != 4, i // 2, 0 if i < 6 else 6) for i in range(8))
    plan = Plan(
        5, 1, P[0], members, (), {}, outer=3, worked={(1, 0): 7, (1, 1): 2, (1, 3): 90, (2, 2): 50}
    )
    for settings in (
        OuterSettings("butterfly", every=1),
        OuterSettings("parameter-server", "deltas", 1, "nesterov"),
    ):
        assert weights(plan, (1, 0), settings) == {0: 7, 1: 2, 2: 1}, (
            "who has done nothing still holds what the others began with"
        )
    for settings in (
        OuterSettings("gossip", every=1),
        OuterSettings("moshpit", "state", 1, "nesterov", grid=(2, 2)),
    ):
        assert weights(plan, (1, 0), settings) == {0: 1, 1: 1, 2: 1}
    assert set(
        weights(Plan(5, 1, P[0], members, (), {}, outer=3), (1, 0), OuterSettings(every=1)).values()
    ) == {1}


def test_a_cells_work_is_counted_anew_after_an_outer_round() -> None:
    ends, *rest = P
    members = (
        PlanMember(ends, ENDS, cell=0),
        *(PlanMember(p, 1, cell=i // 2) for i, p in enumerate(rest[:4])),
    )
    paths = tuple(Path(i, ends, (i,), (Hop(1, rest[at]),)) for i, at in enumerate((0, 1, 1, 2, 0)))
    plan = Plan(5, 1, ends, members, paths, {}, worked={(1, 0): 10, (1, 7): 3})
    assert worked_after(plan, ()) == {(1, 0): 14, (1, 1): 1}, (
        "the ends have one cell, and cell 7 is gone"
    )
    assert worked_after(plan, (0, 3)) == {(1, 0): 13, (1, 1): 0}
    assert worked_after(Plan(6, 1, ends, members, (), {}, outer=1, worked={(1, 0): 14}), ()) == {}
    stranger = Path(9, PeerId("nobody"), (9,), (Hop(1, PeerId("stranger")), Hop(4, rest[0])))
    assert worked_after(Plan(5, 1, ends, members, (stranger,), {}), ()) == {(1, 0): 0, (1, 1): 0}
