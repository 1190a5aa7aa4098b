"""When to ask the router for port mappings, in which way, and when again. Time is an argument.
Enters: ports wanted, the gateway, how each way answered. Leaves: what to do next, the mappings.
Never: a clock, a socket, an await."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Literal

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


Granted = tuple[tuple[Mapping, ...], float]
"""What the router maps, and the shortest of the leases in seconds."""


@dataclass(frozen=True, slots=True)
class RouterAsk:
    """What to ask the router in one ``way``: "probe" finds out if it speaks this way, "map" maps
    ``ports``, new or again, and no others, "check" finds out if it still has the mappings."""

    kind: Literal["probe", "map", "check"]
    way: str
    attempt: int
    ports: tuple[Port, ...] = ()


class _Now(Enum):
    IDLE = 0
    CHOOSING = 1
    MAPPING = 2
    CHECKING = 3


class MappingPlan:
    """What is mapped, and what to do about it.

    Every ``every_s`` seconds the gateway is looked at. Without mappings all ways are probed at
    once, and the most preferred one that maps is used. With mappings they are renewed at half of
    their lease and checked otherwise; what fails then leads to new probes, and the mappings stay
    in force until those have failed too: a router that is slow for a moment is no reason to tell
    others that this peer cannot be reached. Whatever is to be asked is answered once.
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
        """Clock time in seconds to :meth:`look`; never while an answer is awaited."""
        return self._due if self._now is _Now.IDLE else math.inf

    def want(self, ports: tuple[Port, ...], now: float) -> list[RouterAsk]:
        """These ports are to be mapped from now on, and no others. What to ask the router."""
        if ports == self._ports:
            return []
        self._ports = ports
        if self._now is not _Now.IDLE:
            return []  # the next "map" is for these, or _rest finds that others were asked for
        if self._way:
            return self._rest()
        self._due = now if ports else math.inf
        return []

    def look(self, gateway: Gateway | None, now: float) -> list[RouterAsk]:
        """The time :attr:`due` has come, and this is the gateway there is. What to ask it."""
        if not self._ports:
            self._due = math.inf
            return []
        self._due = now + self._every
        if gateway != self._gateway:  # what the router that was left maps is of no use here
            self._gateway, self._way, self.tried, self.mappings = gateway, "", {}, ()
            self._attempt += 1
        if gateway is None:
            self.tried = {way: NO_GATEWAY for way in WAYS}
            return []
        if not self._way:
            return self._probe()
        if now >= self._renew_at:
            return self._map(self._way)
        self._now = _Now.CHECKING
        return [RouterAsk("check", self._way, self._attempt)]

    def answered(
        self, ask: RouterAsk, answer: Granted | bool | str | None, now: float
    ) -> list[RouterAsk]:
        """What became of ``ask``: None, a probe was answered; what was granted; whether all is
        there; or, of any of them, one sentence why it came to nothing. What to ask next."""
        if ask.attempt != self._attempt:
            return []  # of a router that was left, or of probes that were made again since
        match answer:
            case None:
                return self._heard(ask.way, "")
            case str():
                return self._failed(ask.way, answer)
            case bool():
                return self._rest() if answer else self._map(ask.way)
            case mappings, lease_s:
                return self._mapped(ask.way, mappings, lease_s, now)

    def _probe(self) -> list[RouterAsk]:
        self._way = ""
        self._attempt += 1
        self._settled = False
        if not self._ports:
            self._now, self._due, self.mappings = _Now.IDLE, math.inf, ()
            return []
        self._now = _Now.CHOOSING
        self._waiting, self._answered = set(WAYS), set()
        return [RouterAsk("probe", way, self._attempt) for way in WAYS]

    def _heard(self, way: str, why: str) -> list[RouterAsk]:
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

    def _choose(self) -> list[RouterAsk]:
        self._now = _Now.CHOOSING
        for way in WAYS:
            if way in self._answered:
                return self._map(way)
            if way in self._waiting:
                return []  # it may still answer, and is preferred to those that have
        self._way, self._now, self.mappings = "", _Now.IDLE, ()
        return []

    def _map(self, way: str) -> list[RouterAsk]:
        self._now, self._way, self._asked = _Now.MAPPING, way, self._ports
        return [RouterAsk("map", way, self._attempt, self._ports)]

    def _mapped(
        self, way: str, mappings: tuple[Mapping, ...], lease_s: float, now: float
    ) -> list[RouterAsk]:
        self._renew_at = now + max(SHORTEST_S, lease_s / 2)
        self._due = min(self._due, self._renew_at)
        self._settled, self.mappings = True, mappings
        self._answered.add(way)
        self._tell_unused()
        return self._rest()

    def _rest(self) -> list[RouterAsk]:
        """Nothing is left to do now, unless other ports were wanted meanwhile."""
        if self._asked != self._ports:
            return self._map(self._way)
        self._now = _Now.IDLE
        if not self._ports:
            self._way, self._due = "", math.inf
        return []

    def _failed(self, way: str, why: str) -> list[RouterAsk]:
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
