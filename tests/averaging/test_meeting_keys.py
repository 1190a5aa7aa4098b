"""Keys under which cells look for each other."""

import random
from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from node.averaging.strategies.keys import EVERYBODY, meeting_keys, server_of
from node.averaging.strategies.outer import OuterSettings
from node.core.ids import CellId
from node.dht.topics import WRITERS, kind_of
from testbed.planning.meetings import Trial, Window, cell_id, play, rounds_to, standings

GRID = OuterSettings("moshpit", grid=(8, 8), window_s=60.0)


def cells(count: int) -> list[CellId]:
    return [cell_id(0, n) for n in range(count)]


def keys_of(
    s: OuterSettings, me: CellId, others: Sequence[CellId], window: int
) -> tuple[tuple[str, ...], int]:
    """Meeting keys of a cell that counts itself among the others."""
    return meeting_keys(s, me, *standings(sorted({me, *others}))[me], window)


def groups(s: OuterSettings, count: int, window: int) -> Mapping[str, list[CellId]]:
    """The cells by the key that they look under first."""
    found = defaultdict[str, list[CellId]](list)
    for cell, (number, many) in standings(cells(count)).items():
        found[meeting_keys(s, cell, number, many, window)[0][0]].append(cell)
    return found


@pytest.mark.parametrize(
    ("s", "count", "window", "most"),
    [
        (OuterSettings("gossip", window_s=60.0), 30, 3, 2),  # pairs are drawn from all
        (GRID, 3, 0, 8),  # few meet whole in a grid cut down to them
        (GRID, 0, 5, 8),  # a cell that sees nobody has a key
    ],
)
def test_where_there_is_one_key_everybody_looks_under_it(s, count, window, most) -> None:
    assert keys_of(s, cell_id(0, 1), cells(count), window) == ((EVERYBODY,), most)


def test_pairs_of_many_are_drawn_anew_in_every_window() -> None:
    gossip = OuterSettings("gossip", window_s=60.0)
    mates = defaultdict[CellId, set[CellId]](set)
    for window in range(4):
        drawn = groups(gossip, 1000, window).values()
        assert max(map(len, drawn)) <= WRITERS["outer"]
        for group in drawn:
            assert len(group) > 1
            mates[group[0]].update(group)
        assert keys_of(gossip, cell_id(0, 1), cells(1000), window)[0][1] == EVERYBODY
    assert max(map(len, mates.values())) > WRITERS["outer"] // 2, "others in every window"


@pytest.mark.parametrize(
    ("grid", "count"),
    [((8, 8), 64), ((8, 8), 49), ((8, 8, 8), 100), ((32, 32), 300), ((4, 4), 36)],
)
def test_a_full_grid_averages_exactly_in_a_window_per_axis(grid, count: int) -> None:
    s = OuterSettings("moshpit", grid=grid, window_s=60.0)
    axes = {key.partition("-")[0] for window in range(9) for key in groups(s, count, window)}
    value = {cell: float(n) for n, cell in enumerate(cells(count))}
    for window in range(5, 5 + len(axes)):
        for group in groups(s, count, window).values():
            assert len(group) <= max(grid)
            value |= dict.fromkeys(group, float(np.mean([value[c] for c in group])))
    assert np.ptp(list(value.values())) == pytest.approx(0.0, abs=1e-9)


def test_the_second_key_is_of_a_plane_with_the_line() -> None:
    s = OuterSettings("moshpit", grid=(4, 4, 4), window_s=60.0)
    for window in range(3):
        planes = defaultdict[str, set[str]](set)
        for cell, known in standings(cells(64)).items():
            (line, plane), _ = meeting_keys(s, cell, *known, window)
            planes[plane].add(line)
        assert {len(lines) for lines in planes.values()} == {4}
    assert keys_of(GRID, cell_id(0, 1), cells(64), 0)[0][1] == EVERYBODY


@pytest.mark.parametrize("grid", [(2,) * 12, (32, 32), (100,)])
def test_the_directory_takes_every_key(grid) -> None:
    s = OuterSettings("moshpit", grid=grid, window_s=60.0)
    for window in range(len(grid)):
        for key in keys_of(s, cell_id(0, 3), cells(200), window)[0]:
            kind_of(f"outer/{window}/{key}")
            assert len(key) <= 32


@pytest.mark.parametrize("seed", range(4))
def test_a_slow_directory_still_forms_the_lines_of_the_grid(seed: int) -> None:
    looking = {c: keys_of(GRID, c, cells(64), seed) for c in cells(64)}
    found = Window(looking, seed, random.Random(seed)).run()
    assert len(found) == 64
    assert {frozenset(g) for g in found.values()} == {
        frozenset(g) for g in groups(GRID, 64, seed).values()
    }


def test_cells_agree_as_in_the_grid_of_a_view_that_all_share() -> None:
    assert rounds_to(play(Trial(36), seed=0)) == [2, 2]
    history = play(Trial(36, absent=0.1), seed=3)
    assert history[0] > history[1] > history[-1]
    assert rounds_to(history)[1] > 2, "who is absent keeps a value of its own"


def test_a_cell_whose_line_is_absent_finds_another_in_its_plane() -> None:
    there = [lines[0] for lines in groups(GRID, 64, 1).values()][:2]
    looking = {cell: keys_of(GRID, cell, cells(64), 1) for cell in there}
    found = Window(looking, 1, random.Random(0)).run()
    assert {frozenset(g) for g in found.values()} == {frozenset(there)}


@pytest.mark.parametrize("shards", [1, 3])
def test_another_cell_serves_when_the_server_is_gone(shards: int) -> None:
    here = cells(6)
    for stage in range(1, 5):
        server = server_of(stage, here, shards)
        left = [cell for cell in here if cell != server]
        successor = server_of(stage, left, shards)
        assert successor in left
        assert server_of(stage, left[::-1], shards) == successor, "in whatever order they are seen"


def test_the_server_stays_when_another_cell_goes() -> None:
    here = cells(6)
    server = server_of(1, here, 1)
    for gone in here:
        left = [cell for cell in here if cell != gone]
        assert (server_of(1, left, 1) == server) is (gone != server)
