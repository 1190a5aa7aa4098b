"""Who averages with whom in a round: a pure function of (members, round, seed), computed and never
negotiated. Enters: how many members, round, seed. Leaves: groups, or directed edges, by the
members' places in sorted order. Never: a tensor, a clock, chance that two machines would see
differently."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from node.core.ids import PeerId

Places = NDArray[np.int64]
"""Places in the sorted list of members."""


@dataclass(frozen=True, slots=True)
class Groups:
    """``labels`` [n]: members with equal labels average with each other. ``owners``: places that
    reduce for everybody, in equal shares; empty: every member of a group reduces its share of it.
    ``whole``: a group with a member missing averages nothing (a plain all-reduce); otherwise it
    goes on without."""

    labels: Places
    owners: tuple[int, ...] = ()
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Edges:
    """``source`` and ``target`` [m]: who sends to whom. ``mass``: what is sent is a share of the
    sender's sum and weight (push-sum); otherwise the receiver takes the mean of its own value and
    those that came."""

    source: Places
    target: Places
    mass: bool = False


@dataclass(frozen=True, slots=True)
class Pushes:
    """Every member pushes to the ``owners`` and pulls when it likes, here in ``order``. A push is
    refused when more than ``bound`` others were applied since its sender last pulled (None: never).
    ``locked`` False: pushes mix coordinate by coordinate."""

    order: Places
    owners: tuple[int, ...]
    bound: int | None = None
    locked: bool = True


Meeting = Groups | Edges | Pushes


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


def dice(seed: int, *what: object) -> np.random.Philox:
    """Random bits named by what they are for; the same on every machine (the bit stream of Philox
    is fixed, numpy's distributions on top of it are not)."""
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
