"""Routers that speak UPnP: one that is whole, and several that are not."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import miniupnpc
import pytest

from node.reach import upnp
from node.reach.gateway import Gateway, Mapping, RouterFault
from node.reach.upnp import Upnp

HOME = Gateway("192.168.1.1", "192.168.1.9")
PORTS = (("tcp", 31337), ("udp", 31337), ("tcp", 31338))


class FakeIgd:
    """A router as the UPnP library shows it. `table`: (external port, "TCP") to (host, internal
    port, lease in s)."""

    def __init__(self) -> None:
        self.url = "http://192.168.1.1:5000/ctl/IPConn"
        self.address: str | None = "203.0.113.7"
        self.table: dict[tuple[int, str], tuple[str, int, int]] = {}
        self.permanent = False
        self.wrong: dict[str, str] = {}
        """Calls that fail, by name, with their error."""
        self.stuck = threading.Event()
        self.stuck.set()

    def _call(self, name: str) -> None:
        self.stuck.wait()
        if name in self.wrong:
            raise Exception(self.wrong[name])

    def discover(self) -> int:
        self._call("discover")
        return 1

    def selectigd(self) -> str:
        self._call("selectigd")
        return self.url

    def externalipaddress(self) -> str | None:
        self._call("externalipaddress")
        return self.address

    def addportmapping(self, external, protocol, host, internal, text, remote, lease, /) -> bool:
        self._call("addportmapping")
        if self.permanent and lease:
            raise Exception("OnlyPermanentLeasesSupported")
        if self.table.get((external, protocol), (host,))[0] != host:
            raise Exception("ConflictInMappingEntry")
        self.table[external, protocol] = host, internal, lease
        return True

    def getspecificportmapping(self, external, protocol, /) -> tuple[Any, ...] | None:
        self._call("getspecificportmapping")
        if (entry := self.table.get((external, protocol))) is None:
            return None
        return *entry[:2], "tutti", True, entry[2]

    def deleteportmapping(self, external, protocol, /) -> bool:
        self._call("deleteportmapping")
        if self.table.pop((external, protocol), None) is None:
            raise Exception("NoSuchEntryInArray")
        return True


@pytest.fixture
def igd() -> Iterator[FakeIgd]:
    made = FakeIgd()
    yield made
    made.stuck.set()


@pytest.fixture
def way(igd: FakeIgd) -> Upnp:
    return Upnp(HOME, lambda local: igd)


@pytest.fixture
async def found(way: Upnp) -> Upnp:
    """The UPnP transport after it found the router."""
    await way.probe()
    return way


def test_the_library_has_what_is_used_of_it() -> None:
    calls = [name for name in vars(FakeIgd) if not name.startswith("_")]
    assert len(calls) == 6
    assert all(callable(getattr(miniupnpc.UPnP, name)) for name in calls)


async def test_ports_are_mapped_checked_renewed_and_removed(found: Upnp, igd: FakeIgd) -> None:
    mapped, lease = await found.map(PORTS)
    assert mapped == tuple(Mapping(*p, "203.0.113.7", p[1], "UPnP") for p in PORTS)
    assert (lease, igd.table[31337, "UDP"]) == (3600, ("192.168.1.9", 31337, 3600))
    assert await found.check()
    assert await found.map(PORTS) == (mapped, 3600)
    await found.map(PORTS[:1])
    assert set(igd.table) == {(31337, "TCP")}
    await found.remove()
    assert igd.table == {}


async def test_a_router_that_forgot_or_moved_is_noticed(found: Upnp, igd: FakeIgd) -> None:
    await found.map(PORTS)
    igd.table.pop((31338, "TCP"))
    assert not await found.check()
    await found.map(PORTS)
    assert await found.check()
    igd.table[31338, "TCP"] = ("192.168.1.5", 31338, 0)
    assert not await found.check(), "it leads to another host"
    igd.table.clear()
    await found.map(PORTS)
    igd.address = "100.64.3.4"
    assert not await found.check()
    mapped, _ = await found.map(PORTS)
    assert {m.host for m in mapped} == {"100.64.3.4"}
    assert await found.check()


async def test_a_permanent_lease_is_taken_where_no_other_is_given(
    found: Upnp, igd: FakeIgd
) -> None:
    igd.permanent = True
    _, lease = await found.map(PORTS)
    assert (lease, {entry[2] for entry in igd.table.values()}) == (float("inf"), {0})


async def test_a_port_outside_that_is_taken(found: Upnp, igd: FakeIgd) -> None:
    igd.table[31337, "TCP"] = ("192.168.1.5", 31337, 0)
    mapped, _ = await found.map(PORTS)
    other = mapped[0].external
    assert other != 31337
    assert igd.table[other, "TCP"] == ("192.168.1.9", 31337, 3600)
    again, _ = await found.map(PORTS)
    assert again == mapped, "it keeps to the port it got"
    await found.remove()
    assert set(igd.table) == {(31337, "TCP")}, "that of the other host stays"


async def test_all_ports_outside_are_taken(found: Upnp, igd: FakeIgd) -> None:
    igd.wrong["addportmapping"] = "ConflictInMappingEntry"
    with pytest.raises(RouterFault, match="the router refuses: ConflictInMappingEntry"):
        await found.map(PORTS)
    assert not any(found.held.values())


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("wrong", {"discover": "Success"}, "no device answers the search"),
        ("wrong", {"selectigd": "No UPnP device discovered"}, "is a router"),
        ("wrong", {"externalipaddress": "Miniupnpc HTTP error"}, "does not answer HTTP"),
        ("wrong", {"externalipaddress": "Action Failed"}, "Action Failed"),
        *(
            ("address", address, "no address outside")
            for address in ("", None, "0.0.0.0", "example", "1.2.3.4.5", "::1", "\udcff")
        ),
        # Another device than the gateway.
        *(
            ("url", url, None)
            for url in ("http://192.168.1.66:5000/ctl", "", "nonsense", "http://[/ctl")
        ),
    ],
)
async def test_a_router_that_is_of_no_use(way: Upnp, igd: FakeIgd, field, value, says) -> None:
    setattr(igd, field, value)
    with pytest.raises(RouterFault, match=says):
        await way.probe()


async def test_a_mistake_of_our_own_is_not_taken_for_the_routers(way: Upnp, igd: FakeIgd) -> None:
    def mistake() -> int:
        raise TypeError("ours")

    igd.discover = mistake  # type: ignore[method-assign]
    with pytest.raises(TypeError, match="ours"):
        await way.probe()


async def test_mapping_before_a_router_was_found(way: Upnp) -> None:
    with pytest.raises(RouterFault, match="no router was found"):
        await way.map(PORTS)


# ------------------------------------------------------------ a router that never ends


def threads() -> int:
    return sum(t.name == "tutti-upnp" for t in threading.enumerate())


async def test_a_router_that_never_answers_holds_one_thread(
    way: Upnp,
    igd: FakeIgd,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = threads()
    monkeypatch.setattr(upnp, "PROBE_S", 0.05)
    igd.stuck.clear()
    for _ in range(3):
        with pytest.raises(RouterFault, match="does not finish"):
            await way.probe()
    async with asyncio.timeout(30):
        while threads() > before + 1:  # noqa: ASYNC110 - the end of a thread is no event
            await asyncio.sleep(0.01)
    igd.stuck.set()
    monkeypatch.setattr(upnp, "PROBE_S", 10.0)
    await way.probe()


async def test_what_may_have_been_mapped_is_removed(
    found: Upnp,
    igd: FakeIgd,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(upnp, "CALL_S", 0.05)
    monkeypatch.setattr("node.reach.gateway.REMOVE_S", 0.05)
    igd.stuck.clear()
    with pytest.raises(RouterFault, match="does not finish"):
        await found.map(PORTS[:1])
    igd.stuck.set()
    monkeypatch.setattr(upnp, "CALL_S", 10.0)
    monkeypatch.setattr("node.reach.gateway.REMOVE_S", 10.0)
    await found.remove()
    assert igd.table == {}


STUCK = """
import asyncio, threading, uvloop
from node.reach.gateway import Gateway
from node.reach.portmap import PortMapper
from node.reach.upnp import Upnp
from node.reach.natpmp import NatPmp, Pcp
from node.telemetry.events import Journal

inside = threading.Event()

class Igd:
    def discover(self):
        inside.set()
        threading.Event().wait()

async def main():
    here = Gateway("127.0.0.1", "127.0.0.1")
    ways = lambda g: (Pcp(g, bytes(12), 1), NatPmp(g, 1), Upnp(g, lambda local: Igd()))
    mapper = PortMapper(Journal(), lambda: None, look=lambda: here, ways=ways)
    mapper.want([("tcp", 31337)])
    await mapper.start()
    while not inside.is_set():
        await asyncio.sleep(0.01)
    await mapper.close()
    print("closed")

uvloop.run(main())
print("ended")
"""


def test_a_router_that_never_answers_does_not_keep_the_process() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STUCK], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.stdout, done.returncode) == ("closed\nended\n", 0), done.stderr
