"""Under which keys cells look for each other in a window. Pure. Enters: the settings, the cells
that are seen, the window. Leaves: keys, the most cells of a group. Never: a message, a clock.

Every cell has a place in the Moshpit grid, and the window chooses the axis along which it averages:
those meet that differ in this index only. The place is the cell's number among the cells that are
seen, sorted by id, so a grid that can be full is full. Cells that see the same cells compute the
same grid as :class:`~node.averaging.strategies.moshpit.Moshpit` from a view that all share. Indices
that the groups hand out (arXiv 2103.03239) would need no number of a cell, but whoever is absent
once comes back to a line that has no room for it: with one cell of a hundred absent they take a
fifth more rounds.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from node.averaging.strategies.outer import OuterSettings
from node.core.ids import CellId

EVERYBODY = "all"
"""The key where there is one group, or pairs are drawn from all."""


def meeting_keys(
    s: OuterSettings, me: CellId, cells: Collection[CellId], window: int
) -> tuple[tuple[str, ...], int]:
    """The keys to look under, one after the other, and the most cells of a group.

    Pairs (gossip) look among all. In a Moshpit grid of d axes those meet that are on one line along
    axis ``window % d``; who found nobody there looks once more in a plane with that line.
    ``cells``: those that are seen, with or without ``me``. The grid is as full as it can be with so
    many; where they are too many for ``s.grid`` it has more axes.
    """
    if s.strategy != "moshpit":
        return (EVERYBODY,), 2
    order = sorted({me, *cells})
    shape = _shape(s.grid, len(order))
    # Holes, where there are any, are spread over the lines.
    place, left = [0] * len(shape), order.index(me) * math.prod(shape) // len(order)
    for axis in reversed(range(len(shape))):
        left, place[axis] = divmod(left, shape[axis])
    axis = window % len(shape)
    others = [place[(axis + n) % len(shape)] for n in range(1, len(shape))]
    keys = [f"{axis}-{'.'.join(map(str, others))}", f"{axis}-{'.'.join(map(str, others[1:]))}"]
    tried = keys[: len(others)] if len(others) > 1 else [*keys[: len(others)], EVERYBODY]
    # Two cells that see different cells can take the same place: the line has room for both.
    return tuple(tried), max(2, *s.grid)


def _shape(grid: tuple[int, ...], cells: int) -> tuple[int, ...]:
    from node.averaging.strategies.moshpit import Moshpit  # numpy takes a while to load

    while math.prod(grid) < cells:
        grid = (*grid, max(2, *grid))
    return Moshpit(grid).shape(cells)
