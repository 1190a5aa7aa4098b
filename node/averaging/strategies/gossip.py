"""Gossip: everybody averages with a neighbour or two, nobody waits for all.
Enters: how many members, round, seed. Leaves: pairs, or directed edges.
Never: a value, a weight.

Random pairs are groups of two, exchanged as a butterfly is. Directed edges need push-sum (Kempe et
al. 2003; SGP, Assran et al. 2019), which is right only while the sum of (value, weight) over
members and messages stays the same: :mod:`node.averaging.strategies.push_sum`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from node.averaging.strategies.strategy import Edges, Groups, order


@dataclass(frozen=True, slots=True)
class Pairs:
    """Random pairs, all at once. ``single``: one pair a round, as in Boyd et al. 2006, where the
    variance falls by 1 - 1/(N-1) a round on average."""

    single: bool = False

    def meet(self, count: int, round: int, seed: int) -> Groups:
        drawn = order(count, seed, "pairs", round)
        labels = np.arange(count)
        pairs = 1 if self.single else count // 2
        labels[drawn[:pairs]] = labels[drawn[pairs : 2 * pairs]]
        return Groups(labels)


@dataclass(frozen=True, slots=True)
class Ring:
    """Everybody takes the mean of itself and its two neighbours on a ring: the slow baseline,
    second eigenvalue near 1."""

    def meet(self, count: int, round: int, seed: int) -> Edges:
        here = np.arange(count)
        if count < 3:  # both neighbours are the same
            return Edges(here[: count // 2 * 2], here[::-1][: count // 2 * 2])
        return Edges(
            np.concatenate((here, here)), np.concatenate(((here + 1) % count, (here - 1) % count))
        )


@dataclass(frozen=True, slots=True)
class Exponential:
    """Round t sends to the members 2^t, .. 2^(t + fanout - 1) further on; exponents begin again
    when the ring is spanned.

    With one neighbour and 2^k members the average is exact after k rounds. Two neighbours are the
    published SGP experiment. What is sent is a share of the mass, so links may be one-way.
    """

    fanout: int = 1

    def period(self, count: int) -> int:
        """Rounds after which the edges repeat."""
        return max(1, (count - 1).bit_length() - (self.fanout - 1))

    def steps(self, count: int, round: int) -> tuple[int, ...]:
        """How many places further on the members are that each sends to."""
        first = round % self.period(count)
        return tuple((1 << (first + i)) % count for i in range(self.fanout))

    def meet(self, count: int, round: int, seed: int) -> Edges:
        here = np.arange(count)
        targets = [(here + step) % count for step in self.steps(count, round)]
        return Edges(np.tile(here, self.fanout), np.concatenate(targets), mass=True)
