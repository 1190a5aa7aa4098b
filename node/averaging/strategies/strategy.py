"""Groups or pushes of a round of averaging: a pure function of (members, round, seed), computed and
never negotiated. Enters: the number of members, round, seed. Leaves: groups, or an order of pushes,
by the members' places in sorted order. Never: a tensor, a value, a clock, chance that two machines
would see differently.

Gossip is random pairs: groups of two, exchanged as a butterfly is. Nobody waits for all.

A synchronous parameter server is a butterfly with all shares at one owner; sharded, at a few.
Without a barrier, pushes older than a bound are refused (stale-synchronous, Ho et al. 2013);
Hogwild (Niu et al. 2011) also drops the lock.

Moshpit averaging (Ryabinin et al. 2021, arXiv 2103.03239): members stand in a virtual grid and
average along one axis a round, never in a group larger than an axis is long. M^d members average
exactly in d rounds. :class:`Moshpit` computes the grid from a view that all share. Without one,
each member keeps a key (its last d-1 indices): :func:`meet_by_key` and :func:`advance` are the
paper's rule, for the simulator.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from node.core.ids import PeerId

Places = NDArray[np.int64]
"""Places in the sorted list of members."""


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of a round. ``labels`` [n]: members with equal labels average with each other.
    ``owners``: places that reduce for everybody, in equal shares; empty: every member of a group
    reduces its share of it. ``whole``: True if a group with a member missing averages nothing (a
    plain all-reduce); otherwise it goes on without."""

    labels: Places
    owners: tuple[int, ...] = ()
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Pushes:
    """Every member pushes to the ``owners`` and pulls when it likes, here in ``order``. A push is
    refused when more than ``bound`` others were applied since its sender last pulled (None: never).
    ``locked`` False: pushes mix coordinate by coordinate."""

    order: Places
    owners: tuple[int, ...]
    bound: int | None = None
    locked: bool = True


Meeting = Groups | Pushes


class Strategy(Protocol):
    """``meet`` is pure."""

    def meet(self, count: int, round: int, seed: int) -> Meeting:
        """The meeting of members 0..count-1 in ``round``."""
        ...


@dataclass(frozen=True, slots=True)
class Butterfly:
    """All members in one group; each reduces one part, all gather."""

    whole: bool = False

    def meet(self, count: int, round: int, seed: int) -> Groups:
        return Groups(np.zeros(count, np.int64), whole=self.whole)


@dataclass(frozen=True, slots=True)
class RandomGroups:
    """Groups of ``size`` drawn anew every round; members left over join them one by one, so that
    sizes differ by as little as possible."""

    size: int

    def meet(self, count: int, round: int, seed: int) -> Groups:
        groups = max(1, count // self.size)
        labels = np.empty(count, np.int64)
        labels[order(count, seed, "groups", round)] = np.arange(count) % groups
        return Groups(labels)


@dataclass(frozen=True, slots=True)
class Pairs:
    """Random pairs, all at once. ``single``: one pair a round, as in Boyd et al. 2006, where the
    variance falls by 1 - 1/(N-1) a round on average."""

    single: bool = False

    def meet(self, count: int, round: int, seed: int) -> Groups:
        drawn = order(count, seed, "pairs", round)
        labels = np.arange(count)
        pairs = count // 2
        if self.single:
            pairs = 1
        labels[drawn[:pairs]] = labels[drawn[pairs : 2 * pairs]]
        return Groups(labels)


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
    """Places of the owners, at most one for each member."""
    return tuple(sorted(order(count, seed, "servers")[:shards].tolist()))


@dataclass(frozen=True, slots=True)
class Moshpit:
    """Axis ``round % d`` of a grid with room for all members, no axis longer than in ``grid``;
    random cells, drawn once.

    ``packed``: axes are shortened, or left out, until the grid is as full as it can be. A full grid
    is exact after any d rounds in a row without failures. Not ``packed``: the grid as it is given,
    which is the published experiment.
    """

    grid: tuple[int, ...]
    packed: bool = True

    def meet(self, count: int, round: int, seed: int) -> Groups:
        shape = self.shape(count)
        return Groups(lines(self.cells(count, seed), shape, round % len(shape)))

    def shape(self, count: int) -> tuple[int, ...]:
        """The grid that ``count`` members stand in; ``grid`` has room for them."""
        if self.packed:
            return tuple(a for a in pack(count, self.grid) if a > 1) or (1,)
        return self.grid

    def cells(self, count: int, seed: int) -> Places:
        """The cell [n] of every member."""
        return order(math.prod(self.shape(count)), seed, "cells")[:count]


def lines(cells: Places, grid: tuple[int, ...], axis: int) -> Places:
    """Lines of the grid along ``axis``: the label of the group of each cell [n]."""
    below = math.prod(grid[axis + 1 :])
    return cells // (below * grid[axis]) * below + cells % below


def fit(count: int, most: int, axes: int = 2) -> tuple[int, ...]:
    """A packed grid for ``count`` members with lines of at most ``most``, two or more, of ``axes``
    axes; more axes are added until ``count`` fits."""
    while most**axes < count:
        axes += 1
    return pack(count, (most,) * axes)


@lru_cache(maxsize=256)
def pack(count: int, longest: tuple[int, ...]) -> tuple[int, ...]:
    """The grid with the least room that still holds ``count``, no axis longer than in ``longest``;
    among equals the most square.

    Exact averaging in one round for each axis needs a full grid, so ``count`` should be a product
    of numbers that fit.
    """
    if len(longest) == 1:
        return (count,)
    behind = math.prod(longest[1:])
    shapes = [
        (length, *pack(-(-count // length), longest[1:]))
        for length in range(max(1, -(-count // behind)), min(longest[0], count) + 1)
    ]
    return min(shapes, key=lambda shape: (math.prod(shape), max(shape), shape))


def first_keys(count: int, grid: tuple[int, ...], seed: int) -> Places:
    """Indices [n, d-1] to begin with: a key is the line along the last axis that a member stands
    on."""
    moshpit = Moshpit(grid)
    return np.array(np.unravel_index(moshpit.cells(count, seed), moshpit.shape(count)), np.int64).T[
        :, :-1
    ]


def meet_by_key(keys: Places, most: int) -> Groups:
    """Members with one key meet; where more than ``most`` share it, in several groups of about
    equal size.

    ``keys`` [n, d-1]. Members beyond ``most`` occur in grids that are not full or that somebody
    failed to move in.
    """
    # one axis: everybody has the same key
    places = keys
    if not keys.shape[1]:
        places = np.zeros((len(keys), 1), np.int64)
    _, labels, counts = np.unique(places, axis=0, return_inverse=True, return_counts=True)
    labels = labels.reshape(-1).astype(np.int64)
    pieces = -(-counts // most)
    return Groups(
        labels * int(pieces.max()) + _ranks(labels, np.arange(len(labels))) % pieces[labels]
    )


def advance(
    keys: Places, groups: Groups, met: np.ndarray, length: int, round: int, seed: int
) -> Places:
    """Keys after ``round``: members of a group get different indices below ``length``, spread
    evenly, and forget their oldest.

    ``met`` [n] bool: the members that took part; the others keep their key. No group has more than
    ``length`` members (:func:`meet_by_key`).
    """
    labels = np.where(met, groups.labels, groups.labels.max() + 1 + np.arange(len(met)))
    ranks = _ranks(labels, order(len(met), seed, "indices", round))
    sizes = np.bincount(labels)
    starts = dice(seed, "starts", round).random_raw(len(sizes)) % np.uint64(length)
    index = (ranks * length // sizes[labels] + starts[labels].astype(np.int64)) % length
    return np.where(met[:, None], np.column_stack((keys, index))[:, 1:], keys)


def _ranks(labels: Places, drawn: Places) -> Places:
    """The place of each member within its group, when members come in the order ``drawn``."""
    by_group = drawn[np.argsort(labels[drawn], kind="stable")]
    sizes = np.bincount(labels)
    starts = np.cumsum(sizes) - sizes
    ranks = np.empty(len(labels), np.int64)
    ranks[by_group] = np.arange(len(labels)) - starts[labels[by_group]]
    return ranks


def dice(seed: int, *what: object) -> np.random.Philox:
    """Random bits named by their purpose; the same on every machine (the bit stream of Philox is
    fixed, numpy's distributions on top of it are not)."""
    text = ":".join(map(str, (seed, *what)))
    return np.random.Philox(
        key=int.from_bytes(blake2b(text.encode(), digest_size=16).digest(), "little")
    )


def order(count: int, seed: int, *what: object) -> Places:
    """A random permutation of 0..count-1."""
    return np.argsort(dice(seed, *what).random_raw(count), kind="stable")


def rank(peer: PeerId, salt: str) -> tuple[bytes, PeerId]:
    """A member's place in the order of ``salt``: a hash, smaller is earlier."""
    return blake2b(f"{salt}:{peer}".encode(), digest_size=16).digest(), peer
