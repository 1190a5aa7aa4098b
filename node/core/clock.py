"""Time as a port: services read it, machines are given it, tests turn it by hand."""

import asyncio
import time
from dataclasses import dataclass
from math import floor
from typing import Protocol

CLOCK_S = 15.0
"""Seconds by which the clocks of two peers may differ. Beyond that each takes the other's records
in the directory for expired: they live 20 s and are renewed every 5 s."""


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
        self._clock = clock
        self._now = clock.now()
        self._wall = clock.wall()

    def wall(self) -> float:
        counted = self._clock.wall() - (self._clock.now() - self._now)
        if abs(counted - self._wall) > self.SET_S:
            self._wall = counted
        return self._wall


@dataclass(frozen=True, slots=True)
class ClockReading:
    """The clocks of this machine at one moment, in seconds: ``running`` counts while the machine
    runs, ``always`` while it sleeps too, ``wall`` is Unix time."""

    running: float
    always: float
    wall: float

    @classmethod
    def now(cls) -> "ClockReading":
        """Read all three."""
        always = time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))
        return cls(time.monotonic(), always, time.time())


@dataclass(frozen=True, slots=True)
class ClockNews:
    """Something happened to the clocks since the last reading. ``stopped_s``: seconds in which this
    process did not run, because it was stopped or the machine slept (``slept``); ``set_s``: seconds
    by which the wall clock was set, negative for backwards."""

    stopped_s: float = 0.0
    slept: bool = False
    set_s: float = 0.0


class ClockWatch:
    """Notice that this process stood still, that the machine slept, and that the wall clock was
    set. Pure: readings that are ``every_s`` seconds apart go in."""

    STOPPED_S = 10.0
    """A busy machine runs a timer seconds late; only a longer pause is news."""
    SET_S = 5.0
    """Time servers move a clock by less without anybody noticing."""

    def __init__(self, first: ClockReading, every_s: float) -> None:
        self._last = first
        self._every_s = every_s

    def read(self, reading: ClockReading) -> ClockNews | None:
        """Compare the newest reading with the one before; None if nothing happened."""
        last = self._last
        self._last = reading
        always = reading.always - last.always
        asleep = always - (reading.running - last.running)
        stopped = always - self._every_s
        if stopped < self.STOPPED_S:
            stopped = 0.0
        was_set = (reading.wall - last.wall) - always
        if abs(was_set) < self.SET_S:
            was_set = 0.0
        if not stopped and not was_set:
            return None
        return ClockNews(stopped, asleep >= self.STOPPED_S, was_set)


async def begins(clock: Clock, every_s: float, last: int, after_s: float = 0.0) -> int:
    """Wait until the next period of wall-clock time begins, each ``every_s`` seconds long, or until
    ``after_s`` seconds later (earlier, if negative). Returns the period's number, which is never
    ``last`` again, even where a timer was a moment early."""
    number = floor((clock.wall() - after_s) / every_s) + 1
    if number == last:  # the timer was a moment early
        number += 1
    await asyncio.sleep(max(0.0, number * every_s + after_s - clock.wall()))
    return number
