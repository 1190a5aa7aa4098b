"""The ways to a peer, the best first, and the times to try a better one than the current. Pure.
Enters: the way to a peer in use, failed attempts, the time. Leaves: the next attempt.
Never: the attempt itself (that is :mod:`node.transport.ways.lines`)."""

from dataclasses import dataclass, field
from enum import Enum, IntEnum

from node.core.version import BYPASS_SINCE

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
    BYPASS = "bypass"
    """A TCP connection for gRPC on the present rung, which libp2p arranges and does not carry."""


class BypassWay(Enum):
    """Ways to a TCP connection with a peer that cannot be dialled."""

    CALL_BACK = "call back"
    """The peer connects to us."""
    PUNCH = "punch"
    """Both sides open it at the same moment."""
    RELAY = "relay"
    """Both sides connect to the relay."""


@dataclass(frozen=True)
class Outside:
    """Facts about this peer, as others see it. ``listens``: it listens for connections of bypasses;
    ``closed``: others cannot dial it; ``keeps_ports``: its router maps all connections from one
    port to the same outside port; ``seen_by``: there is a peer that can tell this peer its outside
    port; ``punch``: hole punching is allowed."""

    listens: bool = True
    closed: bool = False
    keeps_ports: bool = True
    seen_by: bool = False
    punch: bool = True


def bypass_of(rung: Rung, spoken: int, outside: Outside) -> BypassWay | None:
    """The way to a TCP connection on ``rung`` with a peer, if protocol version ``spoken`` is the
    newest that both speak; None if there is no way, and libp2p carries the bytes further."""
    if spoken < BYPASS_SINCE:
        return None
    if rung is Rung.RELAYED:
        return BypassWay.RELAY
    if rung is Rung.PUNCHED:
        if outside.punch and outside.keeps_ports and outside.seen_by:
            return BypassWay.PUNCH
        return None
    # A peer that has dialled us once can do so again, whatever others can.
    callable_back = rung is Rung.REVERSED or (rung is Rung.TUNNEL and not outside.closed)
    if callable_back and outside.listens:
        return BypassWay.CALL_BACK
    return None


@dataclass
class Climb:
    """Times to try a better way to one peer. ``punch``: True if hole punching is allowed."""

    punch: bool = True
    rung: Rung = Rung.NONE
    connected: Rung = Rung.NONE
    """The rung of a tunnel through the libp2p connection there is; NONE where there is none."""
    dialable: bool = False
    """The peer announces addresses for gRPC."""
    carried: bool = False
    """True if libp2p carries the bytes and there is a way past it."""
    _failures: dict[ClimbAttempt, int] = field(default_factory=dict)
    _next: dict[ClimbAttempt, float] = field(default_factory=dict)

    def reached(self, rung: Rung, now: float) -> None:
        """Record that the peer is reached on ``rung`` now; NONE: the connection was lost."""
        if rung is Rung.NONE:
            self.news(now)
        elif self.rung is Rung.NONE:
            # Better ways were tried together with this one; both attempts need a moment before
            # another try can differ.
            self._next = {a: now + AGAIN_S for a in (ClimbAttempt.DIAL, ClimbAttempt.CONNECT)}
        if rung is not self.rung:
            # Another way past libp2p leads to this rung than to the one before.
            self._failures.pop(ClimbAttempt.BYPASS, None)
            self._next.pop(ClimbAttempt.BYPASS, None)
        self.rung = rung

    def news(self, now: float) -> None:
        """Try everything again soon: addresses of the peer, or of this one, have changed."""
        self._failures = {}
        self._next = {}

    def due(self, now: float) -> ClimbAttempt | None:
        """The next attempt, if one is worth it and it is time; None as long as the peer is not
        reached at all."""
        if self.rung is Rung.NONE:
            return None
        worth = {  # in the order in which they are tried
            ClimbAttempt.TUNNEL: self.connected > self.rung,
            ClimbAttempt.BYPASS: self.carried,
            ClimbAttempt.CONNECT: not self.connected and self.rung < Rung.TUNNEL,
            ClimbAttempt.DIAL: self.dialable and self.rung < Rung.MAPPED,
            ClimbAttempt.PUNCH: self.punch and not self.connected and self.rung is Rung.RELAYED,
        }
        return next(
            (a for a, is_so in worth.items() if is_so and now >= self._next.get(a, now)), None
        )

    def failed(self, attempt: ClimbAttempt, now: float) -> None:
        """Record that an attempt led to nothing better."""
        count = self._failures[attempt] = self._failures.get(attempt, 0) + 1
        self._next[attempt] = now + min(LONGEST_S, AGAIN_S * 2.0 ** (count - 1))
