"""The ways to a peer, the best first, and the times to try a better one than the current. Pure.
Enters: the way to a peer in use, failed attempts, the time. Leaves: the next attempt.
Never: the attempt itself (that is :mod:`node.transport.ways.lines`)."""

from dataclasses import dataclass, field
from enum import Enum, IntEnum

AGAIN_S = 5.0
"""First pause, in seconds, after an attempt that failed; it doubles with every failure."""
LONGEST_S = 300.0
"""Longest pause, in seconds, after an attempt that failed."""


class Rung(IntEnum):
    """Way of the gRPC connection to a peer; larger is better."""

    NONE = 0
    RELAYED = 1
    """Through another peer that both are connected to."""
    PUNCHED = 2
    """Over a libp2p connection that both sides opened at the same time."""
    REVERSED = 3
    """Over a libp2p connection that the peer made to us."""
    TUNNEL = 4
    """Over a libp2p connection that we made to an address of the peer."""
    MAPPED = 5
    """TCP to a port that the peer's router maps."""
    DIRECT = 6
    """TCP to an address of the peer itself."""

    @property
    def word(self) -> str:
        """Word for status, records and metrics; "" for NONE."""
        if not self:
            return ""
        return self.name.lower()


class ClimbAttempt(Enum):
    """Attempts that may lead to a better rung; the value is a word for people."""

    DIAL = "tcp"
    """gRPC over TCP to the addresses the peer announces."""
    CONNECT = "libp2p"
    """A libp2p connection to the addresses the peer announces."""
    PUNCH = "punch"
    """A libp2p connection opened from both sides at the same time."""
    TUNNEL = "tunnel"
    """A gRPC connection through the libp2p connection there is."""


@dataclass
class Climb:
    """Times to try a better way to one peer. ``punch``: True if hole punching is allowed."""

    punch: bool = True
    rung: Rung = Rung.NONE
    connected: Rung = Rung.NONE
    """The rung of a tunnel through the libp2p connection there is; NONE where there is none."""
    dialable: bool = False
    """The peer announces addresses for gRPC."""
    _failures: dict[ClimbAttempt, int] = field(default_factory=dict)
    _next: dict[ClimbAttempt, float] = field(default_factory=dict)

    def reached(self, rung: Rung, now: float) -> None:
        """The peer is reached so now; NONE: it was lost."""
        if rung is Rung.NONE:
            self.news(now)
        elif self.rung is Rung.NONE:
            # Better ways were tried together with this one; both attempts need a moment before
            # another try can differ.
            self._next = {a: now + AGAIN_S for a in (ClimbAttempt.DIAL, ClimbAttempt.CONNECT)}
        self.rung = rung

    def news(self, now: float) -> None:
        """Something has changed (its addresses, ours): everything is worth a try again."""
        self._failures = {}
        self._next = {}

    def due(self, now: float) -> ClimbAttempt | None:
        """The next attempt, if one is worth it and it is time; None as long as the peer is not
        reached at all."""
        if self.rung is Rung.NONE:
            return None
        worth = {  # in the order in which they are tried
            ClimbAttempt.TUNNEL: self.connected > self.rung,
            ClimbAttempt.CONNECT: not self.connected and self.rung < Rung.TUNNEL,
            ClimbAttempt.DIAL: self.dialable and self.rung < Rung.MAPPED,
            ClimbAttempt.PUNCH: self.punch and not self.connected and self.rung is Rung.RELAYED,
        }
        return next(
            (a for a, is_so in worth.items() if is_so and now >= self._next.get(a, now)), None
        )

    def failed(self, attempt: ClimbAttempt, now: float) -> None:
        """It led to nothing better."""
        count = self._failures[attempt] = self._failures.get(attempt, 0) + 1
        self._next[attempt] = now + min(LONGEST_S, AGAIN_S * 2.0 ** (count - 1))
