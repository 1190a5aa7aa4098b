"""What lies between two peers: latency, jitter, bandwidth, loss, and walls that nothing passes.

A directed link carries its transfers one after the other; a lost message costs a retransmission. A
*wall* stands between two groups of peers, in one direction; walls may overlap, and each is taken
down by itself.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from node.core.ids import PeerId
from node.sim.setup import LinkProfile

RETRANSMIT_S = 0.2
"""Least delay before a lost message is sent again, as TCP's minimum."""


@dataclass(slots=True)
class Link:
    """One direction between two peers, and when it has carried what was sent so far."""

    profile: LinkProfile
    free_at: float = 0.0


@dataclass(frozen=True)
class Wall:
    """Nothing passes from a peer of ``sources`` to a peer of ``targets``; an empty group means
    everybody."""

    sources: frozenset[PeerId]
    targets: frozenset[PeerId]

    def parts(self, a: PeerId, b: PeerId) -> bool:
        return (
            (not self.sources or a in self.sources)
            and (not self.targets or b in self.targets)
            and a != b
        )


class Links:
    """All directed links, made when first used, all alike until told otherwise."""

    def __init__(self, rng: random.Random, profile: LinkProfile) -> None:
        self._rng, self._new = rng, profile
        self._links: dict[tuple[PeerId, PeerId], Link] = {}
        self.walls: list[Wall] = []
        self.limited = profile.bandwidth > 0
        """Whether bytes take time."""

    def link(self, a: PeerId, b: PeerId) -> Link:
        """The link from ``a`` to ``b``."""
        return self._links.setdefault((a, b), Link(self._new))

    def cut(self, a: PeerId, b: PeerId) -> bool:
        """Whether a wall stands between them."""
        return bool(self.walls) and any(w.parts(a, b) for w in self.walls)

    def travel(self, a: PeerId, b: PeerId, nbytes: int, now: float) -> float:
        """Seconds until the last byte of a message sent now arrives. Takes the link for the time of
        its transfer."""
        link = self._links.get((a, b)) or self.link(a, b)
        at = link.profile
        seconds = at.latency_s + (at.jitter_s * self._rng.random() if at.jitter_s else 0.0)
        if at.loss and self._rng.random() < at.loss:
            seconds += RETRANSMIT_S + 2 * at.latency_s
        if at.bandwidth and nbytes:
            begin = link.free_at if link.free_at > now else now
            link.free_at = begin + nbytes * 8 / at.bandwidth
            seconds += link.free_at - now
        return seconds
