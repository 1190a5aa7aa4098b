"""Time limits of a hop, a micro-batch and an epoch, in seconds."""

from node.core.clock import Clock
from node.core.journey import Path, Plan
from node.core.patience import Patience

STRETCH_MOST = 1000.0
"""A plan stretches the time of a hop to at most this multiple of the manifest's."""


class Deadlines:
    """Time limits under the plan in force. ``timeout_s``: the manifest's limit for a hop.
    ``usual_s``: the shortest time that a plan gives an epoch. If a plan gives an epoch more time,
    its hops get more by the same factor; with 0 they never do."""

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
        """Put another plan in force."""
        self._plan_until = self._clock.now() + (plan.deadline_s if plan else 0.0)
        if plan is not None and plan.paths and self._usual_s:
            self._stretch = min(max(1.0, plan.deadline_s / self._usual_s), STRETCH_MOST)

    @property
    def hop_s(self) -> float:
        """Seconds until a hop must have answered DONE: the manifest's limit, stretched by the same
        factor as the epoch, plus the seconds by which this process runs late."""
        return self._stretch * self._timeout_s + self._patience.slack(self._clock.now())

    def time_left(self, path: Path) -> float:
        """Seconds that a micro-batch may take if it starts now; negative once the epoch is over."""
        return min(self.hop_s * (len(path.hops) + 1), self._plan_until - self._clock.now())

    def longest(self, path: Path | None) -> float:
        """Seconds after which a micro-batch is of no use here, whatever deadline its sender names:
        the time that the plan gives its origin, and a hop's time more for differences between the
        clocks and for the note that names its share. ``path``: the path of the micro-batch, or None
        if the plan has no such path."""
        if path is None:
            return self.hop_s
        return self.hop_s + max(0.0, self.time_left(path))
