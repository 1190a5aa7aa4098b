"""How long to wait for others: what they were measured to take, and how late this process itself
runs. Pure: times in, seconds out.

A slow answer is one of a busy machine as often as of a dead one. Two things widen a wait beyond its
floor. Measured answers: the wait is :data:`SPARE` times what Jacobson's estimator expects (smoothed
mean and four mean deviations; V. Jacobson, "Congestion Avoidance and Control", 1988; RFC 6298). And
the own clock: a process whose timers woke seconds late has not had the time to hear others.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass

from node.core.newest import Newest

SPARE = 2.0
"""Times what an answer is expected to take."""
MOST_S = 60.0
"""No wait is widened beyond this by what was measured, and no lateness counts for more: a machine
that slept is no busy one."""
HALF_LIFE_S = 20.0
"""The latest wake-up counts half after so long."""
KNOWN = 1024
"""Kinds of answers that are remembered, the newest."""
GAIN, DEVIATION_GAIN, DEVIATIONS = 1 / 8, 1 / 4, 4.0


@dataclass(slots=True)
class Took:
    """What one kind of answer took: smoothed mean and mean deviation, seconds."""

    mean: float = 0.0
    deviation: float = 0.0
    count: int = 0

    def add(self, seconds: float) -> None:
        """One more; what is negative or not finite is none."""
        if not 0 <= seconds < math.inf:
            return
        if not self.count:
            self.mean, self.deviation = seconds, seconds / 2
        else:
            self.deviation += DEVIATION_GAIN * (abs(seconds - self.mean) - self.deviation)
            self.mean += GAIN * (seconds - self.mean)
        self.count += 1

    @property
    def expected(self) -> float:
        """The mean with four deviations; 0 for nothing measured."""
        return self.mean + DEVIATIONS * self.deviation


class Patience:
    """The waiting times of one process. ``what`` names a kind of answer: a word, or a word and a
    peer."""

    def __init__(self) -> None:
        self._took: Newest[Hashable, Took] = Newest(KNOWN)
        self._late, self._at = 0.0, -math.inf

    # ----------------------------------------------------------- the own clock

    def woke(self, due: float, now: float) -> None:
        """A timer of this process that was due at ``due`` ran at ``now``."""
        late = min(max(0.0, now - due), MOST_S)
        if late >= self.slack(now):
            self._late, self._at = late, now

    def slack(self, now: float) -> float:
        """Seconds by which the own timers were late: the worst lately, which counts for less as
        time goes by."""
        return self._late * 0.5 ** ((now - self._at) / HALF_LIFE_S) if self._late else 0.0

    # ----------------------------------------------------------- answers

    def took(self, what: Hashable, seconds: float) -> None:
        """An answer of this kind came after so long."""
        self._took[what] = found = self._took.get(what) or Took()
        found.add(seconds)

    def within(self, what: Hashable, floor_s: float, now: float) -> float:
        """Seconds to wait for an answer of this kind: what is expected with room to spare, never
        less than ``floor_s``, and what this process runs late on top."""
        known = self._took.get(what)
        expected = min(MOST_S, SPARE * known.expected) if known else 0.0
        return max(floor_s, expected) + self.slack(now)
