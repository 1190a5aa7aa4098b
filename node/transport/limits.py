"""How much of us one stranger may take: seats for things that last, a rate for things that happen. Pure."""

from __future__ import annotations

from collections import OrderedDict

from node.core.ids import PeerId

PEERS_KEPT = 4096
"""Peers a table remembers before the longest unseen one makes room; identities are free to make."""


class Seats:
    """Concurrent holds, limited for each peer and in all."""

    def __init__(self, per_peer: int, total: int) -> None:
        self.per_peer, self.total = per_peer, total
        self._held: dict[PeerId, int] = {}
        self._all = 0

    def free(self, peer: PeerId) -> bool:
        """Whether :meth:`take` would succeed."""
        return self._all < self.total and self._held.get(peer, 0) < self.per_peer

    def take(self, peer: PeerId) -> bool:
        """Hold a seat until :meth:`leave`; False when there is none."""
        if not self.free(peer):
            return False
        self._held[peer] = self._held.get(peer, 0) + 1
        self._all += 1
        return True

    def leave(self, peer: PeerId) -> None:
        """Give one seat back. Raises ValueError when the peer holds none."""
        left = self._held.get(peer, 0) - 1
        if left < 0:
            raise ValueError("gave back a seat that was not taken")
        self._all -= 1
        if left:
            self._held[peer] = left
        else:
            del self._held[peer]


class Rate:
    """At most ``burst`` at once and ``per_s`` in the long run, for each peer (token bucket)."""

    def __init__(self, per_s: float, burst: float) -> None:
        self.per_s, self.burst = per_s, burst
        self._buckets: OrderedDict[PeerId, tuple[float, float]] = OrderedDict()

    def allow(self, peer: PeerId, now: float) -> bool:
        """Count one event of ``peer`` at monotonic second ``now``; False when it is one too many."""
        left, at = self._buckets.pop(peer, (self.burst, now))
        left = min(self.burst, left + (now - at) * self.per_s)
        allowed = left >= 1
        self._buckets[peer] = (left - 1 if allowed else left, now)
        if len(self._buckets) > PEERS_KEPT:
            self._buckets.popitem(last=False)
        return allowed
