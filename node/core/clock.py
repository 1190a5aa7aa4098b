"""Time as a port: services read it, machines are given it, tests turn it by hand."""

import asyncio
import time
from math import floor
from typing import Protocol


class Clock(Protocol):
    """``now()`` is monotonic seconds for deadlines; ``wall()`` is Unix seconds for records other
    peers read."""

    def now(self) -> float: ...
    def wall(self) -> float: ...


class SystemClock:
    """The machine's own clocks."""

    def now(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


class Since:
    """A moment of the past as Unix seconds, the same number at every look until the wall clock is
    set.

    Wall time less what the monotonic clock has counted since differs in its last bits from look to
    look; in a record that others compare, that is news every time.
    """

    SET_S = 1.0
    """The wall clock was set when the two ways to count differ by more."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._now, self._wall = clock, clock.now(), clock.wall()

    def wall(self) -> float:
        counted = self._clock.wall() - (self._clock.now() - self._now)
        if abs(counted - self._wall) > self.SET_S:
            self._wall = counted
        return self._wall


async def begins(clock: Clock, every_s: float, last: int, after_s: float = 0.0) -> int:
    """Wait until the next period of wall-clock time begins, each ``every_s`` seconds long, or until
    ``after_s`` seconds later (earlier, if negative). Returns the period's number, which is never
    ``last`` again, even where a timer was a moment early."""
    number = floor((clock.wall() - after_s) / every_s) + 1
    if number == last:  # the timer was a moment early
        number += 1
    await asyncio.sleep(max(0.0, number * every_s + after_s - clock.wall()))
    return number
