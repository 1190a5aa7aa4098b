"""Measured times of work, connections and neighbours: moving averages with their variance, by
direction and by peer. Pure: times in.

Passive: every job of the device and every tensor that was sent is a measurement, and costs nothing.
Where no tensor goes, a small probe (:meth:`Timing.probed`) measures the round trip.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

from node.core.ids import PeerId
from node.pipeline.events import Direction

ALPHA = 0.1
"""Weight of a new measurement; the first ones weigh more."""
WILD = 10.0
"""Most that a measurement counts for, as a multiple of the mean: a pause of the machine is no cost
of the work."""
SURE = 8
"""Measurements after which ``WILD`` limits the next ones."""
STALE_S = 300.0
"""Seconds after which a measurement of a connection is out of date."""
FIRST_PROBES = 3
"""Probes of a new connection of which the shortest counts: the first one sets it up, and a peer
that has just started is busy."""
FAILURES = 2
"""Probes in a row without an answer after which a connection counts as gone: a single one may be a
busy machine."""
COMPARABLE = 4
"""Frames that a peer answered before it is compared with its siblings."""
SLOW = 0.5
"""A replica below this share of its fastest sibling's rate is asked after it."""
FRAME = 0.5
"""Micro-batches in one frame: forward and backward are one together."""


@dataclass(slots=True)
class RunningAverage:
    """Exponential moving average and variance (Finch, "Incremental calculation of weighted mean and
    variance", 2009, section 9)."""

    count: int = 0
    mean: float = 0.0
    variance: float = 0.0
    at: float = -math.inf

    def add(self, seconds: float, now: float) -> None:
        """Add one measurement; a number that is not positive and finite is ignored."""
        if not 0 < seconds < math.inf:
            return
        if self.count >= SURE:
            seconds = min(seconds, WILD * self.mean)
        self.count = self.count + 1
        self.at = now
        weight = max(1 / self.count, ALPHA)
        off = seconds - self.mean
        self.mean += weight * off
        self.variance = (1 - weight) * (self.variance + weight * off * off)

    def steady(self, deviations: float) -> float:
        """The mean plus ``deviations`` standard deviations; 0 when nothing was measured."""
        if not self.count:
            return 0.0
        return self.mean + deviations * math.sqrt(self.variance)


def _lately(averages: dict[PeerId, RunningAverage], peer: PeerId, now: float) -> RunningAverage:
    """The average of a connection; a new one if its last measurement is out of date."""
    average = averages.get(peer)
    if average is None or now - average.at >= STALE_S:
        average = averages[peer] = RunningAverage()
    return average


class Timing:
    """All measurements of one peer. ``work``: device seconds of a micro-batch by direction;
    ``loss``: of a loss with its backward (at the ends)."""

    def __init__(self) -> None:
        self.work = {way: RunningAverage() for way in Direction}
        self.loss = RunningAverage()
        self._tensors: dict[PeerId, RunningAverage] = {}
        self._trips: dict[PeerId, RunningAverage] = {}
        self._failed: dict[PeerId, tuple[int, float]] = {}
        self._answers: dict[PeerId, RunningAverage] = {}
        """Seconds that a peer takes for a micro-batch, from sending to DONE."""

    def sent(self, peer: PeerId, seconds: float | None, now: float, whole: float = 1.0) -> None:
        """``peer`` held a tensor ``seconds`` after it was offered, less the time it waited there
        for the plan or for room; None where that is not known. ``whole``: how many times as many
        bytes it has in the run's format. The time that counts is that of these bytes, so that it
        does not depend on the format that a plan has chosen by it."""
        if seconds is not None:
            trip = 0.0
            if peer in self._trips:
                trip = min(seconds, self._trips[peer].mean)
            seconds = trip + whole * (seconds - trip)
            _lately(self._tensors, peer, now).add(seconds, now)
        self._failed.pop(peer, None)

    def probed(self, peer: PeerId, seconds: float, now: float) -> None:
        """A small message to ``peer`` and back took ``seconds``."""
        trip = _lately(self._trips, peer, now)
        if 0 < trip.count < FIRST_PROBES:
            trip.mean = seconds = min(seconds, trip.mean)
        trip.add(seconds, now)
        self._failed.pop(peer, None)

    def unanswered(self, peer: PeerId, now: float) -> None:
        """A small message to ``peer`` was not answered."""
        count = self._failed.get(peer, (0, 0.0))[0] + 1
        self._failed[peer] = count, now
        if count >= FAILURES:
            self._tensors.pop(peer, None)
            self._trips.pop(peer, None)

    def silent(self) -> set[PeerId]:
        """Peers that did not answer the last probes and of which no measurement is left."""
        return {p for p in self._failed if p not in self._trips and p not in self._tensors}

    def ways(self, now: float) -> dict[PeerId, tuple[float, float]]:
        """Seconds of a tensor and of a small round trip, 0 for unknown, of every peer there is a
        fresh measurement of."""
        tensors = {p: a.mean for p, a in self._tensors.items() if now - a.at < STALE_S}
        trips = {p: a.mean for p, a in self._trips.items() if now - a.at < STALE_S}
        return {p: (tensors.get(p, 0.0), trips.get(p, 0.0)) for p in tensors.keys() | trips.keys()}

    def due(
        self, peers: Collection[PeerId], now: float, every_s: float, again_s: float
    ) -> list[PeerId]:
        """The peers to probe now: all peers without a measured round trip, and one more. This is a
        peer measured fewer than ``FIRST_PROBES`` times, else the one measured longest ago if that
        is ``every_s`` ago. A peer that did not answer is left out for ``again_s``."""
        waits = {p for p, (_, at) in self._failed.items() if now - at < again_s}
        new = sorted(p for p in peers if p not in self._trips and p not in waits)
        known = sorted(
            (self._trips[p].count >= FIRST_PROBES, self._trips[p].at, p)
            for p in peers
            if p in self._trips and p not in waits
        )
        return new + [
            p for often, at, p in known[:1] if not often or now - at >= every_s or p in self._failed
        ]

    def keep(self, peers: Collection[PeerId]) -> None:
        """Forget the measurements of all other peers."""
        for known in (self._tensors, self._trips, self._failed, self._answers):
            for peer in known.keys() - peers:
                del known[peer]

    def observe(self, peer: PeerId, start: float, end: float) -> None:
        """A frame sent to ``peer`` at ``start`` was DONE at ``end``, seconds of one clock.

        Frames to one peer overlap; each is charged only for the time after the one before it was
        done, otherwise eight in flight would look eight times as slow. The peer's wait for its next
        hop counts too: so slow work further on is felt here.
        """
        seen = self._answers.setdefault(peer, RunningAverage())
        seen.add((end - max(start, seen.at)) / FRAME, end)

    def rates(self) -> dict[PeerId, float]:
        """Micro-batches per second of the peers this one sent frames to, measured from sending to
        DONE."""
        return {peer: 1 / seen.mean for peer, seen in self._answers.items() if seen.count}

    def slow(self, replicas: Collection[PeerId]) -> frozenset[PeerId]:
        """The siblings that are measured to be much slower than the fastest of them."""
        sure = {
            p: self._answers[p].mean
            for p in replicas
            if p in self._answers and self._answers[p].count >= COMPARABLE
        }
        return frozenset(p for p, seconds in sure.items() if min(sure.values()) < SLOW * seconds)
