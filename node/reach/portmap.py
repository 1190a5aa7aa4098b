"""Keeps ports of this host mapped in the router, by PCP, NAT-PMP or UPnP, whichever works.
Enters: the ports wanted. Leaves: the mappings in force, and why each way does not work.
Never: a decision when to ask (mapping_plan.py), a judgement if an address can be reached."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import secrets
import time
from collections.abc import Callable, Sequence

from node.core.tasks import Tasks, together
from node.reach.gateway import Gateway, find_gateway
from node.reach.mapping_plan import Mapping, MappingPlan, Port, RouterAsk
from node.reach.natpmp import NatPmp, Pcp
from node.reach.upnp import Upnp
from node.reach.way import GatewayProtocol, RouterFault
from node.telemetry.events import Journal

__all__ = ["Mapping", "PortMapper"]

LEASE_S = 3600.0
"""Seconds that the router is asked to map ports for."""


class PortMapper:
    """The service. ``on_change()`` is called in the event loop when :attr:`mappings` became others.

    ``every_s``: seconds between tries while nothing is mapped, and between checks of what is.
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
        self._journal, self._on_change = journal, on_change
        self._every_s, self._look, self._make = every_s, look, ways or self._usual
        seed = b"tutti pcp" + (secret or secrets.token_bytes(32))
        self._nonce = hashlib.sha256(seed).digest()[:12]
        self._plan = MappingPlan(every_s)
        self._known: tuple[Mapping, ...] = ()
        self._tasks = Tasks("portmap", on_error)
        self._wake = asyncio.Event()
        self._gateway: Gateway | None = None
        self._ways: dict[str, GatewayProtocol] = {}
        self._lamented: dict[str, str] = {}

    @property
    def mappings(self) -> tuple[Mapping, ...]:
        """What is mapped now; empty before :meth:`start` and after :meth:`close`."""
        return self._plan.mappings

    @property
    def tried(self) -> dict[str, str]:
        """Every way that was tried: "" if it is used, else the reason it is not, a sentence."""
        return dict(self._plan.tried)

    def want(self, ports: Sequence[Port]) -> None:
        """Map these from now on and no others. Returns at once. Raises ValueError for no port."""
        for protocol, port in ports:
            if protocol not in ("tcp", "udp") or not 0 < port < 1 << 16:
                raise ValueError(f"{protocol} {port} is no port")
        self._carry_out(self._plan.want(tuple(dict.fromkeys(ports)), time.monotonic()))

    async def start(self) -> None:
        """Begin; returns at once."""
        self._tasks.spawn(self._run(), "run", eternal=True)

    async def close(self) -> None:
        """Stop and remove what was mapped, in 2 s at most. Safe to call twice."""
        self._plan = MappingPlan(self._every_s)
        await self._tasks.close()
        await together(*(way.remove() for way in self._ways.values()))
        self._leave()

    def _usual(self, gateway: Gateway) -> Sequence[GatewayProtocol]:
        return Pcp(gateway, self._nonce), NatPmp(gateway), Upnp(gateway)

    async def _run(self) -> None:
        while True:
            self._wake.clear()
            wait_s = self._plan.due - time.monotonic()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s if wait_s < math.inf else None):
                    await self._wake.wait()
            if time.monotonic() >= self._plan.due:
                self._carry_out(self._plan.look(self._seen(), time.monotonic()))

    def _carry_out(self, asks: Sequence[RouterAsk]) -> None:
        for ask in asks:
            self._tasks.spawn(self._ask(ask, self._ways[ask.way]), f"{ask.kind}-{ask.way}")
        if self._plan.mappings != self._known:
            self._known = self._plan.mappings
            self._told()
        self._lament()
        self._wake.set()

    def _seen(self) -> Gateway | None:
        gateway = self._look()
        if gateway != self._gateway:
            self._leave()
            self._gateway = gateway
            self._ways = {way.name: way for way in self._make(gateway)} if gateway else {}
        return gateway

    def _leave(self) -> None:
        for way in self._ways.values():
            way.close()
        self._ways, self._gateway = {}, None

    async def _ask(self, ask: RouterAsk, way: GatewayProtocol) -> None:
        answer = None
        try:
            match ask.kind:
                case "probe":
                    await way.probe()
                case "map":
                    answer = await way.map(ask.ports, LEASE_S)
                case "check":
                    answer = await way.check()
        except RouterFault as e:
            answer = str(e)
        self._carry_out(self._plan.answered(ask, answer, time.monotonic()))

    def _told(self) -> None:
        mapped = self._plan.mappings
        text = ", ".join(f"{m.protocol} {m.internal} at {m.host}:{m.external}" for m in mapped)
        how = mapped[0].how if mapped else ""
        self._journal.emit(
            "reach",
            "ports-mapped" if mapped else "ports-unmapped",
            f"the router maps by {how}: {text}" if mapped else "the router maps no port any more",
            level="info" if mapped else "warning",
            how=how,
            mappings=[[m.protocol, m.internal, m.host, m.external] for m in mapped],
        )
        self._on_change()

    def _lament(self) -> None:
        """Once all ways were tried in vain, say why; again only when it is for other reasons."""
        tried = self.tried
        idle = self._plan.due < math.inf
        if self._plan.mappings or not idle or not tried or tried == self._lamented:
            return
        self._lamented = tried
        why = "; ".join(f"{way}: {reason}" for way, reason in tried.items())
        self._journal.emit("reach", "ports-not-mapped", f"no port is mapped: {why}", **tried)
