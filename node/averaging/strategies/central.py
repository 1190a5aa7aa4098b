"""The classical baselines: one or a few members hold the parameters, the others push and pull.
Enters: how many members, round, seed. Leaves: who owns, and who pushes when.
Never: the optimizer, what becomes of a push.

A synchronous parameter server is a butterfly whose shares all lie with one owner; sharded, with a
few. Without a barrier, pushes older than a bound are refused (stale-synchronous, Ho et al. 2013);
Hogwild (Niu et al. 2011) also drops the lock.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from node.averaging.strategies.strategy import Groups, Pushes, order


@dataclass(frozen=True, slots=True)
class ParameterServer:
    """Everybody's values meet at ``shards`` members, who change with the seed only, and come back
    in the same round."""

    shards: int = 1

    def meet(self, count: int, round: int, seed: int) -> Groups:
        return Groups(np.zeros(count, np.int64), owners=servers(count, self.shards, seed))


@dataclass(frozen=True, slots=True)
class Barrierless:
    """Pushes are applied as they come. One is refused when more than ``bound`` others were applied
    since its sender's pull (None: never). Without a bound and not ``locked`` it is Hogwild:
    whatever arrives is added in place, coordinate by coordinate."""

    bound: int | None = None
    locked: bool = True

    def meet(self, count: int, round: int, seed: int) -> Pushes:
        return Pushes(
            order(count, seed, "pushes", round), servers(count, 1, seed), self.bound, self.locked
        )


def servers(count: int, shards: int, seed: int) -> tuple[int, ...]:
    """Places of the owners, at most as many as there are members."""
    return tuple(sorted(order(count, seed, "servers")[:shards].tolist()))
