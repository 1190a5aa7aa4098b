"""Which cell a joiner goes to. Pure. Enters: who is in which cell, at which stage. Leaves: a cell.
Never: a clock, the stage in it (that is :mod:`node.scheduler.choosing`)."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping

from node.core.ids import CellId, PeerId


def choose_cell(
    seen: Mapping[CellId, Iterable[int]], stages: int, me: PeerId, *, kept: str = "", first: CellId
) -> CellId:
    """The cell that peer ``me`` joins in a run of ``stages`` block stages.

    ``seen``: the stages of the peers in each cell; ``kept``: the cell it was in before it was
    started again, if any: it goes back there, because its checkpoints and its colleagues' are that
    cell's. Else the one that needs it most: a cell that lacks a stage, then the one whose thinnest
    stage is the thinnest, then the smallest; joiners that come at once spread over equal ones by a
    hash. Where nobody is in sight the run begins with the cell ``first``.
    """
    if kept or not seen:
        return CellId(kept) if kept else first

    def need(cell: CellId) -> tuple[int, int, int, bytes]:
        here = Counter(seen[cell])
        thinnest = min(here[stage] for stage in range(stages + 1))
        drawn = hashlib.sha256(f"{me}/{cell}".encode()).digest()
        return min(thinnest, 1), thinnest, sum(here.values()), drawn

    return min(seen, key=need)
