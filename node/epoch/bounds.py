"""Bounds on the numbers that peers claim, from the manifest and from the number of plans that can
have been made. Pure. Enters: a claim. Leaves: the reason why no honest peer makes it, "" if there
is none. Never: blame; that falls on the peer that made the claim, not on one that hears of it
later. So nothing beyond these bounds may be kept or passed on.

These are bounds, not proofs: a claim within them can still be false.
"""

from dataclasses import dataclass

from node.core.journey import MOST_PATHS, Plan
from node.epoch import events as ev

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
MOST_SAMPLES = 1 << 62
"""Highest position in the sample order. Every plan goes on from the previous one, and one more step
would leave the range of an integer on the wire."""


@dataclass(frozen=True)
class Bounds:
    """Bounds of one run: ``epochs`` of the run, ``tokens`` and ``micro_batches`` of one epoch,
    block ``stages``. 0 means unknown, and sets no bound."""

    epochs: int
    tokens: int
    stages: int = 0
    micro_batches: int = 0

    @property
    def paths(self) -> int:
        """The most paths of a plan."""
        return self.micro_batches or MOST_PATHS

    def of_results(self, count: int) -> str:
        """The reason why no peer can have finished ``count`` micro-batches of an epoch; "" if there
        is none."""
        if count > self.paths:
            return f"{count} results, and an epoch has {self.paths}"
        return ""

    def of_history(self, epoch: int, tokens: int) -> str:
        """The reason why no history of ``epoch`` epochs can count ``tokens`` tokens; "" if there is
        none."""
        if epoch > self.epochs:
            return f"epoch {epoch}, and the run has {self.epochs}"
        if self.tokens and tokens > epoch * self.tokens:
            return f"{tokens} tokens in {epoch} epochs, and one counts at most {self.tokens}"
        return ""

    def of_heard(self, e: ev.Heartbeat) -> str:
        """The reason why no peer can hold the stage or versions of this heartbeat; "" if there is
        none."""
        if self.stages and e.stage > self.stages:
            return f"stage {e.stage} of {self.stages}"
        return self.of_history(e.at.epoch, e.tokens) or next(
            (why for v in e.reachable if (why := self.of_history(v.epoch, 0))), ""
        )

    def of_plan(self, plan: Plan) -> str:
        """The reason why no leader of this run makes such a plan; "" if there is none."""
        if why := self.of_history(plan.epoch, plan.tokens):
            return why
        if any(c.next > MOST_SAMPLES for c in plan.cursor):
            return "a place in the sample order that no run comes to"
        if plan.last == (plan.epoch >= self.epochs):
            return ""
        does = "ends the run" if plan.last else "works on"
        return f"it {does} at epoch {plan.epoch} of {self.epochs}"

    def of_round(self, r: ev.RoundArrived) -> str:
        """The reason why no epoch can have counted the tokens or dropped micro-batches of this
        round; "" if there is none."""
        if self.tokens and r.tokens > self.tokens:
            return f"{r.tokens} tokens in one epoch, at most {self.tokens}"
        if len(r.dropped) > self.paths:
            return f"{len(r.dropped)} dropped micro-batches, and an epoch has {self.paths}"
        return ""

    def counted(self, epoch: int, tokens: int) -> int:
        """The number of tokens that is believed: ``tokens``, at most the bound of ``epoch``. It
        comes from a file, and anybody may have written that."""
        if not self.tokens:
            return tokens
        return min(tokens, epoch * self.tokens)


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
