"""Gossip: everybody averages with a neighbour or two, nobody waits for all.
Enters: how many members, round, seed. Leaves: pairs, or directed edges; push-sum's mass.
Never: a lost message that takes mass with it.

Random pairs are groups of two, exchanged as a butterfly is. Directed edges need push-sum (Kempe et
al. 2003; SGP, Assran et al. 2019), which is right only while the sum of (value, weight) over
members and messages stays the same: :class:`Mass`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from node.averaging.strategies.strategy import Edges, Groups, order
from node.core.ids import PeerId


@dataclass(frozen=True, slots=True)
class Pairs:
    """Random pairs, all at once. ``single``: one pair a round, as in Boyd et al. 2006, where the
    variance falls by 1 - 1/(N-1) a round on average."""

    single: bool = False
    partial: bool = True

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

    partial: bool = True

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
    partial: bool = True

    def period(self, count: int) -> int:
        """Rounds after which the edges repeat."""
        return max(1, (count - 1).bit_length() - (self.fanout - 1))

    def meet(self, count: int, round: int, seed: int) -> Edges:
        here, first = np.arange(count), round % self.period(count)
        targets = [(here + (1 << (first + i))) % count for i in range(self.fanout)]
        return Edges(np.tile(here, self.fanout), np.concatenate(targets), mass=True)


@dataclass(frozen=True, slots=True)
class Parcel:
    """All that ``sender`` ever sent to one receiver: ``value`` and ``weight`` are sums since the
    beginning, ``number`` counts them up. Cumulative, so a lost parcel is made good by the next one
    and a repeated or late one does no harm."""

    sender: PeerId
    number: int
    value: Any
    weight: Any


class Mass:
    """One member's part of a push-sum: numbers of any kind that can be added and scaled (arrays,
    tensors, fractions).

    What is *here* plus what is still *under way* to others (:meth:`owed`) never changes in sum over
    the members.
    """

    def __init__(self, me: PeerId, value: Any, weight: Any = 1) -> None:
        self.me, self.value, self.weight = me, value, weight
        self._sent: dict[PeerId, Parcel] = {}
        self._had: dict[PeerId, Parcel] = {}

    @property
    def estimate(self) -> Any:
        """Value over weight: this member's idea of the average."""
        return self.value / self.weight

    def send(self, targets: Sequence[PeerId]) -> dict[PeerId, Parcel]:
        """Give every target the same share as is kept; the parcel for each. With no target nothing
        changes.

        Raises ValueError for a target named twice, or oneself.
        """
        if self.me in targets or len(set(targets)) != len(targets):
            raise ValueError("mass goes to different other members")
        parts = len(targets) + 1
        value, weight = self.value / parts, self.weight / parts
        self.value, self.weight = value, weight
        for target in targets:
            old = self._sent.get(target)
            new = Parcel(self.me, 1, value, weight)
            self._sent[target] = (
                new
                if old is None
                else Parcel(self.me, old.number + 1, old.value + value, old.weight + weight)
            )
        return {target: self._sent[target] for target in targets}

    def again(self, target: PeerId) -> Parcel | None:
        """The newest parcel for ``target``, to be sent again when it was not acknowledged."""
        return self._sent.get(target)

    def receive(self, parcel: Parcel) -> None:
        """Take what is new in it; a parcel that is not newer than the last one changes nothing."""
        had = self._had.get(parcel.sender)
        if had is not None and parcel.number <= had.number:
            return
        self._had[parcel.sender] = parcel
        self.value = self.value + (parcel.value if had is None else parcel.value - had.value)
        self.weight = self.weight + (parcel.weight if had is None else parcel.weight - had.weight)

    def owed(self, others: Mapping[PeerId, Mass]) -> tuple[Any, Any]:
        """(value, weight) sent but not received yet; for whoever audits all members."""
        value, weight = 0, 0
        for target, parcel in self._sent.items():
            had = others[target]._had.get(self.me)
            value = value + (parcel.value if had is None else parcel.value - had.value)
            weight = weight + (parcel.weight if had is None else parcel.weight - had.weight)
        return value, weight
