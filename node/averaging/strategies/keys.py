"""Keys under which cells look for each other in a window. Pure. Enters: the settings, the cell, its
number and the number of cells, the window. Leaves: keys, the most cells of a group. Never: a
message, a clock.

Every cell has a place in the Moshpit grid, and the window chooses the axis along which it averages:
the cells that meet differ in this index only. The place is the cell's number among all, which it
knows without having read of all (:mod:`node.outer.census`), so a grid that can be full is full.
Cells that count the same cells compute the same grid as
:class:`~node.averaging.strategies.strategy.Moshpit` from a view that all share. A place drawn by a
hash would need no number, but leaves lines of very different lengths. Indices that the groups hand
out (arXiv 2103.03239) would need none either, but a cell that was absent once comes back to a line
that has no room for it: with one cell of a hundred absent they take a fifth more rounds.
"""

import hashlib
import math
from collections.abc import Collection

from node.averaging.strategies.outer import OuterSettings
from node.core.ids import CellId

EVERYBODY = "all"
"""The key where there is one group, or pairs are drawn from all."""
SHARE = 16
"""Cells that look for pairs under one key, where they are many: an outer key has room for 64."""
MOST_TOGETHER = 16
"""Cells of one butterfly: each pulls what every other gives."""


def meeting_keys(
    s: OuterSettings, me: CellId, number: int, cells: int, window: int
) -> tuple[tuple[str, ...], int]:
    """The keys to look under, one after the other, and the most cells of a group.

    The one group of a butterfly, or of a server, looks among all; pairs (gossip) do too, or where
    they are many among some that each window draws anew. In a Moshpit grid of d axes the cells of
    one line along axis ``window % d`` meet; a cell that found nobody there looks once more in a
    plane with that line. ``number``: of cell ``me`` among ``cells``, from 0. The grid is as full as
    it can be with ``cells``; where they are too many for ``s.grid`` it has more axes.
    """
    if s.strategy == "butterfly" or s.served:
        return (EVERYBODY,), MOST_TOGETHER
    if s.strategy != "moshpit":
        return _drawn(me, cells, window), 2
    shape = _shape(s.grid, cells)
    # Holes, where there are any, are spread over the lines.
    place = [0] * len(shape)
    left = number * math.prod(shape) // cells
    for axis in reversed(range(len(shape))):
        left, place[axis] = divmod(left, shape[axis])
    axis = window % len(shape)
    others = [place[(axis + n) % len(shape)] for n in range(1, len(shape))]
    keys = [f"{axis}-{'.'.join(map(str, others))}", f"{axis}-{'.'.join(map(str, others[1:]))}"]
    tried = keys[: len(others)]
    if len(others) <= 1:
        tried.append(EVERYBODY)
    # Two cells that count different cells can take the same place: the line has room for both.
    return tuple(tried), max(2, *s.grid)


def _drawn(me: CellId, cells: int, window: int) -> tuple[str, ...]:
    """Keys that about :data:`SHARE` cells draw each; their number is a power of two, so that it is
    the same for cells that count slightly different numbers of cells. A cell that found nobody
    looks under a second key, among all such cells."""
    if cells <= 2 * SHARE:
        return (EVERYBODY,)
    bits = math.ceil(math.log2(cells / SHARE))
    drawn = hashlib.sha256(f"{window}/{me}".encode()).digest()
    return f"{bits}-{int.from_bytes(drawn[:4], 'big') >> (32 - bits)}", EVERYBODY


def server_of(stage: int, cells: Collection[CellId], shards: int) -> CellId:
    """The cell of a group that serves a stage: chosen by a hash of the cells, so that the servers
    stay when others come and go, and all cells of the group compute the same. In a group without
    that server the next cell in order serves."""
    ranked = sorted(
        cells, key=lambda cell: hashlib.sha256(f"tutti/server/{cell}".encode()).digest()
    )
    return ranked[stage % min(max(1, shards), len(ranked))]


def _shape(grid: tuple[int, ...], cells: int) -> tuple[int, ...]:
    from node.averaging.strategies.strategy import Moshpit  # numpy takes a while to load

    while math.prod(grid) < cells:
        grid = (*grid, max(2, *grid))
    return Moshpit(grid).shape(cells)
