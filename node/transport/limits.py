"""Limits on what one peer may use: seats for things that last, such as calls, and byte counts.
Pure."""

from __future__ import annotations

from collections import Counter, deque

from node.core.ids import PeerId


class Seats:
    """Concurrent holds, limited for each peer and in all."""

    def __init__(self, per_peer: int, total: int) -> None:
        self.per_peer, self.total = per_peer, total
        self._held: Counter[PeerId] = Counter()

    def free(self, peer: PeerId) -> bool:
        """Whether :meth:`take` would succeed."""
        return self._held[peer] < self.per_peer and self._held.total() < self.total

    def take(self, peer: PeerId) -> bool:
        """Hold a seat until :meth:`leave`; False when there is none."""
        if not self.free(peer):
            return False
        self._held[peer] += 1
        return True

    def leave(self, peer: PeerId) -> None:
        """Give one seat back."""
        # Subtracting in place, a counter forgets what has come down to zero.
        self._held -= Counter([peer])


class Moved:
    """Bytes ``sent`` and ``received`` since the start, and of the last minute those of every
    second. ``now`` is in seconds of a steady clock."""

    def __init__(self) -> None:
        self.sent = self.received = 0
        self._seconds: deque[list[int]] = deque(maxlen=60)

    def count(self, sent: int, received: int, now: float) -> None:
        """So many bytes went just now."""
        self.sent += sent
        self.received += received
        second = int(now)
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append([second, 0, 0])
        self._seconds[-1][1] += sent
        self._seconds[-1][2] += received

    def rates(self, now: float) -> tuple[float, float]:
        """Bytes sent and received in the busiest second, zeros for nothing lately."""
        fresh = [row for row in self._seconds if now - row[0] < 60]
        return max((float(r[1]) for r in fresh), default=0.0), max(
            (float(r[2]) for r in fresh), default=0.0
        )

    def mean(self, now: float, seconds: float) -> tuple[float, float]:
        """Bytes a second sent and received, over the last ``seconds`` (60 at most) without the one
        under way."""
        fresh = [row for row in self._seconds if 0 < int(now) - row[0] <= seconds]
        return sum(r[1] for r in fresh) / seconds, sum(r[2] for r in fresh) / seconds
