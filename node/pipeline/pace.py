"""How fast neighbours answer: seconds from sending a frame to its DONE, as the sender sees it.
Pure: times in, rates out."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from node.core.ids import PeerId
from node.pipeline.timing import RunningAverage

SURE = 4
"""Measurements of a peer before it is compared with its siblings."""
SLOW = 0.5
"""A replica below this share of its fastest sibling's rate is asked after it."""
FRAME = 0.5
"""Micro-batches in one frame: forward and backward are one together."""


@dataclass(slots=True)
class _Seen:
    average: RunningAverage = field(default_factory=RunningAverage)
    busy_until: float = float("-inf")


class Pace:
    """Moving averages of seconds for each micro-batch, by peer.

    Frames to one peer overlap; each is charged only for the time after the one before it was done,
    else eight in flight would look eight times as slow. What the peer's next hop makes it wait
    counts too: so the work is felt here.
    """

    def __init__(self) -> None:
        self._seen: dict[PeerId, _Seen] = {}

    def observe(self, peer: PeerId, start: float, end: float) -> None:
        """A frame sent at ``start`` was DONE at ``end``, seconds of one clock."""
        seen = self._seen.setdefault(peer, _Seen())
        fresh = end - max(start, seen.busy_until)
        seen.busy_until = max(seen.busy_until, end)
        seen.average.add(fresh / FRAME, end)

    def rates(self) -> dict[PeerId, float]:
        """Micro-batches per second of everybody that answered a frame."""
        return {peer: 1 / s.average.mean for peer, s in self._seen.items() if s.average.count}

    def slow(self, replicas: Collection[PeerId]) -> frozenset[PeerId]:
        """Which of these siblings are measured to be much slower than the fastest of them."""
        sure = {
            p: self._seen[p].average.mean
            for p in replicas
            if p in self._seen and self._seen[p].average.count >= SURE
        }
        return frozenset(p for p, seconds in sure.items() if min(sure.values()) < SLOW * seconds)
