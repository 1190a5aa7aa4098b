"""Repetitions under one leader: repaired rounds, and epochs repeated because replicas disagreed.
Pure."""

from node.core.journey import Version
from node.epoch.plan_context import GENESIS

RECOUNTS = 2
"""Number of times that an epoch is repeated because members of a cell ended with different
parameters and no majority agrees."""


class Repeats:
    """Counts of repetitions."""

    def __init__(self) -> None:
        self.repaired = 0
        """Rounds that were repaired."""
        self.mismatches = 0
        """Members with other parameters than most, and stages of repeated epochs."""
        self._disputed = GENESIS
        """The last version after which members made different parameters."""
        self._times = 0
        """Number of times that they did after this version."""

    def round(self) -> None:
        """A round is repeated."""
        self.repaired += 1

    def differed(self, count: int) -> None:
        """``count`` members or stages ended with other parameters than most."""
        self.mismatches += count

    def recount(self, base: Version) -> bool:
        """Return True to repeat the epoch from ``base``: if no majority agrees on the result, all
        go back to ``base``, on which they agree. After :data:`RECOUNTS` repetitions the swarm goes
        on with one of the results."""
        if self._disputed != base:
            self._times = 0
        self._disputed = base
        self._times += 1
        return self._times <= RECOUNTS

    @property
    def is_no_accident(self) -> bool:
        """True if the last dispute was not the first after its version: a flipped bit does not flip
        twice."""
        return self._times > 1
