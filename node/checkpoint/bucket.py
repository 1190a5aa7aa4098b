"""A token bucket: how long to wait before sending, so that the average stays under a rate."""

from __future__ import annotations


class Bucket:
    """``rate`` bytes per second, 0 for no limit; up to ``burst_s`` seconds of unused rate may be spent at once. Pure."""

    def __init__(self, rate: float, burst_s: float = 0.25) -> None:
        self.rate, self.burst_s = rate, burst_s
        self._free_at = float("-inf")

    def reserve(self, nbytes: int, now: float) -> float:
        """Take ``nbytes`` out of the bucket; returns the seconds to wait before sending them. Waiters queue in order."""
        if self.rate <= 0:
            return 0.0
        begin = max(self._free_at, now - self.burst_s)
        self._free_at = begin + nbytes / self.rate
        return max(0.0, self._free_at - now)
