"""The record of a simulated peer: every fact goes to the watch, nothing is kept."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from node.core.clock import Clock
from node.core.ids import PeerId
from node.telemetry.events import Journal

if TYPE_CHECKING:
    from node.sim.watch import HistoryRecorder


class FactJournal(Journal):
    """Of one process."""

    def __init__(self, peer: PeerId, watch: HistoryRecorder, clock: Clock) -> None:
        super().__init__(clock=clock, keep=1)
        self._peer, self._watch = peer, watch

    def emit(
        self, component: str, kind: str, text: str, level: str = "info", **fields: Any
    ) -> None:
        self._watch.fact(self._peer, component, kind, text, level, fields)
