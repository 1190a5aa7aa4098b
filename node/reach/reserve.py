"""Choice of the relays for this peer to be reachable through: two, drawn at random, and another
when one is lost. Pure. Enters: offers of relays, outcomes of reservations, the time. Leaves: relays
to ask."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, field

from node.core.ids import PeerId

WANTED = 2
FIRST_S = 2.0
"""First pause, in seconds, after a relay refused or was lost; it doubles with every failure."""
LONGEST_S = 120.0
"""Longest pause, in seconds, after a relay refused or was lost."""


@dataclass
class Reservations:
    """``salt`` makes the choice differ from peer to peer, and from start to start: it is secret, so
    that nobody can make a PeerId that is chosen."""

    salt: bytes
    wanted: int = 0
    held: set[PeerId] = field(default_factory=set)
    _asked: set[PeerId] = field(default_factory=set)
    _failures: dict[PeerId, int] = field(default_factory=dict)
    _next: dict[PeerId, float] = field(default_factory=dict)

    def due(self, offers: Iterable[PeerId], now: float) -> list[PeerId]:
        """Relays to ask now. ``offers``: relays that would take another client."""
        missing = self.wanted - len(self.held) - len(self._asked)
        if missing <= 0:
            return []
        free = [
            r
            for r in offers
            if r not in self.held and r not in self._asked and now >= self._next.get(r, now)
        ]
        free.sort(key=lambda relay: hashlib.sha256(self.salt + relay.encode()).digest())
        chosen = free[:missing]
        self._asked |= set(chosen)
        return chosen

    def granted(self, relay: PeerId) -> None:
        """It relays for this peer now."""
        self._asked.discard(relay)
        self.held.add(relay)
        self._failures.pop(relay, None)

    def lost(self, relay: PeerId, now: float) -> None:
        """It refused, did not answer, or has stopped."""
        self._asked.discard(relay)
        self.held.discard(relay)
        count = self._failures[relay] = self._failures.get(relay, 0) + 1
        self._next[relay] = now + min(LONGEST_S, FIRST_S * 2.0 ** (count - 1))
