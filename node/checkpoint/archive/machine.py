"""The state machine that decides which checkpoint is copied to the archive, and when.

Enters: the epochs whose checkpoints are on the disk, results of copying, time. Leaves:
:class:`Copy`. Never: a file, a clock.

Peers do not agree on when to copy, but all stages have to be restored at one epoch. So each copies
by a grid: the first checkpoint at or after each multiple of a number of epochs. If the operator
names seconds, the number of epochs is the largest power of two that takes no longer, but at least
the stride of the local checkpoints, because multiples of the stride stay on the disk longest. Grids
of different peers divide each other, so the multiples of the largest one are in every archive.

A run may go back to an earlier epoch. Checkpoints of later ones stay on the disk and in the archive
until they are replaced, but nothing is built on them any more: they are not copied, and do not
count as copied.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from node.availability.words import rounded, seconds_of
from node.core.errors import UsageFault
from node.core.journey import Version

RETRY_S = 30.0
"""Seconds after the first failure until the next attempt; doubled with each failure."""
RETRY_MOST_S = 3600.0
"""Longest pause between two attempts, in seconds."""
MOST_DOUBLED = 10
"""Number of failures after which the pause is no longer doubled."""
_EPOCHS = re.compile(r"([1-9][0-9]{0,8})(?:\s*epochs?)?")


@dataclass(frozen=True, slots=True)
class Every:
    """An interval between two copies: ``epochs``, or ``seconds`` if that is 0."""

    epochs: int = 0
    seconds: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Every":
        """ "20", "20 epochs", "1h", "90m". Raises UsageFault for anything else."""
        found = _EPOCHS.fullmatch(text.strip())
        if found is not None:
            return cls(epochs=int(found[1]))
        try:
            return cls(seconds=seconds_of(text))
        except UsageFault as e:
            raise UsageFault(
                f"checkpoint.to_every = {text!r} is no interval",
                'write such as "1h", "90m" or "20 epochs"',
            ) from e


@dataclass(frozen=True, slots=True)
class OnDisk:
    """Versions with a checkpoint on the disk of this peer. ``written``: the version written last
    since the start, None before; ``stride``: number of epochs between the checkpoints that are
    written by time."""

    versions: Sequence[Version]
    written: Version | None = None
    stride: int = 1


@dataclass(frozen=True, slots=True)
class Copied:
    """The checkpoint of ``version`` is whole in the archive."""

    version: Version


@dataclass(frozen=True, slots=True)
class AttemptFailed:
    """An attempt has failed, for this reason."""

    why: str


ArchiveEvent = OnDisk | Copied | AttemptFailed


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy the checkpoint of ``epoch`` now."""

    epoch: int


class ArchiveSchedule:
    """The machine. ``last``: the newest version that is known to be in the archive and that the run
    has not given up; ``why``: the reason of the last failure, empty after a success."""

    def __init__(self, every: Every, last: Version | None = None) -> None:
        self.every = every
        self.last = last
        self.why = ""
        self._busy = False
        self._failures = 0
        self._again = -math.inf
        """Time before which no attempt is made."""
        self._seen: tuple[int, float] | None = None
        """The first epoch that was seen, and the time in seconds."""
        self._epoch_s = 0.0
        self._stride = 1
        self._given_up: frozenset[Version] = frozenset()
        """Versions on the disk that belong to a history which the run gave up."""

    def handle(self, event: ArchiveEvent, now: float) -> list[Copy]:
        """Handle one event; ``now`` in seconds of a clock that nobody sets. One copy is under way
        at a time."""
        match event:
            case Copied(version):
                self.last = version
                self.why = ""
                self._busy = False
                self._failures = 0
            case AttemptFailed(why):
                self.why = why
                self._busy = False
                self._again = now + min(RETRY_S * 2**self._failures, RETRY_MOST_S)
                self._failures = min(self._failures + 1, MOST_DOUBLED)
            case OnDisk():
                self._stride = event.stride
                return self._look(self._of_this_history(event), now)
        return []

    def lacks(self, there: OnDisk) -> Version | None:
        """The newest version on the disk, if the archive has neither it nor a later one of the
        history in which the run goes on."""
        found = self._of_this_history(there)
        if not found:
            return None
        newest = max(found, key=lambda v: v.epoch)
        if self.last is not None and self.last.epoch >= newest.epoch:
            return None
        return newest

    def _of_this_history(self, there: OnDisk) -> list[Version]:
        """The versions on the disk that the run has not given up. Also forgets the last copy if the
        run gave its version up."""
        written = there.written
        if written is not None:
            later = {v for v in there.versions if v.epoch > written.epoch}
            self._given_up = (self._given_up & {*there.versions}) | later
            if self.last is not None and _contradicts(self.last, written):
                self.last = None
        found = [v for v in there.versions if v not in self._given_up]
        if self.last is not None and any(_contradicts(self.last, v, False) for v in found):
            self.last = None
        return found

    def again_s(self, now: float) -> float:
        """Seconds until the next attempt after a failure."""
        return max(0.0, self._again - now)

    def trouble(self, now: float) -> str:
        """The failure and the next attempt as a part of a sentence; empty without one."""
        if not self.why:
            return ""
        return f"{self.why}; tried again in {rounded(self.again_s(now))}"

    @property
    def grid(self) -> int:
        """Number of epochs from one point of the grid to the next."""
        if self.every.epochs:
            return self.every.epochs
        if self._epoch_s <= 0 or self.every.seconds <= self._epoch_s:
            return self._stride
        return max(self._stride, 1 << int(math.log2(self.every.seconds / self._epoch_s)))

    def _look(self, versions: Sequence[Version], now: float) -> list[Copy]:
        if not versions:
            return []
        epochs = [version.epoch for version in versions]
        self._measure(max(epochs), now)
        if self._busy or now < self._again:
            return []
        grid = self.grid
        line = max(epochs) // grid
        if self.last is not None and self.last.epoch // grid >= line:
            return []
        self._busy = True
        return [Copy(min(epoch for epoch in epochs if epoch // grid == line))]

    def _measure(self, newest: int, now: float) -> None:
        """Estimate the seconds that an epoch takes, from all epochs that were seen."""
        if self._seen is None or newest < self._seen[0]:
            self._seen = newest, now
            return
        epoch, since = self._seen
        if newest > epoch and now > since:
            self._epoch_s = (now - since) / (newest - epoch)


def _contradicts(last: Version, other: Version, newest: bool = True) -> bool:
    """Return True if ``last`` cannot be of the history of ``other``, which is its ``newest``
    version or an earlier one."""
    if last.epoch == other.epoch:
        return bool(last.lineage and other.lineage) and last.lineage != other.lineage
    return newest and last.epoch > other.epoch
