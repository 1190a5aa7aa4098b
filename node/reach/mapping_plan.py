"""When to ask the router for port mappings, in which way, and when again. Time is an argument.
Enters: ports wanted, the gateway, how each way answered. Leaves: what to do next, the mappings.
Never: a clock, a socket, an await."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from node.reach.gateway import Gateway

WAYS: tuple[str, ...] = ("PCP", "NAT-PMP", "UPnP")
"""The ways to ask, the preferred one first."""

NO_GATEWAY = "this host has no IPv4 default route through a router"
SHORTEST_S = 4.0
"""Seconds between renewals at least, whatever lease a router grants (RFC 6887, section 11.2.1)."""

Port = tuple[str, int]
"""("tcp" or "udp", port)."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """``protocol`` to ``host``:``external`` reaches port ``internal`` here, by one of :data:`WAYS`.

    ``host`` is what the router says its IPv4 address is. A private one: a second router is above.
    """

    protocol: str
    internal: int
    host: str
    external: int
    how: str


# ------------------------------------------------------------ events


@dataclass(frozen=True, slots=True)
class Wanted:
    """These ports are to be mapped from now on, and no others."""

    ports: tuple[Port, ...]


@dataclass(frozen=True, slots=True)
class TimerDue:
    """The time :attr:`MappingPlan.due` has come."""


@dataclass(frozen=True, slots=True)
class GatewayFound:
    """The gateway there is now, or None; the answer to :class:`FindGateway`."""

    gateway: Gateway | None


@dataclass(frozen=True, slots=True)
class ProtocolAnswered:
    """The router speaks this way."""

    way: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Mapped:
    """The router maps these, all wanted TCP ports among them, for at least ``lease_s`` seconds."""

    way: str
    attempt: int
    mappings: tuple[Mapping, ...]
    lease_s: float


@dataclass(frozen=True, slots=True)
class Checked:
    """The router still has what was mapped, or not: it restarted, or its address is another."""

    way: str
    attempt: int
    intact: bool


@dataclass(frozen=True, slots=True)
class ProbeFailed:
    """A probe, a mapping or a check came to nothing; ``why`` is one sentence."""

    way: str
    attempt: int
    why: str


Event = Wanted | TimerDue | GatewayFound | ProtocolAnswered | Mapped | Checked | ProbeFailed

# ------------------------------------------------------------ actions


@dataclass(frozen=True, slots=True)
class FindGateway:
    """Find out the gateway and tell it by :class:`GatewayFound`."""


@dataclass(frozen=True, slots=True)
class ProbeProtocol:
    """Find out if the router speaks this way: :class:`ProtocolAnswered` or :class:`ProbeFailed`."""

    way: str
    attempt: int


@dataclass(frozen=True, slots=True)
class Map:
    """Map these ports, new or again, and no others: :class:`Mapped` or :class:`ProbeFailed`."""

    way: str
    attempt: int
    ports: tuple[Port, ...]


@dataclass(frozen=True, slots=True)
class CheckMappings:
    """Find out if the router still has the mappings: :class:`Checked` or :class:`ProbeFailed`."""

    way: str
    attempt: int


@dataclass(frozen=True, slots=True)
class MappingsChanged:
    """:attr:`MappingPlan.mappings` changed. Always the last action."""


Action = FindGateway | ProbeProtocol | Map | CheckMappings | MappingsChanged


class _Now(Enum):
    IDLE = 0
    LOOKING = 1
    CHOOSING = 2
    MAPPING = 3
    CHECKING = 4


class MappingPlan:
    """What is mapped, and what to do about it. :meth:`handle` is the only way in.

    Every ``every_s`` seconds the gateway is looked at. Without mappings all ways are probed at
    once, and the most preferred one that maps is used. With mappings they are renewed at half of
    their lease and checked otherwise; what fails then leads to new probes, and the mappings stay
    in force until those have failed too: a router that is slow for a moment is no reason to tell
    others that this peer cannot be reached. Every Probe, Map and Check must be answered once.
    """

    def __init__(self, every_s: float) -> None:
        self.mappings: tuple[Mapping, ...] = ()
        self.tried: dict[str, str] = {}
        self._every = every_s
        self._now = _Now.IDLE
        self._due = math.inf
        self._renew_at = math.inf
        self._ports: tuple[Port, ...] = ()
        self._asked: tuple[Port, ...] = ()
        self._gateway: Gateway | None = None
        self._way = ""  # the one that is used, or would be if it maps
        self._attempt = 0
        self._settled = False  # this attempt has led to mappings
        self._waiting: set[str] = set()
        self._answered: set[str] = set()

    @property
    def due(self) -> float:
        """Clock time in seconds to send :class:`TimerDue`; never while an answer is awaited."""
        return self._due if self._now is _Now.IDLE else math.inf

    def handle(self, event: Event, now: float) -> list[Action]:
        """Take one event at clock time ``now``; the actions are to be carried out in order."""
        match event:
            case Wanted(ports):
                return self._wanted(ports, now)
            case TimerDue():
                return self._look(now) if now >= self.due else []
            case GatewayFound(gateway):
                return self._seen(gateway, now)
            case _ if event.attempt != self._attempt:
                return []  # of a router that was left, or of probes that were made again since
            case ProtocolAnswered(way):
                return self._heard(way, "")
            case ProbeFailed(way, _, why):
                return self._failed(way, why)
            case Mapped():
                return self._mapped(event, now)
            case Checked(_, _, intact):
                return self._rest() if intact else self._map(self._way)

    def _wanted(self, ports: tuple[Port, ...], now: float) -> list[Action]:
        if ports == self._ports:
            return []
        self._ports = ports
        if self._now is not _Now.IDLE:
            return []  # the next Map is for these, or _rest finds that others were asked for
        return self._rest() if self._way else self._look(now)

    def _look(self, now: float) -> list[Action]:
        if not self._ports:
            self._due = math.inf
            return []
        self._now, self._due = _Now.LOOKING, now + self._every
        return [FindGateway()]

    def _seen(self, gateway: Gateway | None, now: float) -> list[Action]:
        moved, self._gateway = gateway != self._gateway, gateway
        if moved:
            self._way, self.tried = "", {}
            self._attempt += 1
        if gateway is None:
            self._now, self.tried = _Now.IDLE, {way: NO_GATEWAY for way in WAYS}
            return self._put(())
        if not self._way:  # what the router that was left maps is of no use here
            return [*self._probe(), *(self._put(()) if moved else [])]
        if now >= self._renew_at:
            return self._map(self._way)
        self._now = _Now.CHECKING
        return [CheckMappings(self._way, self._attempt)]

    def _probe(self) -> list[Action]:
        self._way = ""
        self._attempt += 1
        self._settled = False
        if not self._ports:
            self._now, self._due = _Now.IDLE, math.inf
            return self._put(())
        self._now = _Now.CHOOSING
        self._waiting, self._answered = set(WAYS), set()
        return [ProbeProtocol(way, self._attempt) for way in WAYS]

    def _heard(self, way: str, why: str) -> list[Action]:
        """The probe of a way ended."""
        self._waiting.discard(way)
        if why:
            self.tried[way] = why
        else:
            self._answered.add(way)
        if self._now is _Now.CHOOSING:
            return self._choose()
        if self._now is not _Now.MAPPING:
            self._tell_unused()
        return []

    def _choose(self) -> list[Action]:
        self._now = _Now.CHOOSING
        for way in WAYS:
            if way in self._answered:
                return self._map(way)
            if way in self._waiting:
                return []  # it may still answer, and is preferred to those that have
        self._way, self._now = "", _Now.IDLE
        return self._put(())

    def _map(self, way: str) -> list[Action]:
        self._now, self._way, self._asked = _Now.MAPPING, way, self._ports
        return [Map(way, self._attempt, self._ports)]

    def _mapped(self, event: Mapped, now: float) -> list[Action]:
        self._renew_at = now + max(SHORTEST_S, event.lease_s / 2)
        self._due = min(self._due, self._renew_at)
        self._settled = True
        self._answered.add(event.way)
        self._tell_unused()
        return [*self._rest(), *self._put(event.mappings)]

    def _rest(self) -> list[Action]:
        """Nothing is left to do now, unless other ports were wanted meanwhile."""
        if self._asked != self._ports:
            return self._map(self._way)
        self._now = _Now.IDLE
        if not self._ports:
            self._way, self._due = "", math.inf
        return []

    def _failed(self, way: str, why: str) -> list[Action]:
        if way in self._waiting:
            return self._heard(way, why)
        self.tried[way] = why
        self._answered.discard(way)
        if self._now is _Now.MAPPING and not self._settled:
            return self._choose()
        return self._probe()

    def _tell_unused(self) -> None:
        if not self._way:
            return
        unused = f"the router answers, but {self._way} is used"
        self.tried |= {way: "" if way == self._way else unused for way in self._answered}

    def _put(self, mappings: Sequence[Mapping]) -> list[Action]:
        changed, self.mappings = tuple(mappings) != self.mappings, tuple(mappings)
        return [MappingsChanged()] if changed else []
