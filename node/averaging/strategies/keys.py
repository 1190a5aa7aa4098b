"""Under which keys cells look for each other in a window, and how a cell's keys go on. Pure.
Enters: the settings, how many cells there are about, the cell's last indices. Leaves: keys, the
most cells of a group, the next indices. Never: who else there is."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

from node.averaging.strategies.outer import OuterSettings
from node.core.ids import CellId, PeerId

EVERYBODY = "all"
"""The key where there is one group, or pairs are drawn from all."""


def meeting_keys(
    s: OuterSettings, me: CellId, place: Sequence[int], cells: int
) -> tuple[tuple[str, ...], int]:
    """The keys to look under, one after the other, and the most cells of a group.

    Pairs (gossip) look among all. In a Moshpit grid of d axes (arXiv 2103.03239) those meet whose
    last d-1 indices are the same; who found nobody looks once more under the key without the oldest
    index. ``cells``: about how many there are, which the grid is cut down to; ``place``: the cell's
    last indices, where it has met others before.
    """
    if s.strategy != "moshpit":
        return (EVERYBODY,), 2
    axes, most = _grid(s, cells)
    indices = _indices(me, place, axes - 1, most)
    keys = [".".join(map(str, indices[i:])) or EVERYBODY for i in range(min(2, axes))]
    return tuple(keys), most


def next_place(
    s: OuterSettings,
    me: CellId,
    place: Sequence[int],
    cells: int,
    group: Collection[CellId],
    key: str,
    window: int,
) -> tuple[int, ...]:
    """The indices of cell ``me`` after it has met ``group`` under ``key``: the members of a group
    get different ones, spread evenly, by a function of the group alone."""
    if s.strategy != "moshpit":
        return ()
    from node.averaging.strategies.moshpit import indices  # numpy takes a while to load

    axes, most = _grid(s, cells)
    met = [PeerId(cell) for cell in group]
    index = indices(met, key, max(most, len(met)), window, 0)[PeerId(me)]
    kept = _indices(me, place, axes - 1, most)
    return (*kept, index)[-max(1, axes - 1) :]


def _grid(s: OuterSettings, cells: int) -> tuple[int, int]:
    """How many axes a packed grid of so many cells has, and how long the longest is."""
    from node.averaging.strategies.moshpit import Moshpit

    room = 1
    for length in s.grid:
        room *= length
    shape = Moshpit(s.grid).shape(max(1, min(cells, room)))
    return len(shape), max(2, *shape)


def _indices(me: CellId, place: Sequence[int], count: int, length: int) -> tuple[int, ...]:
    """So many indices below ``length``: the last of ``place``, before them those that a hash of the
    cell begins with."""
    drawn = int.from_bytes(hashlib.sha256(f"tutti/place/{me}".encode()).digest(), "big")
    first = tuple(drawn // length**i % length for i in range(count))
    known = tuple(index % length for index in place)[-count:] if count else ()
    return (*first[: count - len(known)], *known)
