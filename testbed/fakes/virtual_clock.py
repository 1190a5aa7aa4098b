"""Time that passes when a test says so."""


class VirtualClock:
    """A clock that stands still until told to move. ``wall`` runs ``skew`` seconds beside
    ``now``."""

    def __init__(self, start: float = 1_000_000.0, skew: float = 0.0) -> None:
        self._now = start
        self.skew = skew

    def now(self) -> float:
        return self._now

    def wall(self) -> float:
        return self._now + self.skew

    def advance(self, seconds: float) -> None:
        """Move forward; raises ValueError for a step back, because monotonic time has none."""
        if seconds < 0:
            raise ValueError("time does not go back")
        self._now += seconds
