"""Lines that strangers cause: a few about each of them, then one that says how many more there
were.

Whoever decides how often a line is written could fill the disk with it, or push everything else out
of the journal.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

from node.core.ids import PeerId, short
from node.telemetry.events import Journal

WINDOW_S = 60.0
LINES = 10
"""Lines about one peer in a window."""
PEERS_KEPT = 1024
"""Peers that are counted apart; of those before, the count starts again."""


@dataclass(slots=True)
class _Window:
    began: float
    told: int = 0
    kept_back: Counter[str] = field(default_factory=Counter)


class RateLimitedLog:
    """Writes to ``journal``. ``now`` is the clock, monotonic seconds. For the thread of the event
    loop."""

    def __init__(self, journal: Journal, now: Callable[[], float] = monotonic) -> None:
        self._journal, self._now = journal, now
        self._windows: OrderedDict[PeerId, _Window] = OrderedDict()

    def emit(
        self, peer: PeerId, component: str, kind: str, text: str, level: str = "info", **fields: Any
    ) -> None:
        """As ``Journal.emit``, unless there were ``LINES`` about ``peer`` within ``WINDOW_S``
        already."""
        now = self._now()
        while self._windows and now - next(iter(self._windows.values())).began >= WINDOW_S:
            self._end_oldest()
        window = self._windows.get(peer)
        if window is None:
            window = self._windows[peer] = _Window(now)
            if len(self._windows) > PEERS_KEPT:
                self._end_oldest()
        if window.told < LINES:
            window.told += 1
            self._journal.emit(component, kind, text, level, peer=peer, **fields)
        else:
            window.kept_back[kind] += 1

    def close(self) -> None:
        """Say what was kept back so far."""
        while self._windows:
            self._end_oldest()

    def _end_oldest(self) -> None:
        """Windows are in the order in which they began."""
        peer, window = self._windows.popitem(last=False)
        if not window.kept_back:
            return
        counts = ", ".join(f"{n} {kind}" for kind, n in sorted(window.kept_back.items()))
        text = (
            f"{window.kept_back.total()} more lines about {short(peer)} within a minute: {counts}"
        )
        self._journal.emit(
            "journal", "kept-back", text, "warning", peer=peer, lines=window.kept_back.total()
        )
