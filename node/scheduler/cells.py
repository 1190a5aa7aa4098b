"""Choice of a cell: the cell that a joiner goes to, and the time at which a peer leaves a cell that
cannot go on. Pure. Enters: the peers in each cell with their stages, and time. Leaves: a cell.
Never: the stage in it (:mod:`node.scheduler.choosing` chooses that)."""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from node.core.ids import CellId, PeerId

PATIENCE_S = 60.0
"""Seconds without a leader at work after which a cell cannot continue: longer than a new leader, a
restart, or a joiner that chooses its stage needs."""
START_S = 2 * PATIENCE_S
"""The same time for a peer that has just started, in a cell that it has not seen at work: if a
whole cell is started again, its peers come one after the other."""
COMING_S = 10 * PATIENCE_S
"""The same time while a peer is about to take part in the cell: state may take long to fetch."""


def choose_cell(
    seen: Mapping[CellId, Iterable[int]],
    stages: int,
    me: PeerId,
    *,
    kept: str = "",
    first: CellId,
    working: Collection[CellId] = (),
) -> CellId:
    """The cell that peer ``me`` joins in a run of ``stages`` block stages.

    ``seen``: the stages of the peers in each cell; ``working``: cells with a leader at work;
    ``kept``: the peer's cell before a restart, if any. It goes back there, because its checkpoints
    and its colleagues belong to that cell. Other peers go to the cell that needs them most. Cells
    in ``working`` come first, because a joiner brings no parameters to a cell that has lost its
    own. Among these a cell that lacks a stage comes first, then the cell with the thinnest stage,
    then the smallest cell; joiners that arrive together spread over equal cells by a hash. If no
    peer is in sight, the run begins with the cell ``first``.
    """
    if kept or not seen:
        if kept:
            return CellId(kept)
        return first
    able = {cell: here for cell, here in seen.items() if cell in working} or seen
    return _neediest({cell: Counter(here) for cell, here in able.items()}, stages, me)


def spread(
    leavers: Collection[PeerId], seen: Mapping[CellId, Iterable[int]], stages: int
) -> dict[PeerId, CellId]:
    """The new cell of each leaver. The leavers choose one after another, in the order of a hash,
    which no peer can choose. Each goes where it is needed most, with the earlier ones counted.
    Peers that see the same cells compute the same."""
    here = {cell: Counter(of) for cell, of in seen.items()}
    found: dict[PeerId, CellId] = {}
    for peer in sorted(leavers, key=lambda p: hashlib.sha256(p.encode()).digest()):
        cell = found[peer] = _neediest(here, stages, peer)
        here[cell][min(range(stages + 1), key=lambda stage: here[cell][stage])] += 1
    return found


def _neediest(seen: Mapping[CellId, Counter[int]], stages: int, me: PeerId) -> CellId:
    def need(cell: CellId) -> tuple[int, int, int, bytes]:
        here = seen[cell]
        thinnest = min(here[stage] for stage in range(stages + 1))
        drawn = hashlib.sha256(f"{me}/{cell}".encode()).digest()
        return min(thinnest, 1), thinnest, sum(here.values()), drawn

    return min(seen, key=need)


class Dissolution:
    """Decides when peer ``me`` leaves its cell, in a run of ``stages`` block stages. A cell
    dissolves when each of its peers finds, for itself, that the cell has no leader at work and
    another one has."""

    def __init__(self, me: PeerId, stages: int, now: float) -> None:
        self._me = me
        self._stages = stages
        self._since = now
        self._at: tuple[CellId, int] | None = None
        self._worked = False

    def look(
        self,
        cell: CellId,
        term: int,
        mates: Collection[PeerId],
        seen: Mapping[CellId, Iterable[int]],
        working: Collection[CellId],
        now: float,
        *,
        coming: bool = False,
    ) -> CellId | None:
        """Handle a new view of the directory. Returns the cell to go to instead of ``cell``, or
        None to stay.

        ``term``: term of the last plan followed here, which grows with every plan; ``mates``: the
        other peers of the cell, which may leave it for the same reason; ``seen`` and ``working`` as
        for :func:`choose_cell`; ``coming``: a peer is about to take part in the cell.
        """
        planned = self._at is not None and self._at != (cell, term)
        self._at = cell, term
        if planned or cell in working:
            self._worked = True
            self._since = now
            return None
        patience = START_S
        if coming:
            patience = COMING_S
        elif self._worked:
            patience = PATIENCE_S
        able = {c: here for c, here in seen.items() if c in working}
        if not able or now - self._since < patience:
            return None
        return spread({*mates, self._me}, able, self._stages)[self._me]
