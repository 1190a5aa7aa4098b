"""Clocks that a test turns by hand."""

from node.core.clock import SystemClock


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


class HeldClock(SystemClock):
    """The machine's clocks, of which a test can hold each at a number of seconds, however long the
    test takes."""

    def __init__(self, held_now: float | None = None, held_wall: float | None = None) -> None:
        self.held_now = held_now
        self.held_wall = held_wall

    def now(self) -> float:
        return super().now() if self.held_now is None else self.held_now

    def wall(self) -> float:
        return super().wall() if self.held_wall is None else self.held_wall
