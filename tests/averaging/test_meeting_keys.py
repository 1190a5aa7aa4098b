"""Under which keys cells look for each other."""

from __future__ import annotations

from collections import defaultdict

from node.averaging.strategies.keys import EVERYBODY, meeting_keys, next_place
from node.averaging.strategies.outer import OuterSettings
from node.core.ids import CellId

GRID = OuterSettings("moshpit", grid=(8, 8), window_s=60.0)


def cell(number: int) -> CellId:
    return CellId(f"{number:016x}")


def test_pairs_are_drawn_from_all() -> None:
    assert meeting_keys(OuterSettings("gossip", window_s=60.0), cell(1), (), 50) == (
        (EVERYBODY,),
        2,
    )


def test_few_cells_meet_whole_in_a_grid_cut_down_to_them() -> None:
    keys, most = meeting_keys(GRID, cell(1), (), 3)
    assert keys == (EVERYBODY,)
    assert most >= 3


def test_a_key_is_the_last_index_and_the_second_try_is_without_it() -> None:
    keys, most = meeting_keys(GRID, cell(1), (6, 3), 64)
    assert keys == ("3", EVERYBODY)
    assert most == 8


def test_cells_without_a_past_spread_over_the_keys() -> None:
    keys = {meeting_keys(GRID, cell(n), (), 64)[0][0] for n in range(64)}
    assert len(keys) == 8


def test_who_met_stands_on_another_line_next_time() -> None:
    """In two rounds of a grid with two axes everybody has met everybody, through others."""
    places = {cell(n): (n % 8,) for n in range(64)}
    knows = {c: {c} for c in places}
    for window in (1, 2):
        groups = defaultdict[str, list[CellId]](list)
        for c, place in places.items():
            groups[meeting_keys(GRID, c, place, 64)[0][0]].append(c)
        for key, group in groups.items():
            together = set[CellId]().union(*(knows[c] for c in group))
            new = {c: next_place(GRID, c, places[c], 64, group, key, window) for c in group}
            assert len(set(new.values())) == len(group) == 8
            places |= new
            knows |= dict.fromkeys(group, together)
    assert all(len(known) == 64 for known in knows.values())
