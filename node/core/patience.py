"""Time limits for answers of others, from their measured answer times and the lateness of this
process. Pure: times in, seconds out.

A slow answer is as often a sign of a busy machine as of a dead one. Two things widen a wait beyond
its floor. Measured answers: the wait is :data:`SPARE` times what Jacobson's estimator expects
(smoothed mean and four mean deviations; V. Jacobson, "Congestion Avoidance and Control", 1988; RFC
6298). And lateness: a process with timers that are late again and again has no time to hear others.

A process that was stopped once (SIGSTOP, a suspended machine) is not a busy one. So the longest
delay of its timers counts only when there is another one beside it, and answers are measured in
:meth:`Patience.running` seconds, which stand still while the process does.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass

from node.core.newest import Newest

SPARE = 2.0
"""Factor on the expected time of an answer."""
MOST_S = 60.0
"""Most seconds to which measured answers widen a wait."""
MOST_LATE_S = 5.0
"""No delay of a timer widens a wait by more: a process that is stopped for longer is not busy."""
HALF_LIFE_S = 20.0
"""A delay of a timer counts half after this time."""
GAP_S = 1.0
"""Longest time between two timers of a running process; a longer gap is a delay."""
KNOWN = 1024
"""Kinds of answers that are remembered, the newest."""
GAIN = 1 / 8
DEVIATION_GAIN = 1 / 4
DEVIATIONS = 4.0


@dataclass(slots=True)
class Took:
    """Measured answer times of one kind: smoothed mean and mean deviation, in seconds."""

    mean: float = 0.0
    deviation: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        """Add one answer time; a negative or infinite number is ignored."""
        if not 0 <= seconds < math.inf:
            return
        if not self.count:
            self.mean = seconds
            self.deviation = seconds / 2
        else:
            self.deviation += DEVIATION_GAIN * (abs(seconds - self.mean) - self.deviation)
            self.mean += GAIN * (seconds - self.mean)
        self.count += 1

    @property
    def expected(self) -> float:
        """The mean with four deviations; 0 for nothing measured."""
        return self.mean + DEVIATIONS * self.deviation


@dataclass(frozen=True, slots=True)
class _Delay:
    """A timer that ran ``late`` seconds after it was due, at the time ``at``."""

    late: float = 0.0
    at: float = -math.inf

    def left(self, now: float) -> float:
        """Seconds for which it still counts."""
        if not self.late:
            return 0.0
        return self.late * 0.5 ** ((now - self.at) / HALF_LIFE_S)


class Patience:
    """The waiting times of one process. ``what`` names a kind of answer: a word, or a word and a
    peer."""

    def __init__(self) -> None:
        self._took: Newest[Hashable, Took] = Newest(KNOWN)
        self._longest = _Delay()
        self._second = _Delay()
        self._woke = math.inf
        self._stood = 0.0
        """Total seconds of lateness of timers, in which the process did not run."""

    # ----------------------------------------------------------- the own clock

    def woke(self, due: float, now: float) -> None:
        """Record that a timer of this process that was due at ``due`` ran at ``now``.

        Timers that were late together are one delay.
        """
        if self._woke != math.inf:
            due = max(due, self._woke)
        late = max(0.0, now - due)
        self._woke = now
        self._stood += late
        delay = _Delay(min(late, MOST_LATE_S), now)
        if late >= self._longest.left(now):
            self._second = self._longest
            self._longest = delay
        elif late >= self._second.left(now):
            self._second = delay

    def slack(self, now: float) -> float:
        """Seconds by which the own timers are late: the second longest delay lately, which counts
        for less as time goes by."""
        return self._second.left(now)

    def running(self, now: float) -> float:
        """Seconds that this process has run, from any beginning: to be subtracted from each
        other."""
        return now - self._stood - max(0.0, now - self._woke - GAP_S)

    # ----------------------------------------------------------- answers

    def took(self, what: Hashable, seconds: float) -> None:
        """Record that an answer of this kind came after these :meth:`running` seconds."""
        self._took[what] = found = self._took.get(what) or Took()
        found.add(seconds)

    def usual(self, what: Hashable) -> float:
        """Seconds that an answer of this kind takes on average; 0 for nothing measured."""
        known = self._took.get(what)
        if not known:
            return 0.0
        return known.mean

    def within(self, what: Hashable, floor_s: float, now: float) -> float:
        """Seconds to wait for an answer of this kind: the expected time with room to spare, at
        least ``floor_s``, and the lateness of this process on top."""
        known = self._took.get(what)
        expected = 0.0
        if known:
            expected = min(MOST_S, SPARE * known.expected)
        return max(floor_s, expected) + self.slack(now)
