"""How often a stranger may do something: a token bucket for each peer. Pure: time is an
argument."""

from __future__ import annotations

from node.core.ids import PeerId
from node.core.newest import Newest

PEERS_KEPT = 4096
"""Peers a table remembers before the longest unseen one makes room; identities are free to make."""


class TokenBucket:
    """At most ``burst`` at once and ``per_s`` in the long run, for each peer (token bucket)."""

    def __init__(self, per_s: float, burst: float) -> None:
        self.per_s, self.burst = per_s, burst
        self._buckets: Newest[PeerId, tuple[float, float]] = Newest(PEERS_KEPT)

    def allow(self, peer: PeerId, now: float) -> bool:
        """Count one event of ``peer`` at monotonic second ``now``; False when it is one too
        many."""
        left, at = self._buckets.get(peer, (self.burst, now))
        left = min(self.burst, left + (now - at) * self.per_s)
        allowed = left >= 1
        self._buckets[peer] = (left - 1 if allowed else left, now)
        return allowed
