"""Port mappings by UPnP IGD, through the library miniupnpc, which blocks.
Enters: ports to map, a router's answers over HTTP. Leaves: mappings, or a RouterFault.
Never: a wait without an end, a device that is not the default gateway."""

import asyncio
import contextlib
import math
import random
import threading
from collections.abc import Callable
from concurrent.futures import Future
from ipaddress import AddressValueError, IPv4Address
from typing import Any, TypeVar
from urllib.parse import urlsplit

import miniupnpc

from node.reach.gateway import LEASE_S, Gateway, GatewayProtocol, Mapping, Port, RouterFault

T = TypeVar("T")

DISCOVER_MS = 1000
"""Milliseconds for which the library waits for each of four kinds of device until one has answered:
1 s in all with a router, 4 s without. It takes less than a second for a second."""
PROBE_S = 10.0
CALL_S = 8.0
"""The library gives a connection 3 s and every single read 5 s, but has no bound for all reads."""
OTHER_PORTS = 4
_ONLY_PERMANENT = "OnlyPermanentLeasesSupported"  # the library's words for error 725
_TAKEN = ("ConflictInMappingEntry", "ConflictWithOtherMechanisms")  # 718 and 729
_PLAINLY = {
    "Success": "no device answers the search",
    "No UPnP device discovered": "no device that answers the search is a router",
    "Miniupnpc HTTP error": "the router does not answer HTTP requests",
}


Igd = Any
"""A ``miniupnpc.UPnP``, which has no types. Its calls block, and raise Exception itself."""


def _igd(local: str) -> Igd:
    return miniupnpc.UPnP(multicastif=local, discoverdelay=DISCOVER_MS)


class _Said(RouterFault):
    """An error that the library reports, with the router's reason."""


class Upnp(GatewayProtocol):
    """Mappings by UPnP IGD."""

    name = "UPnP"

    def __init__(self, gateway: Gateway, make: Callable[[str], Igd] = _igd) -> None:
        super().__init__(gateway)
        self._make = make
        self._turn = threading.Lock()
        """Held while a call runs: one at a time."""
        self._device: Igd | None = None
        self._host = ""
        self._permanent = False

    async def probe(self) -> None:
        # A new device every time: after a restart the router may listen on another port.
        device = self._make(self.gateway.local)
        await self._run(device.discover, PROBE_S)
        self._host = await self._run(lambda: self._select(device), PROBE_S)
        self._device = device

    async def check(self) -> bool:
        device = self._found()
        held = [mapping for mapping in self.held.values() if mapping]

        def look() -> tuple[str, bool]:
            return self._outside(device), all(self._has(device, mapping) for mapping in held)

        before = self._host
        self._host, there = await self._run(look, CALL_S)
        return there and before == self._host

    def _found(self) -> Igd:
        if self._device is None:
            raise RouterFault("no router was found by UPnP")
        return self._device

    async def _ask(self, port: Port) -> tuple[Mapping, float]:
        before = self.held.get(port)
        external = port[1]
        if before:
            external = before.external
        tries = OTHER_PORTS
        while True:
            mapping = Mapping(*port, self._host, external, self.name)
            self.held[port] = mapping  # it may be made although the answer comes too late
            lease = LEASE_S
            if self._permanent:
                lease = 0
            try:
                await self._run(lambda m=mapping, s=lease: self._add(m, s), CALL_S)
            except _Said as e:
                taken = str(e) in _TAKEN
                if taken:
                    self.held[port] = None  # it is another host's, and not to be deleted
                if str(e) == _ONLY_PERMANENT and not self._permanent:
                    self._permanent = True
                elif taken and tries:
                    external = random.randrange(20_000, 60_000)
                    tries = tries - 1
                else:
                    raise RouterFault(f"the router refuses: {e}") from e
            else:
                return mapping, float(lease) or math.inf

    async def _delete(self, port: Port) -> None:
        if mapping := self.held.get(port):
            device = self._found()
            protocol = port[0].upper()
            await self._run(lambda: device.deleteportmapping(mapping.external, protocol), CALL_S)

    async def _run(self, call: Callable[[], T], within_s: float) -> T:
        """Make a call that blocks, on a thread of its own; unlike asyncio.to_thread's, the process
        ends without it. Raises what ``call`` raises; RouterFault after ``within_s``, when a call
        under way runs on."""
        future: Future[T] = Future()
        threading.Thread(
            target=self._work, args=(future, call, within_s), name="tutti-upnp", daemon=True
        ).start()
        try:
            async with asyncio.timeout(within_s):
                return await asyncio.wrap_future(future)
        except TimeoutError:
            raise RouterFault("the router does not finish its answers") from None

    # ----------------------------------------------------------- in the thread

    def _work(self, future: Future[T], call: Callable[[], T], within_s: float) -> None:
        # By then the caller has given up, and threads must not pile up behind a call that hangs.
        if self._turn.acquire(timeout=within_s):
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as e:  # noqa: BLE001 - the waiter gets it
                    # The library raises Exception itself; ValueError: a router's text is not UTF-8,
                    # or no URL.
                    theirs = type(e) is Exception or isinstance(e, ValueError)
                    said = _PLAINLY.get(str(e), str(e))
                    future.set_exception(_Said(said) if theirs else e)
            self._turn.release()

    def _select(self, device: Igd) -> str:
        where = urlsplit(device.selectigd()).hostname
        if where != self.gateway.address:
            raise RouterFault(f"the device that answers is {where}, not the gateway")
        return self._outside(device)

    def _outside(self, device: Igd) -> str:
        with contextlib.suppress(AddressValueError):
            host = IPv4Address(device.externalipaddress() or "")
            if not host.is_unspecified:
                return str(host)
        raise RouterFault("the router has no address outside")

    def _has(self, device: Igd, mapping: Mapping) -> bool:
        entry = device.getspecificportmapping(mapping.external, mapping.protocol.upper())
        return entry is not None and tuple(entry[:2]) == (self.gateway.local, mapping.internal)

    def _add(self, mapping: Mapping, lease: int) -> None:
        self._found().addportmapping(
            mapping.external,
            mapping.protocol.upper(),
            self.gateway.local,
            mapping.internal,
            "tutti",
            "",
            lease,
        )
