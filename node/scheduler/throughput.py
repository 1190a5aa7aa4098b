"""How fast a peer is: a moving average of what was measured, and the coarse number the plan is made
with."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass
class SecondsPerUnit:
    """Exponential moving average of seconds per unit of work.

    The average is over time per unit, not units per time: a stall of ten seconds must weigh ten
    seconds. ``alpha`` is the weight of a new measurement; early ones weigh more, so that the first
    is taken as it is (bias correction as in Kingma and Ba, arXiv 1412.6980).
    """

    alpha: float = 0.1
    count: int = 0
    seconds_per_unit: float = 0.0

    def observe(self, units: float, seconds: float) -> None:
        """``units`` of work took ``seconds``. Raises ValueError unless both are positive and
        finite."""
        if not (0 < units < math.inf and 0 < seconds < math.inf):
            raise ValueError(f"{units} units in {seconds} s is no measurement")
        self.count += 1
        weight = min(1.0, self.alpha / (1.0 - (1.0 - self.alpha) ** self.count))
        self.seconds_per_unit += weight * (seconds / units - self.seconds_per_unit)

    @property
    def per_second(self) -> float:
        """Units per second; 0 when nothing was measured."""
        return 1.0 / self.seconds_per_unit if self.count else 0.0


def quantise(speed: float, previous: float = 0.0, per_octave: int = 4) -> float:
    """Round a speed to a coarse logarithmic grid with ``per_octave`` points per factor of two.

    Plans and ownership are computed from the rounded value, so that they do not change with every
    wobble of a measurement: ``previous``, the value used until now, is kept while the speed is
    within one whole grid step of it. 0 stays 0 (unknown), and so does anything negative or not
    finite.
    """
    if not (0 < speed < math.inf):
        return 0.0
    place = math.log2(speed) * per_octave
    if 0 < previous < math.inf and abs(place - math.log2(previous) * per_octave) < 1.0:
        return previous
    return 2.0 ** (round(place) / per_octave)
