"""An averaging strategy of your own, beside two that tutti has.

A strategy says which members average with each other in a round. It is a pure function of the
number of members, the round and a seed, so every member computes the same groups. This one,
recursive doubling, lets members average whose places differ in one bit: 2^d members hold the exact
mean after d rounds, and no group has more than two members.

    python examples/strategy.py
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from node.averaging.strategies.strategy import Butterfly, Groups, Pairs, Strategy, order

MEMBERS = 16
ROUNDS = 4
SEED = 7


@dataclass(frozen=True)
class Doubling:
    """Recursive doubling: in each round the places of a pair differ in another bit."""

    def meet(self, count: int, round: int, seed: int) -> Groups:
        """Labels of the groups: members with equal labels average."""
        bits = max(1, (count - 1).bit_length())
        # The seed shuffles the members, so that equal neighbours do not meet in every run.
        places = order(count, seed, "doubling")
        bit = 1 << (round % bits)
        labels = np.empty(count, np.int64)
        labels[places] = np.arange(count) & ~bit
        return Groups(labels)


def average(values: NDArray[np.float64], groups: Groups) -> NDArray[np.float64]:
    """Values after a round in which every group took its mean."""
    sums = np.bincount(groups.labels, values)
    sizes = np.bincount(groups.labels)
    return sums[groups.labels] / sizes[groups.labels]


def variances(strategy: Strategy) -> list[float]:
    """Variance of the members' values before the first round and after each one."""
    values = np.random.default_rng(SEED).normal(size=MEMBERS)
    found = [float(values.var())]
    for number in range(ROUNDS):
        groups = strategy.meet(MEMBERS, number, SEED)
        if not isinstance(groups, Groups):
            raise TypeError("this example plays strategies with groups only")
        values = average(values, groups)
        found.append(float(values.var()))
    return found


def main() -> None:
    """Print the variance by round for each strategy."""
    print(f"variance of {MEMBERS} members' values, before and after rounds 1 to {ROUNDS}")
    for strategy in (Butterfly(), Pairs(), Doubling()):
        row = "  ".join(f"{variance:8.1e}" for variance in variances(strategy))
        print(f"{type(strategy).__name__:10} {row}")


if __name__ == "__main__":
    main()
