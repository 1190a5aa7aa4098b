"""Time that a fetch waits for donors to describe their state. Pure: sizes and answer times in,
seconds out.

A donor hashes its whole state before it describes it for the first time, so the wait follows from
the bytes and from the donors that have answered. One silent donor must not hold up a fetch that
others could serve: it is left out, and joins in when it answers after all.
"""

from dataclasses import dataclass

from node.core.patience import SPARE

LEAST_S = 5.0
"""Shortest wait for descriptions, in seconds: donors have other work too."""
HASHED_S = 1e-8
"""Seconds that a donor may take for each byte that it describes: at least 100 MB/s."""
FEW_TIMES = 4.0
"""Factor on the usual wait while fewer than half of the donors have answered: the first answers may
be liars', who need no time."""
ALONE_S = 15.0
"""Shortest time, in seconds, that one donor gets for its description."""


@dataclass(slots=True)
class DescriptionWait:
    """Waiting for ``asked`` donors, each of which describes ``nbytes`` bytes. ``described``: number
    of donors that described their state, ``refused``: number of other answers; ``longest_s``: the
    longest time that a description took."""

    asked: int
    nbytes: int
    described: int = 0
    refused: int = 0
    longest_s: float = 0.0

    def answered(self, seconds: float, described: bool) -> None:
        """Count one donor's answer, or its failure, after ``seconds`` seconds."""
        if described:
            self.described += 1
            self.longest_s = max(self.longest_s, seconds)
        else:
            self.refused += 1

    def over(self, most_alike: int, seconds: float) -> bool:
        """Return True if no other answer is to be waited for, ``seconds`` after the questions. Of
        the descriptions so far at most ``most_alike`` are equal."""
        if not self.described:
            return False
        decided = 2 * most_alike > self.asked - self.refused
        return decided or seconds >= self.until_s()

    def until_s(self) -> float:
        """Seconds after the questions at which descriptions are not waited for any longer."""
        usual = max(LEAST_S, SPARE * self.longest_s, HASHED_S * self.nbytes)
        few = 2 * (self.described + self.refused) < self.asked
        if few:
            return FEW_TIMES * usual
        return usual


def alone_s(nbytes: int) -> float:
    """Seconds that one donor gets to describe ``nbytes`` bytes."""
    return ALONE_S + FEW_TIMES * HASHED_S * nbytes
