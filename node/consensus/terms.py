"""Terms: the number of a plan in its cell, and how far it can have grown. Pure. Enters: the terms
that were followed here, and when. Leaves: the highest term that a plan can have. Never: a plan."""

PLANS_PER_S = 10.0
"""Plans per second that no swarm exceeds for long, however often its leader changes."""
STEP = 1 << 20
"""Amount by which the term of a plan may exceed the last one that was followed, for each plan that
can have been made since. Two sides of a partitioned network count separately, so it is more than
one."""
STEP_HEARD = 1 << 16
"""The same for a leader that raises its own term to the terms that others report; smaller, so that
no honest leader goes beyond what its members accept."""
MOST_TERM = 1 << 48
"""Highest term of any swarm: at ``PLANS_PER_S`` plans, each higher by :data:`STEP_HEARD`, it takes
13 years to come so far."""


class Terms:
    """The term of the last plan that was followed or made here, and its time. ``term`` 0: there was
    none, so any believable term may come."""

    def __init__(self, term: int = 0) -> None:
        self.term = term
        self._at: float | None = None

    def saw(self, term: int, now: float) -> None:
        """A plan of this term is in force here."""
        self.term = max(self.term, term)
        self._at = now

    def most(self, now: float, step: int = STEP) -> int:
        """The highest term that can have been reached at ``now``: every plan since the last one
        here may have come from another side of a partition."""
        if not self.term:
            return MOST_TERM
        since = 0.0 if self._at is None else max(0.0, now - self._at)
        return min(MOST_TERM, self.term + int(step * (1 + PLANS_PER_S * since)))
