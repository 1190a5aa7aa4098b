"""Seconds that a hop, a micro-batch and an epoch have."""

from node.core.clock import Clock
from node.core.journey import Path, Plan
from node.core.patience import Patience

STRETCH_MOST = 1000.0
"""A plan stretches the time of a hop to at most this multiple of the manifest's."""


class Deadlines:
    """Times of the plan in force. ``timeout_s``: the manifest's seconds for a hop. ``usual_s``: the
    least seconds that a plan gives an epoch; where it gives more, hops have longer by the same
    factor; 0: never."""

    def __init__(
        self, clock: Clock, patience: Patience, timeout_s: float, usual_s: float = 0.0
    ) -> None:
        self._clock = clock
        self._patience = patience
        self._timeout_s = timeout_s
        self._usual_s = usual_s
        self._stretch = 1.0
        self._plan_until = 0.0

    def begin(self, plan: Plan | None) -> None:
        """Another plan is in force."""
        self._plan_until = self._clock.now() + (plan.deadline_s if plan else 0.0)
        if plan is not None and plan.paths and self._usual_s:
            self._stretch = min(max(1.0, plan.deadline_s / self._usual_s), STRETCH_MOST)

    @property
    def hop_s(self) -> float:
        """Seconds that a hop has to answer DONE: the manifest's time, stretched as the plan
        stretches the epoch, plus the seconds by which this process runs late."""
        return self._stretch * self._timeout_s + self._patience.slack(self._clock.now())

    def time_left(self, path: Path) -> float:
        """Seconds a micro-batch that starts now may take."""
        return min(self.hop_s * (len(path.hops) + 1), self._plan_until - self._clock.now())

    def longest(self, path: Path | None) -> float:
        """Seconds for which a micro-batch may be of use here, whatever its sender says: the time
        that the plan gives its origin, and a hop's time more for differences between the clocks and
        for the note that names its share. ``path``: its path, or None if the plan has none."""
        if path is None:
            return self.hop_s
        return self.hop_s + max(0.0, self.time_left(path))
