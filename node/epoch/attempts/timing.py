"""The times of one attempt at an epoch, by the leader's clock: when it began, how long its members
may take, when those that have not reported are late. Pure."""

import math
from dataclasses import dataclass

LATE = 1.25
"""Multiple of the usual time, and of the others' time, after which a member is late with its
report. Its time begins only when the note arrives."""
ROUNDS = 1.5
"""Number of round deadlines that the leader waits for a member, because the member's deadline
starts only when the note arrives."""


@dataclass
class AttemptTimes:
    """Times of an attempt. ``started``: its beginning; ``deadline``: end of the phase under
    way."""

    started: float
    deadline: float
    closed: float = 0.0
    """Time at which the rounds began; 0 before."""
    round_s: float = 0.0
    """The longest deadline that an attempt of its round has had, in seconds."""
    late_at: float = math.inf
    """Time from which a few members that have not reported are late."""
    reported: float = 0.0
    """Time of the last report that said something new."""
    enough: float = math.inf
    """Time from which the epoch could be committed without the members that have not committed."""

    @property
    def began(self) -> float:
        """Time at which its run, or its round, began."""
        return self.closed or self.started

    def run(self, usual_s: float, now: float) -> None:
        """The micro-batches begin; they usually take ``usual_s``."""
        self.reported = now
        self.late_at = now + LATE * usual_s

    def open(self, usual_s: float, longest_s: float, now: float) -> None:
        """The rounds begin; they usually take ``usual_s``, and at most ``longest_s``."""
        self.closed = now
        self.reported = now
        self.round_s = usual_s
        self.late_at = now + LATE * usual_s
        self.deadline = now + ROUNDS * longest_s

    def repeat(self, round_s: float, now: float) -> None:
        """A stage repeats its round within ``round_s``. Members wait as long for an owner that
        gives them nothing, which is not their fault."""
        self.round_s = max(self.round_s, round_s)
        self.deadline = max(self.deadline, now + ROUNDS * round_s)
        self.late_at = now + LATE * round_s

    def evaluate(self, longest_s: float, now: float) -> None:
        """The members measure the held-out loss, for at most ``longest_s``."""
        self.deadline = now + longest_s

    def heard(self, now: float) -> None:
        """A report said something new."""
        self.reported = now

    def can_commit(self, now: float) -> None:
        """The epoch could be committed now, without the members that have not committed."""
        self.enough = min(self.enough, now)

    def stood_still(self, seconds: float, now: float) -> None:
        """The leader's process stood still for ``seconds`` until ``now``, by its clock: nobody was
        late meanwhile."""
        self.late_at += seconds
        self.reported = min(now, self.reported + seconds)

    def is_late(self, now: float) -> bool:
        """Return True if a member that has not reported is late, where all others have."""
        others_s = self.reported - self.began
        return now >= max(self.late_at, self.began + LATE * others_s)

    def round_took(self, now: float) -> float:
        """Seconds of the round that ends now, without the members that were not needed: one could
        take a little longer in each epoch."""
        return min(self.enough, now) - self.closed
