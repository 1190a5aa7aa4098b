"""Rate limits for strangers, and bans for peers that wronged us lately. Pure: time is an
argument."""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from node.core.ids import PeerId
from node.core.newest import Newest

PEERS_KEPT = 4096
"""Peers a table remembers before the longest unseen one makes room; identities are free to make."""
_REMEMBERED = 64  # faults of one peer that count at once
WINDOW_S = 100.0
"""Seconds in which faults count together."""
FIRST_BAN_S = 10.0
"""Seconds of a peer's first ban, if it did not go far beyond the threshold."""


class TokenBucket:
    """At most ``burst`` at once and ``per_s`` in the long run, for each peer (token bucket)."""

    def __init__(self, per_s: float, burst: float) -> None:
        self.per_s = per_s
        self.burst = burst
        self._buckets: Newest[PeerId, tuple[float, float]] = Newest(PEERS_KEPT)

    def allow(self, peer: PeerId, now: float, cost: float = 1.0) -> bool:
        """Count an event of ``peer`` at monotonic second ``now``. ``cost``: number of usual events
        that it counts for. Return False if the peer has no tokens left for it."""
        left = self._left(peer, now)
        allowed = left >= cost
        self._buckets[peer] = (left - cost if allowed else left, now)
        return allowed

    def charge(self, peer: PeerId, now: float, cost: float) -> None:
        """Count the further cost of an event that was allowed; the next one waits for it, at most
        for as long as an empty bucket takes to fill."""
        self._buckets[peer] = (max(-self.burst, self._left(peer, now) - cost), now)

    def _left(self, peer: PeerId, now: float) -> float:
        left, at = self._buckets.get(peer, (self.burst, now))
        return min(self.burst, left + (now - at) * self.per_s)


@dataclass(slots=True)
class _Page:
    # (when, weight)
    recent: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    until: float = -math.inf
    bans: int = 0


class FaultBook:
    """Bans for :data:`FIRST_BAN_S` when weights within :data:`WINDOW_S` reach ``threshold``, and
    twice as long each time after that. Whole faults, of weight 1 or more, from before a ban count
    after it too. A ban is n times as long when the weights since the last one are n times the
    threshold.

    A ban is at most ``max_ban_s`` long. A peer that behaved for ``forgive_s`` after its ban starts
    afresh. Only the ``max_peers`` peers heard of last are remembered, so strangers with many keys
    cannot fill the memory. Times are monotonic seconds, given by the caller.
    """

    def __init__(
        self,
        threshold: float = 3.0,
        *,
        max_ban_s: float = 3600.0,
        forgive_s: float = 3600.0,
        max_peers: int = PEERS_KEPT,
    ) -> None:
        self._threshold = threshold
        self._longest = max_ban_s
        self._forgive = forgive_s
        self._pages: Newest[PeerId, _Page] = Newest(max_peers)
        self.revoked: Callable[[PeerId], bool] = lambda peer: False
        """Return True for a peer that the owner has revoked: it is refused until the owner allows
        it again."""

    def __len__(self) -> int:
        return len(self._pages)

    def count(self, peer: PeerId, weight: float, now: float) -> float:
        """Note a fault; returns the length in seconds of the ban it caused, else 0.

        Weight 0 is nobody's fault and leaves no trace. During a ban nothing is counted: late
        messages of the same misdeed must not lengthen it.
        """
        if weight == 0:
            return 0.0
        self._pages[peer] = page = self._pages.get(peer) or _Page()
        if now < page.until:
            return 0.0
        if page.bans and now - page.until >= self._forgive:
            page.bans = 0
        page.recent.append((now, weight))
        since = -math.inf
        if weight < 1.0:
            # A small fault may be nobody's: it renews no ban.
            since = page.until
        counted = sum(w for at, w in page.recent if now - at < WINDOW_S and at >= since)
        if counted < self._threshold:
            return 0.0
        anew = sum(w for at, w in page.recent if now - at < WINDOW_S and at >= page.until)
        times = max(1.0, anew / self._threshold)
        length = min(self._longest, times * FIRST_BAN_S * 2.0 ** min(page.bans, 60))
        page.bans += 1
        page.until = now + length
        return length

    def banned(self, peer: PeerId, now: float) -> float:
        """Seconds until the peer is listened to again; 0 when it is now, infinity for one that is
        revoked."""
        if self.revoked(peer):
            return math.inf
        page = self._pages.get(peer)
        if page is None:
            return 0.0
        return max(0.0, page.until - now)


def until_heard(left_s: float) -> str:
    """Sentence on the refusal of a peer that is banned for ``left_s`` more seconds."""
    if left_s == math.inf:
        return "is refused: the owner of the run has revoked it"
    return f"is refused for {left_s:.0f} s more"


def until_you_are_heard(left_s: float) -> str:
    """The same, as that peer is told."""
    if left_s == math.inf:
        return "you are refused: the owner of the run has revoked you"
    return f"you are refused for {left_s:.0f} s more"
