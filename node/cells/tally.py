"""What there is to say of one of several cells, and of its windows. Enters: plans, the wall
clock, what came of the last window. Leaves: a line for the operator. Never: who its partners
are."""

from __future__ import annotations

from math import ceil, floor

from node.core.ids import NO_CELL, CellId
from node.core.journey import Plan
from node.training.rounds.window import WindowNews
from protos import control_pb2 as pb


class CellTally:
    """Since the daemon began. Windows are ``every_s`` seconds long; ``wall`` is Unix time."""

    def __init__(self) -> None:
        self._cell, self._since = NO_CELL, 0.0
        self._met = (0, 0)
        self._busy: set[int] = set()
        """Windows in which the cell had partners, or an outer round under way."""
        self._seen = self._last = self._alone_windows = self._averaged = 0
        self._alone = False

    def planned(self, plan: Plan, every_s: float, wall: float) -> None:
        """A plan of this peer's cell is in force."""
        if plan.cell_id != self._cell:
            self._cell, self._since = plan.cell_id, wall
        if plan.window.number:
            self._met = plan.window.number, 1 + len(plan.window.partners)
            self._busy.add(plan.window.number)
        if plan.outer:
            self._busy.add(floor(wall / every_s))

    def line(
        self, cell: CellId, peers: int, cells: int, news: WindowNews, every_s: float, wall: float
    ) -> pb.CellLine:
        """``peers`` belong to the cell; about ``cells`` are in sight; ``news`` is of the last mean
        that came into place."""
        now = floor(wall / every_s)
        self._close_windows(now, every_s)
        self._averaged += news.number != self._last
        self._last = news.number
        return pb.CellLine(
            cell=cell,
            peers=peers,
            cells=cells,
            window_s=every_s,
            window=now,
            next_s=(now + 1) * every_s - wall,
            met=self._met[0],
            met_cells=self._met[1],
            last=news.number,
            cells_averaged=news.cells,
            bytes=news.nbytes,
            last_s=news.seconds,
            alone=self._alone,
            alone_windows=self._alone_windows,
            averaged_windows=self._averaged,
            apart=news.apart,
        )

    def _close_windows(self, now: int, every_s: float) -> None:
        """Count the windows before ``now`` that are over since this was asked last. One that the
        cell was not there for from its beginning says nothing."""
        if self._cell and now > self._seen:
            whole = ceil(self._since / every_s)
            first = max(self._seen, whole)
            self._alone_windows += max(0, now - first) - sum(first <= w < now for w in self._busy)
            self._alone = now - 1 >= whole and now - 1 not in self._busy
            self._busy = {w for w in self._busy if w >= now}
            self._seen = now
