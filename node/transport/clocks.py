"""The difference between this machine's clock and the clocks of other peers. Pure.

Every answer to a question over libp2p carries the time at which it was given. The middle of the
times at which the question left and the answer came is compared with it, so the error is at most
half of the round trip.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from node.core.ids import PeerId
from node.core.newest import Newest

MOST = 1024
"""Clocks that are remembered, the newest."""
FRESH_S = 180.0
"""Seconds for which a comparison is used."""
SLOW_S = 5.0
"""Most seconds until an answer that is still good for comparing clocks."""
LATEST = 2.0**40
"""No clock shows a later Unix second."""


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """Seconds by which this clock is ahead of the middle one of ``peers``; negative: behind."""

    ahead_s: float
    peers: tuple[PeerId, ...]


class PeerClocks:
    """Comparisons of clocks by peer. ``now`` is the monotonic clock, seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._ahead: Newest[PeerId, tuple[float, float]] = Newest(MOST)
        """By peer: seconds that this clock is ahead, and when that was measured."""

    def told(self, peer: PeerId, theirs: float, asked: float, took_s: float) -> None:
        """``peer`` wrote the Unix second ``theirs`` into an answer to a question that left at the
        Unix second ``asked`` and was answered after ``took_s`` seconds. Numbers that are no time,
        and slow answers, are ignored."""
        if math.isfinite(theirs) and 0 < theirs < LATEST and 0 <= took_s <= SLOW_S:
            self._ahead[peer] = asked + took_s / 2 - theirs, self._now()

    def knows(self, peer: PeerId, within_s: float) -> bool:
        """Return True if the clock of ``peer`` was compared in the last ``within_s`` seconds."""
        found = self._ahead.get(peer)
        return found is not None and self._now() - found[1] < within_s

    def of(self, peer: PeerId) -> float | None:
        """Seconds by which this clock is ahead of the clock of ``peer``, None if unknown."""
        found = self._ahead.get(peer)
        if found is not None and self._now() - found[1] < FRESH_S:
            return found[0]
        return None

    def offset(self) -> ClockOffset | None:
        """This clock beside the middle one of all that were compared lately; None if none was."""
        fresh = {p: ahead for p in self._ahead if (ahead := self.of(p)) is not None}
        if not fresh:
            return None
        return ClockOffset(median(fresh.values()), tuple(sorted(fresh)))

    def forget(self) -> None:
        """Drop all comparisons, because this clock was set or stood still."""
        self._ahead.clear()
