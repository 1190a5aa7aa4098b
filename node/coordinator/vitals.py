"""Signs of life of other peers, for people. Pure: signs and times in, the state of a peer out.

The directory lists a peer until its record expires, 20 s after its last sign of life. This peer
often knows sooner: a connection broke, a probe was not answered, the leader counts the peer as
dead, its record was not renewed. No decision of the protocol is made here.
"""

import math
from dataclasses import dataclass
from enum import Enum

from node.core.ids import PeerId
from node.core.newest import Newest

MOST = 4096
"""Peers that are remembered, the newest."""
MOST_LOST = 16
"""Peers that a leader tells its members as lost."""
OVERDUE = 0.6
"""A record is renewed four times in its life. After this share of it without a renewal the peer is
silent."""
RENEWALS = 2
"""Renewals of a record that outweigh evidence. The first may have been posted before the evidence
came, and have arrived after it."""


class Life(Enum):
    """The standing of a peer."""

    LIVES = "lives"
    SILENT = "silent"
    LOST = "lost"
    LEFT = "left"
    """It had said that it leaves, and is silent since."""


@dataclass(slots=True)
class _Signs:
    """Signs of one peer. Times are seconds of the monotonic clock, -1 for never."""

    seen: float = -1.0
    doubted: float = -1.0
    dead: float = -1.0
    seq: int = -1
    renewed: float = -1.0
    read: float = -1.0
    renewals: int = 0
    """Renewals of the record since the evidence."""
    life_s: float = 0.0
    leaves: bool = False
    started: float = 0.0
    """Unix second of the peer's start, from its record."""


class Vitals:
    """Signs of life of other peers, and evidence against them."""

    def __init__(self) -> None:
        self._of: Newest[PeerId, _Signs] = Newest(MOST)
        self._dead: list[PeerId] = []
        """Peers that were found dead, the newest last; some of them may live again."""

    def alive(self, peer: PeerId, now: float) -> None:
        """``peer`` said or answered something at ``now``, which may be a moment ago."""
        signs = self._signs(peer)
        signs.seen = max(signs.seen, now)
        if now >= max(signs.doubted, signs.dead):
            signs.doubted = -1.0
            signs.dead = -1.0

    def doubt(self, peer: PeerId, now: float) -> None:
        """A connection to ``peer`` broke, or it did not answer."""
        signs = self._signs(peer)
        if signs.doubted < 0:
            signs.doubted = now
            signs.renewals = 0

    def dead(self, peer: PeerId, now: float, since: float | None = None) -> None:
        """The leader counts ``peer`` as dead. ``since``: when the attempt to reach it began; a
        later sign of life counts more."""
        signs = self._signs(peer)
        if since is None:
            since = now
        if signs.dead < 0 and signs.seen <= since:
            signs.dead = now
            signs.renewals = 0
            self._dead = [*(p for p in self._dead if p != peer), peer][-MOST_LOST:]

    def leaves(self, peer: PeerId, leaves: bool) -> None:
        """``peer`` said whether it is about to leave."""
        self._signs(peer).leaves = leaves

    def record(self, peer: PeerId, seq: int, life_s: float, started: float, now: float) -> None:
        """The directory was read. ``seq``: number of the record of ``peer``; ``life_s``: seconds
        from its signature to its expiry; ``started``: when its daemon started."""
        signs = self._signs(peer)
        if seq > signs.seq:
            signs.seq = seq
            signs.renewed = now
            # After a clock was set back, records are still numbered by the time before.
            signs.life_s = life_s if life_s > 0 else math.inf
            signs.renewals += 1
            if started != signs.started or signs.renewals >= RENEWALS:
                signs.doubted = -1.0
                signs.dead = -1.0
            signs.started = started
        signs.read = now

    def lost(self) -> list[PeerId]:
        """Peers that were found dead lately, at most :data:`MOST_LOST`."""
        self._dead = [p for p in self._dead if p in self._of and self._of[p].dead >= 0]
        return [p for p in self._dead if not self._of[p].leaves]

    def look(self, peer: PeerId, now: float) -> tuple[Life, float]:
        """The standing of ``peer``, and for how many seconds it has been silent or lost."""
        signs = self._of.get(peer)
        if signs is None:
            return Life.LIVES, 0.0
        against = max(signs.dead, signs.doubted)
        if against >= 0 and signs.leaves:
            return Life.LEFT, now - against
        if signs.dead >= 0:
            return Life.LOST, now - signs.dead
        if signs.doubted >= 0:
            last = signs.seen if signs.seen >= 0 else signs.doubted
            return Life.SILENT, now - last
        last = max(signs.renewed, signs.seen)
        if signs.renewed >= 0 and signs.read - last > OVERDUE * signs.life_s:
            return Life.SILENT, now - last
        return Life.LIVES, 0.0

    def _signs(self, peer: PeerId) -> _Signs:
        found = self._of.get(peer)
        if found is None:
            found = self._of[peer] = _Signs()
        self._of.move_to_end(peer)
        return found
