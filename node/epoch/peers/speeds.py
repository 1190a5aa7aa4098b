"""The speeds of the peers, as their leader believes them. Pure. Enters: claims in heartbeats,
measurements by neighbours, the peers that had work. Leaves: micro-batches per second, and measured
costs. Never: a path.

A claim costs nothing, so the measurements of a peer's neighbours bound it.
"""

import math
from collections.abc import Collection
from copy import copy
from statistics import median

from node.core.ids import ENDS, PeerId
from node.epoch.peers.peers import Peers
from node.scheduler.costs import NOTHING, Measured, quantise
from node.scheduler.quotas import stand_in

CEILING = 2.0
"""Multiple of the neighbours' measurement that bounds a claimed speed."""

FORGIVE_AFTER = 8
"""Epochs without a micro-batch after which a replica counts as :data:`CEILING` times as fast as it
was measured to be, and is tried with one micro-batch at least."""
GRID = 12
"""Points per factor of two of the speeds to plan with. An ends peer gets micro-batches in
proportion to its speed, and all others wait for the one that was rounded up most."""
TENSORS = 2
"""Tensors of a micro-batch that an ends peer sends: its activation, and later its gradient."""


class Speeds:
    """Speeds and costs of these peers. ``coarsest``: share of a measured tensor's bytes that it has
    in the coarsest format that a plan may choose."""

    def __init__(self, peers: Peers, coarsest: float = 1.0) -> None:
        self._peers = peers
        self._coarsest = coarsest
        self._planned: dict[PeerId, float] = {}
        """The speed that each peer was last planned with."""
        self._idle: dict[PeerId, int] = {}
        """Epochs in a row in which each member got no micro-batch."""
        self._table: tuple[dict[PeerId, float], dict[int, list[tuple[PeerId, float]]]] | None = None

    def over(self, peers: Peers) -> "Speeds":
        """The speeds of other peers, with the same past."""
        rest = copy(self)
        rest._peers = peers
        rest._table = None
        return rest

    def heard(self) -> None:
        """A peer has come, gone, or made other claims."""
        self._table = None

    def of(self, peer: PeerId) -> float:
        """Micro-batches per second to plan with, quantised; 0 for unknown. The speed of a peer that
        was not measured yet is reckoned from a plain product there. An ends peer starts no more
        micro-batches than its line carries."""
        speed = self.believed(peer) or self._reckoned(peer)
        if self._peers.candidates[peer].stage == ENDS:
            speed = self._over_the_line(peer, speed)
        if speed > 0:
            speed = self._planned[peer] = quantise(
                speed, self._planned.get(peer, 0.0), per_octave=GRID
            )
        return speed

    def _over_the_line(self, peer: PeerId, speed: float) -> float:
        """The lower of a speed and the rate at which a peer's measured line carries the tensors of
        micro-batches.

        Replicas of a block stage are measured by their neighbours, line and device together. To an
        ends peer its neighbours answer before its tensors go out."""
        body_s = self._coarsest * self._peers.candidates[peer].capacity.costs.body_s
        if body_s <= 0:
            return speed
        if self._forgiven(peer):
            body_s /= CEILING
        return min(speed, 1 / (TENSORS * body_s))

    def expected(self, peer: PeerId) -> float:
        """Micro-batches per second, comparable between stages: as believed, or for a peer that was
        not measured yet as reckoned from a plain product, beside peers of its stage or, where none
        of them was measured, of all stages; 0 for unknown."""
        believed = self.believed(peer)
        if believed > 0:
            return believed
        here = self._peers.candidates
        stage = here[peer].stage
        measured = any(self.believed(p) > 0 for p, c in here.items() if c.stage == stage)
        reckoned = self._reckoned(peer)
        if not measured:
            # In units of the speed that stands in for unknown ones.
            reckoned *= stand_in(self.believed(p) for p in here) / stand_in(())
        return reckoned

    def _reckoned(self, peer: PeerId) -> float:
        """Estimated speed of a peer that was not measured: the usual speed at its stage, times the
        ratio of the times for a plain product, within a factor :data:`CEILING` of the usual speed;
        0 if the peer's time is unknown."""
        here = self._peers.candidates
        own = here[peer]
        product_s = own.capacity.costs.product_s
        if product_s <= 0:
            return 0.0
        mates = [(p, c) for p, c in here.items() if c.stage == own.stage]
        known = [
            (speed, c.capacity.costs.product_s) for p, c in mates if (speed := self.believed(p)) > 0
        ]
        units = [speed * took_s for speed, took_s in known if took_s > 0]
        usual = stand_in(speed for speed, _ in known)
        if not units:
            products = [c.capacity.costs.product_s for _, c in mates]
            units = [usual * took_s for took_s in products if took_s > 0]
        return min(max(median(units) / product_s, usual / CEILING), usual * CEILING)

    def rows(self, peers: Collection[PeerId]) -> list[tuple[PeerId, float]]:
        """These peers with their speeds to plan with."""
        return [(p, self.of(p)) for p in peers]

    def believed(self, peer: PeerId) -> float:
        """Micro-batches per second, by the peer's claim and its neighbours' measurements; 0 for
        unknown."""
        speed = min(self._peers.candidates[peer].capacity.speed, self._bound(peer))
        # A peer without work is not measured either, so now and then it is tried again. It may
        # have become faster, but not at once as fast as a device of another kind.
        if self._forgiven(peer):
            speed *= CEILING
        return speed

    def measured(self) -> dict[PeerId, Measured]:
        """The costs that each peer reports, without peers that leave; nothing for a peer that got
        no work for long, because its measurements are out of date."""
        return {
            p: NOTHING if self._forgiven(p) else c.capacity.costs
            for p, c in sorted(self._peers.candidates.items())
            if not c.leaving
        }

    def known_cost(self) -> set[PeerId]:
        """Peers with a reported cost of a micro-batch that is not out of date."""
        return {
            p
            for p, c in self._peers.candidates.items()
            if c.capacity.costs.forward_s and not self._forgiven(p)
        }

    def doubts(self) -> dict[PeerId, float]:
        """For each peer that claims more than ``CEILING`` times the speed that its neighbours see:
        its claim divided by the most that is believed."""
        return {
            p: c.capacity.speed / b
            for p, c in self._peers.candidates.items()
            if c.capacity.speed > (b := self._bound(p)) > 0
        }

    def worked(self, current: set[PeerId], working: set[PeerId]) -> None:
        """A plan was made: of the ``current`` members only ``working`` have micro-batches."""
        self._idle = {p: 0 if p in working else self._idle.get(p, 0) + 1 for p in current}
        here = self._peers.candidates
        self._planned = {p: speed for p, speed in self._planned.items() if p in here}

    def _forgiven(self, peer: PeerId) -> bool:
        """True for a peer with outdated measurements, because it got no work for long."""
        return self._idle.get(peer, 0) >= FORGIVE_AFTER

    def _bound(self, peer: PeerId) -> float:
        """The most that is believed of a peer's claimed speed: ``CEILING`` times the neighbours'
        measurement, in the units of its siblings.

        Neighbours see a peer through its link and its next hop, so their numbers only compare
        replicas of one stage.
        """
        if self._table is None:
            self._table = self._measured()
        rates, units = self._table
        mine = rates.get(peer, 0.0)
        siblings = units.get(self._peers.candidates[peer].stage, ())
        others = [unit for p, unit in siblings if p != peer]
        if mine > 0 and others:
            return CEILING * mine * median(others)
        return math.inf

    def _measured(self) -> tuple[dict[PeerId, float], dict[int, list[tuple[PeerId, float]]]]:
        """The speed of each peer that its neighbours measure (the median), and for each stage the
        ratios of claimed to measured speeds."""
        said: dict[PeerId, list[float]] = {}
        for by, c in self._peers.candidates.items():
            for about, rate in c.capacity.seen:
                if about != by and rate > 0:
                    said.setdefault(about, []).append(rate)
        rates = {peer: median(words) for peer, words in said.items()}
        units: dict[int, list[tuple[PeerId, float]]] = {}
        for p, c in self._peers.candidates.items():
            speed = c.capacity.speed
            if speed > 0 and p in rates:
                units.setdefault(c.stage, []).append((p, speed / rates[p]))
        return rates, units
