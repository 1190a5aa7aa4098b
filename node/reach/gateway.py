"""The router of this host: its address, and the common part of the protocols for port mappings.
Enters: the kernel's table of routes; ports, leases in seconds. Leaves: the gateway of the IPv4
default route, or None; mappings that are held, and their end; a router that does not map is a
RouterFault. Never: the choice between ways, a retry after a refusal, another address family."""

import asyncio
import contextlib
import math
import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address
from pathlib import Path
from typing import ClassVar

from node.core.errors import TuttiError
from node.core.tasks import together
from node.reach.interfaces import is_loopback, leaves_from

ROUTES = Path("/proc/net/route")
_UP = 1  # RTF_UP
_GATEWAY = 2  # RTF_GATEWAY
REMOVE_S = 2.0
LEASE_S = 3600
"""Seconds that the router is asked to map ports for."""

Port = tuple[str, int]
"""("tcp" or "udp", port)."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """``address`` of the default gateway, ``local`` this host's towards it; IPv4 as text."""

    address: str
    local: str


def default_gateway(routes: str) -> str | None:
    """The gateway of the default route with the lowest metric in the text of /proc/net/route.

    None when there is none: routes without a gateway (point-to-point links) and over loopback do
    not count, lines that cannot be read are passed over.
    """
    found: list[tuple[int, str]] = []
    for line in routes.splitlines()[1:]:
        fields = line.split()
        try:
            interface, target, gateway, flags, metric, mask = *fields[:4], fields[6], fields[7]
            to, via, bits, within = (int(text, 16) for text in (target, gateway, flags, mask))
            order = int(metric)
        except (ValueError, IndexError):
            continue
        default = to == within == 0 and bits & _UP and bits & _GATEWAY
        if default and interface != "lo" and 0 < via < 1 << 32:
            # The table shows addresses as numbers of this machine, not of the network.
            found.append((order, str(IPv4Address(socket.htonl(via)))))
    if not found:
        return None
    return min(found, key=lambda route: route[0])[1]


def find_gateway() -> Gateway | None:
    """The gateway now; None without one or a way to it, and where the kernel has no such table (it
    is Linux's)."""
    try:
        address = default_gateway(ROUTES.read_text(encoding="utf-8"))
        local = ""
        if address:
            local = leaves_from(address)
    except OSError:
        return None
    if address and not is_loopback(local):
        return Gateway(address, local)
    return None


@dataclass(frozen=True, slots=True)
class Mapping:
    """``protocol`` to ``host``:``external`` reaches port ``internal`` here, by the way named
    ``how``.

    ``host``: IPv4 address that the router reports. A private one: a second router is above.
    """

    protocol: str
    internal: int
    host: str
    external: int
    how: str


Granted = tuple[tuple[Mapping, ...], float]
"""Mappings that the router has made, and the shortest of their leases in seconds."""


class RouterFault(TuttiError):
    """The router did not grant a request; the text is a short sentence for the operator."""


class GatewayProtocol(ABC):
    """A protocol spoken with one gateway. One probe, map or check at a time; remove at any time."""

    name: ClassVar[str]

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.held: dict[Port, Mapping | None] = {}
        """Mapping of each port that was requested; None until the router has granted it."""

    @abstractmethod
    async def probe(self) -> None:
        """Raises RouterFault when the router does not speak this or has no address outside."""

    @abstractmethod
    async def check(self) -> bool:
        """True when the router still has all that is held. Raises RouterFault if it is silent."""

    @abstractmethod
    async def _ask(self, port: Port) -> tuple[Mapping, float]:
        """Map one port, or renew it; the second value is the lease granted in seconds."""

    @abstractmethod
    async def _delete(self, port: Port) -> None:
        """Delete one mapping, or raise RouterFault."""

    async def map(self, ports: Sequence[Port]) -> Granted:
        """Map or renew ``ports`` and delete all others that are held.

        A UDP port that is refused is left out. Raises RouterFault when a TCP port is refused, or
        every port; then nothing new stays mapped, and what could not be renewed has its old lease.
        """
        for port in [p for p in self.held if p not in ports]:
            await self._forget(port)
        renewing = any(self.held.values())
        leases: dict[Mapping, float] = {}
        refused = None
        for port in ports:
            self.held.setdefault(port, None)  # an answer that is lost leaves a mapping all the same
            try:
                mapping, granted = await self._ask(port)
            except RouterFault as e:
                if port[0] == "tcp":
                    if not renewing:
                        await self.remove()
                    raise
                self.held[port] = None
                refused = e
                continue
            self.held[port] = mapping
            leases[mapping] = granted
        if refused and not leases:
            raise refused
        return tuple(leases), min(leases.values(), default=math.inf)

    async def remove(self) -> None:
        """Delete every mapping that was or may have been made. Ends within :data:`REMOVE_S`
        seconds, whatever happens."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REMOVE_S):
                await together(*(self._forget(port) for port in tuple(self.held)))

    async def _forget(self, port: Port) -> None:
        with contextlib.suppress(RouterFault):
            await self._delete(port)
            self.held.pop(port, None)
