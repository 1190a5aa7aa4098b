"""Keeps ports of this host mapped in the router, by PCP, NAT-PMP or UPnP, whichever works.
Enters: the ports wanted, the gateway. Leaves: the mappings in force, and why each way does not
work. Never: a judgement if an address can be reached."""

import asyncio
import contextlib
import hashlib
import math
import secrets
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from node.core.tasks import Tasks, together
from node.reach.gateway import Gateway, GatewayProtocol, Mapping, Port, RouterFault, find_gateway
from node.reach.natpmp import NatPmp, Pcp
from node.reach.upnp import Upnp
from node.telemetry.events import Journal

__all__ = ["Mapping", "PortMapper"]

WAYS = (Pcp.name, NatPmp.name, Upnp.name)
"""The ways to ask, the preferred one first."""
NO_GATEWAY = "this host has no IPv4 default route through a router"
SHORTEST_S = 4.0
"""Seconds between renewals at least, whatever lease a router grants (RFC 6887, section 11.2.1)."""


class PortMapper:
    """The service. ``on_change()`` is called in the event loop when :attr:`mappings` became others.

    Every ``every_s`` seconds the gateway is looked at. Without mappings all ways are probed at
    once, and the most preferred one that maps is used. With mappings they are renewed at half of
    their lease and checked otherwise; what fails then leads to new probes, and the mappings stay
    in force until those have failed too: a router that is slow for a moment is no reason to tell
    others that this peer cannot be reached.

    ``secret``: bytes that only this peer knows; with the same ones after a crash PCP maps its ports
    again, which it refuses to strangers until the lease is over.
    ``look`` and ``ways`` are for tests.
    """

    def __init__(
        self,
        journal: Journal,
        on_change: Callable[[], None],
        on_error: Callable[[str, BaseException], None] | None = None,
        *,
        every_s: float = 20.0,
        secret: bytes = b"",
        look: Callable[[], Gateway | None] = find_gateway,
        ways: Callable[[Gateway], Sequence[GatewayProtocol]] | None = None,
    ) -> None:
        self._journal = journal
        self._on_change = on_change
        self._every_s = every_s
        self._look = look
        self._make = ways or self._usual
        seed = b"tutti pcp" + (secret or secrets.token_bytes(32))
        self._nonce = hashlib.sha256(seed).digest()[:12]
        self._tasks = Tasks("portmap", on_error)
        self._wanted: tuple[Port, ...] = ()
        self._news = asyncio.Event()
        """Others are wanted."""
        self._gateway: Gateway | None = None
        self._ways: Sequence[GatewayProtocol] = ()
        self._used: GatewayProtocol | None = None
        self._asked: tuple[Port, ...] = ()
        self._renew_at = math.inf
        self._lamented: dict[str, str] = {}
        self.mappings: tuple[Mapping, ...] = ()
        """Mappings in force; empty before :meth:`start` and after :meth:`close`."""
        self.tried: dict[str, str] = {}
        """Every way that was tried: "" if it is used, else the reason it is not, a sentence."""

    def want(self, ports: Sequence[Port]) -> None:
        """Map these from now on and no others. Returns at once."""
        if (wanted := tuple(dict.fromkeys(ports))) != self._wanted:
            self._wanted = wanted
            self._news.set()

    async def start(self) -> None:
        """Begin; returns at once."""
        self._tasks.spawn(self._run(), "run", eternal=True)

    async def close(self) -> None:
        """Stop, and remove all mappings, in 2 s at most. Safe to call twice."""
        self.mappings = ()
        await self._tasks.close()
        await together(*(way.remove() for way in self._ways))
        self._turn_to(None)

    def _usual(self, gateway: Gateway) -> Sequence[GatewayProtocol]:
        return Pcp(gateway, self._nonce), NatPmp(gateway), Upnp(gateway)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            self._news.clear()
            again = loop.time() + self._every_s
            if self._wanted or self._used:
                await self._follow(self._look())
                self._lament()
            until = None
            if self._wanted:
                until = min(again, self._renew_at)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self._news.wait()

    async def _follow(self, gateway: Gateway | None) -> None:
        """Request the wanted port mappings from this gateway; one without a mapping protocol is
        skipped."""
        if gateway != self._gateway:
            self._turn_to(gateway)
            self._now_mapped(())  # what the router that was left maps is of no use here
        if gateway is None:
            self.tried = dict.fromkeys(WAYS, NO_GATEWAY)
        elif self._used is None:
            await self._choose()
        else:
            due = asyncio.get_running_loop().time() >= self._renew_at
            try:
                if due or self._asked != self._wanted or not await self._used.check():
                    await self._map(self._used)
            except RouterFault as e:
                self.tried = {**self.tried, self._used.name: str(e)}
                await self._choose()

    def _turn_to(self, gateway: Gateway | None) -> None:
        if gateway:
            self._ways = self._make(gateway)
        else:
            self._ways = ()
        self._gateway = gateway
        self._used = None
        self.tried = {}
        self._renew_at = math.inf

    async def _choose(self) -> None:
        """Probe all ways at once; the first of them, in their order, that maps is used. Ends when
        all have answered or given up (UPnP: some 4 s, 20 s at most)."""
        self._used = None
        self._renew_at = math.inf
        ways: Sequence[GatewayProtocol] = ()
        if self._wanted:
            ways = self._ways
        probes = [self._tasks.spawn(_trouble(w.probe()), f"probe-{w.name}") for w in ways]
        for way, probe in zip(ways, probes, strict=True):
            why = await probe
            if not why and self._used:
                why = f"the router answers, but {self._used.name} is used"
            elif not why:
                why = await _trouble(self._map(way))
            self.tried = {**self.tried, way.name: why}
        if not self._used:
            self._now_mapped(())

    async def _map(self, way: GatewayProtocol) -> None:
        """Request the wanted mappings, new or again, and no others. Raises RouterFault."""
        self._asked = self._wanted
        mappings, lease_s = await way.map(self._asked)
        self._used = None
        if self._asked:
            self._used = way
        self._renew_at = asyncio.get_running_loop().time() + max(SHORTEST_S, lease_s / 2)
        self._now_mapped(mappings)

    def _now_mapped(self, mapped: tuple[Mapping, ...]) -> None:
        if mapped == self.mappings:
            return
        self.mappings = mapped
        kind = "ports-unmapped"
        text = "the router maps no port any more"
        level = "warning"
        how = ""
        if mapped:
            kind = "ports-mapped"
            level = "info"
            how = mapped[0].how
            ports = ", ".join(f"{m.protocol} {m.internal} at {m.host}:{m.external}" for m in mapped)
            text = f"the router maps by {how}: {ports}"
        self._journal.emit(
            "reach",
            kind,
            text,
            level=level,
            how=how,
            mappings=[[m.protocol, m.internal, m.host, m.external] for m in mapped],
        )
        self._on_change()

    def _lament(self) -> None:
        """All ways were tried in vain: say why; again only when it is for other reasons."""
        if self._wanted and not self.mappings and self.tried != self._lamented:
            self._lamented = self.tried
            why = "; ".join(f"{way}: {reason}" for way, reason in self.tried.items())
            self._journal.emit(
                "reach", "ports-not-mapped", f"no port is mapped: {why}", **self.tried
            )


async def _trouble(work: Coroutine[Any, Any, object]) -> str:
    """Text of the RouterFault that ``work`` raises; "" if it succeeds."""
    try:
        await work
    except RouterFault as e:
        return str(e)
    return ""
