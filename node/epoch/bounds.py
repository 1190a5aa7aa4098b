"""Bounds on the numbers that peers claim, from the manifest. Pure. Enters: a claim. Leaves: the
reason why no honest peer makes it, "" if there is none. Never: blame; that falls on the peer that
made the claim, not on one that hears of it later. So nothing beyond these bounds may be kept or
passed on.

These are bounds, not proofs: a claim within them can still be false.
"""

from dataclasses import dataclass

from node.core.journey import MOST_PATHS, Plan
from node.epoch import events as ev

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
        if self.tokens and r.tally.tokens > self.tokens:
            return f"{r.tally.tokens} tokens in one epoch, at most {self.tokens}"
        if len(r.dropped) > self.paths:
            return f"{len(r.dropped)} dropped micro-batches, and an epoch has {self.paths}"
        return ""

    def counted(self, epoch: int, tokens: int) -> int:
        """The number of tokens that is believed: ``tokens``, at most the bound of ``epoch``. It
        comes from a file, and anybody may have written that."""
        if not self.tokens:
            return tokens
        return min(tokens, epoch * self.tokens)
