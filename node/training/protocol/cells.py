"""Which replicas of a stage share an optimizer step, from plan to plan; and which cells a
micro-batch goes through. Enters: in which cells each peer could be current. Leaves: a cell for
everybody, paths that stay within a column of cells. Never: a clock, chance, a word with anybody.

A peer is current where its parameters are those of the cell. So who changes its cell becomes a
listener there for one epoch, unless both cells hold the same: a cell that has grown too large is
cut in two that begin with the same parameters, and after an outer round over all cells everybody
fits everywhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from node.core.ids import ENDS, PeerId
from node.core.journey import Path
from node.scheduler.quotas import quotas

ANY = -1
"""The cell of parameters that belong to none yet: those a run begins with."""

Speeds = Sequence[tuple[PeerId, float]]
Lay = Callable[[Speeds, Mapping[int, Speeds], Sequence[tuple[int, ...]]], tuple[Path, ...]]


@dataclass
class Arrangement:
    """``cells``: of every peer. ``listeners``: who is none of its current members. ``parents``: for
    a new cell the one it was cut from, :data:`ANY` for none."""

    cells: dict[PeerId, int] = field(default_factory=dict)
    listeners: set[PeerId] = field(default_factory=set)
    parents: dict[int, int] = field(default_factory=dict)


def arrange(
    stands: Mapping[PeerId, Collection[int]],
    homes: Mapping[PeerId, int],
    most: int,
    seniors: Collection[PeerId] = (),
    mend: bool = False,
) -> Arrangement:
    """Cells for the replicas of one stage: at most ``most`` current members each (0: one cell for
    all), with few changes.

    ``stands``: the cells a peer could be current in, empty for a listener; somebody can. ``homes``:
    the cell it was in last. ``seniors`` own something, and stay where one of several must go.
    ``mend``: a moment to give up cells of one.
    """
    known = {cell for able in stands.values() for cell in able} - {ANY}
    if not most and len(known) == 1:
        # Where there is one cell only, parameters that were fetched are those of it, as the ones
        # somebody can go back to.
        stands = {peer: known if able else able for peer, able in stands.items()}
    cells, homeless = _at_home(stands, homes, most, seniors)
    _merge(cells, stands, most)
    lonely = _lonely(cells, most) if mend and most > 1 else None
    if lonely is not None:
        del cells[lonely]
    made = Arrangement()
    for content in sorted(homeless, key=sorted):
        left = []
        for peer in homeless[content]:
            room = [
                c
                for c in sorted(content)
                if len(cells.get(c, ())) < (most or len(stands)) and c in cells
            ]
            if room:
                cells[min(room, key=lambda c: len(cells[c]))].append(peer)
            else:
                left.append(peer)
        count = -(-len(left) // (most or len(stands)))
        numbers = [n for n in range(len(cells) + count + len(stands)) if n not in cells][:count]
        for i, peer in enumerate(left):
            cells.setdefault(numbers[i % count], []).append(peer)
        for number in numbers:
            home = homes.get(cells[number][0], ANY)
            made.parents[number] = home if home in content else min(content)
    made.cells = {peer: cell for cell, peers in cells.items() for peer in peers}
    for peer in sorted(stands.keys() - made.cells.keys()):
        sizes = {c: sum(at == c for at in made.cells.values()) for c in sorted(cells)}
        made.cells[peer] = min(sizes, key=lambda c: (sizes[c], c))
        made.listeners.add(peer)
    return made


def _at_home(
    stands: Mapping[PeerId, Collection[int]],
    homes: Mapping[PeerId, int],
    most: int,
    seniors: Collection[PeerId],
) -> tuple[dict[int, list[PeerId]], dict[frozenset[int], list[PeerId]]]:
    """Split peers into those that keep their cell and those that must move, grouped by the
    cells they could join."""
    cells: dict[int, list[PeerId]] = {}
    homeless: dict[frozenset[int], list[PeerId]] = defaultdict(list)
    for peer in sorted(
        (p for p, able in stands.items() if able), key=lambda p: (p not in seniors, p)
    ):
        able = frozenset(stands[peer])
        home = homes.get(peer, ANY)
        cell = home if home in able else min(able - {ANY}, default=ANY)
        if cell == ANY or (most and len(cells.get(cell, ())) >= most):
            homeless[able].append(peer)
        else:
            cells.setdefault(cell, []).append(peer)
    return cells, homeless


def _merge(
    cells: dict[int, list[PeerId]], stands: Mapping[PeerId, Collection[int]], most: int
) -> None:
    """Cells that hold the same and are small enough become one."""
    for small in sorted(cells, key=lambda c: (len(cells[c]), -c)):
        fits = [
            c
            for c in cells
            if c != small and (not most or len(cells[c]) + len(cells[small]) <= most)
        ]
        into = [c for c in fits if all(c in stands[p] for p in cells[small])]
        if into:
            cells[min(into, key=lambda c: (-len(cells[c]), c))] += cells.pop(small)


def _lonely(cells: Mapping[int, list[PeerId]], most: int) -> int | None:
    """A cell of one whose peer has room in another: alone it would take what it learns with it when
    it dies."""
    alone = [c for c in cells if len(cells[c]) == 1]
    return (
        max(alone)
        if alone and any(len(cells[c]) < most for c in cells if c != max(alone))
        else None
    )


def columns(cells: Mapping[int, Mapping[int, Speeds]]) -> list[dict[int, Speeds]]:
    """The cells of each stage side by side: as many columns as the stage with most cells has; of
    stages with fewer a cell is in several. ``cells``: by stage, then by number. A micro-batch that
    stays in its column meets parameters that were trained together."""
    most = max(len(by) for by in cells.values())
    return [
        {stage: by[sorted(by)[i % len(by)]] for stage, by in cells.items()} for i in range(most)
    ]


def lay(
    cells: Mapping[int, Mapping[int, Speeds]], samples: Sequence[tuple[int, ...]], assign_paths: Lay
) -> tuple[Path, ...]:
    """Paths for the samples, each within one column, every column as many as its slowest stage can
    do.

    ``assign_paths(ends, block stages, samples)`` lays those of one column.
    """
    found = columns(cells)
    if len(found) == 1:
        return assign_paths(
            found[0][ENDS], {s: c for s, c in found[0].items() if s != ENDS}, samples
        )
    share = quotas(len(samples), [(PeerId(f"{i:06d}"), _pace(c)) for i, c in enumerate(found)])
    paths: list[Path] = []
    for column, count in zip(found, (share[name] for name in sorted(share)), strict=True):
        at = len(paths)
        if count:
            made = assign_paths(
                column[ENDS],
                {s: c for s, c in column.items() if s != ENDS},
                samples[at : at + count],
            )
            paths += [replace(path, index=at + path.index) for path in made]
    return tuple(paths)


def _pace(column: Mapping[int, Speeds]) -> float:
    """Micro-batches per second of the slowest block stage; 0 while somebody's speed is not
    known."""
    blocks = [speeds for stage, speeds in column.items() if stage != ENDS]
    if any(speed <= 0 for speeds in blocks for _, speed in speeds):
        return 0.0
    return min((sum(speed for _, speed in speeds) for speeds in blocks), default=0.0)
