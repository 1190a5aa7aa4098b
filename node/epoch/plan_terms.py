"""The terms of one leader's plans. Pure."""

from collections.abc import Sequence
from statistics import median_high

from node.consensus.terms import STEP_HEARD, Terms


class PlanTerms:
    """The numbers of a leader's plans, after the highest ``term`` that was followed here."""

    def __init__(self, term: int) -> None:
        self.newest = term
        """Term of the newest plan."""
        self._believable = Terms(term)

    def next(self, said: Sequence[int], now: float) -> int:
        """The term of the next plan: higher than the terms that members report (``said``), within
        the bound that the number of plans made since can explain. One peer's claim must not use up
        the numbers."""
        most = self._believable.most(now, STEP_HEARD)
        if not self.newest and said:
            # No plan was ever followed here: take the median report, and a step beyond.
            most = median_high(said) + STEP_HEARD
        return max([self.newest, *(min(term, most) for term in said)]) + 1

    def planned(self, term: int, now: float) -> None:
        """A plan of this term was made."""
        self.newest = term
        self._believable.saw(term, now)
