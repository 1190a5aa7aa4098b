"""Schedule of checkpoints, and the choice of checkpoints to keep. Pure.

A crash may cost :attr:`CheckpointSettings.within_s` seconds of committed work, so a checkpoint has
to be complete by then. All stages have to go on from one version, but nobody coordinates the peers.
Therefore each peer writes the epochs that are multiples of a power of two, its *stride*, which
follows from the length of an epoch and of its own writing. Strides of different peers divide each
other, so the multiples of the largest one are on every disk. Of the epochs before the first
multiple, the powers of two are written: a young run has a version on every disk, too.
"""

import math
from collections import deque
from collections.abc import Collection, Sequence
from statistics import median

from node.checkpoint.settings import CheckpointSettings

SHARE = 0.75
"""Share of the time left beside writing that a stride takes: the rest is for epochs that become
slower."""
REMEMBERED = 5
"""Number of last epochs, and of last writings, that an estimate is made from."""
FIRST_WRITE_S = 5.0
"""Assumed length of a writing before the first one was measured."""


class CheckpointSchedule:
    """Decides which settled versions are written. Times are seconds of one steady clock."""

    def __init__(self, settings: CheckpointSettings) -> None:
        self._settings = settings
        self._epochs: deque[float] = deque(maxlen=REMEMBERED)
        self._writings: deque[float] = deque(maxlen=REMEMBERED)
        self._newest: float | None = None
        """Time at which the newest version was settled."""
        self._safe: float | None = None
        """Time at which the newest version on disk was settled, or a newer one that could not be
        written; before the first checkpoint, the time at which the first version was settled."""

    @property
    def epoch_s(self) -> float:
        """Seconds of an epoch, by the last few and no less than the last one; 0 before the
        first."""
        if not self._epochs:
            return 0.0
        return max(median(self._epochs), self._epochs[-1])

    @property
    def write_s(self) -> float:
        """Seconds that a checkpoint takes from its beginning until it is safe, by the slowest of
        the last few."""
        return max(self._writings, default=FIRST_WRITE_S)

    @property
    def stride(self) -> int:
        """Epochs between two checkpoints, a power of two."""
        room = SHARE * (self._settings.within_s - self.write_s)
        if self.epoch_s <= 0 or room <= self.epoch_s:
            return 1
        return 1 << int(math.log2(room / self.epoch_s))

    def settled(self, epoch: int, now: float) -> bool:
        """The version of ``epoch`` is settled. Return True if it is to be written."""
        if self._newest is not None:
            self._epochs.append(max(0.0, now - self._newest))
        self._newest = now
        if self._safe is None:
            self._safe = now
        every = self._settings.every
        if every and epoch % every == 0:
            return True
        if not self._settings.within_s:
            return False
        if not self._epochs:
            return _power_of_two(epoch)
        young = epoch < self.stride and _power_of_two(epoch)
        return young or epoch % self.stride == 0 or self._late(now + self.epoch_s)

    def overdue(self, now: float) -> bool:
        """Return True if the newest settled version is to be written in the middle of an epoch,
        because that takes longer than epochs did."""
        return bool(self._settings.within_s) and self._newest != self._safe and self._late(now)

    def _late(self, begin: float) -> bool:
        """Return True if a checkpoint that begins at ``begin`` is complete too late."""
        at_risk = begin + self.write_s - (self._safe or 0.0)
        return at_risk > self._settings.within_s

    @property
    def newest(self) -> float:
        """Time at which the version that would be written now was settled."""
        return self._newest or 0.0

    def written(self, settled_at: float, seconds: float) -> None:
        """A version that was settled at ``settled_at`` is on disk after ``seconds`` of writing."""
        self._writings.append(seconds)
        self.failed(settled_at)

    def failed(self, settled_at: float) -> None:
        """A version that was settled at ``settled_at`` could not be written. The next one waits for
        its turn: each attempt costs a device its bandwidth and the operator a message."""
        self._safe = max(settled_at, self._safe or settled_at)


def _power_of_two(epoch: int) -> bool:
    return epoch.bit_count() == 1


def current(written: Sequence[int]) -> list[int]:
    """The epochs of the history in which the run goes on, newest first. ``written``: epochs of the
    checkpoints of one stage, in the order in which they were written. Where a later one has a lower
    epoch the run went back, and the higher epochs before it were given up."""
    found: list[int] = []
    for epoch in reversed(written):
        if not found or epoch < found[-1]:
            found.append(epoch)
    return found


def kept(
    written: Sequence[int], protected: Collection[int], *, keep: int, stride: int
) -> frozenset[int]:
    """Choose the checkpoints that stay: all ``protected`` epochs, then the newest others until
    there are ``keep``. ``written`` as in :func:`current`; epochs that the run gave up come last.
    Multiples of ``stride`` come first, because other peers have them too."""
    others = sorted((e for e in set(written) if e not in protected), reverse=True)
    line = current(written)
    others.sort(key=lambda epoch: (epoch not in line, epoch % stride != 0))
    return frozenset([*protected, *others[: max(0, keep - len(protected))]])
