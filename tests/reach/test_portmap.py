"""The service, with routers on loopback."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from node.reach import natpmp
from node.reach.gateway import Gateway, GatewayProtocol, Mapping, RouterFault
from node.reach.natpmp import NatPmp, Pcp
from node.reach.portmap import NO_GATEWAY, WAYS, PortMapper
from node.telemetry.events import Journal
from testbed.fakes.routers import FakeRouter

HERE = Gateway("127.0.0.1", "127.0.0.1")
PORTS = (("tcp", 31337), ("udp", 31337), ("tcp", 31338))
PATIENT = (0.05, 0.1, 10.0)
"""Waits in s for a router that answers, however busy this machine is."""
HASTY = (0.05, 0.1)
"""Waits in s for a router that does not answer."""


class NoUpnp(NatPmp):
    name = "UPnP"

    async def probe(self) -> None:
        raise RouterFault("no device answers the search")


class Rig:
    """A mapper behind ``router``; :meth:`until` waits for something to be true after a change."""

    def __init__(self, router: FakeRouter, every_s: float = 0.05, **options) -> None:
        self.router = router
        self.gateway = HERE
        self.journal = Journal()
        self.errors = []
        self.changes = 0
        self._changed = asyncio.Event()
        self.mapper = PortMapper(
            self.journal,
            self._on_change,
            lambda name, error: self.errors.append((name, error)),
            every_s=every_s,
            look=lambda: self.gateway,
            ways=self._ways,
            **options,
        )

    async def mapped(self) -> tuple[Mapping, ...]:
        """Start with PORTS wanted and return the mappings made."""
        self.mapper.want(PORTS)
        await self.mapper.start()
        return await self.change()

    def _ways(self, gateway: Gateway) -> tuple[GatewayProtocol, ...]:
        port = self.router.port
        return Pcp(gateway, self.mapper._nonce, port), NatPmp(gateway, port), NoUpnp(gateway)

    def _on_change(self) -> None:
        self.changes += 1
        self._changed.set()

    async def until(self, true: Callable[[], object]) -> None:
        async with asyncio.timeout(30):
            while not true():  # noqa: ASYNC110 - the condition has no event
                await asyncio.sleep(0.01)

    async def change(self) -> tuple[Mapping, ...]:
        async with asyncio.timeout(30):
            await self._changed.wait()
        self._changed.clear()
        return self.mapper.mappings


@pytest.fixture
async def router(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeRouter]:
    monkeypatch.setattr(natpmp, "WAITS_S", PATIENT)
    made = await FakeRouter("pcp", "natpmp").start()
    yield made
    made.close()


@pytest.fixture
async def rig(router: FakeRouter) -> AsyncIterator[Rig]:
    made = Rig(router)
    yield made
    await made.mapper.close()
    assert made.errors == []


async def test_ports_are_mapped_at_start_and_removed_at_close(rig: Rig, router: FakeRouter) -> None:
    rig.mapper.want(PORTS)
    assert (rig.mapper.mappings, rig.mapper.tried) == ((), {})
    await rig.mapper.start()
    assert await rig.change() == tuple(Mapping(*p, "203.0.113.7", p[1], "PCP") for p in PORTS)
    await rig.until(lambda: len(rig.mapper.tried) == 3)
    assert rig.mapper.tried == {
        "PCP": "",
        "NAT-PMP": "the router answers, but PCP is used",
        "UPnP": "no device answers the search",
    }
    assert set(router.table) == set(PORTS)
    event = next(e for e in rig.journal.recent() if e.kind == "ports-mapped")
    assert (event.component, event.fields["how"]) == ("reach", "PCP")
    assert "tcp 31338 at 203.0.113.7:31338" in event.text
    await rig.mapper.close()
    assert (rig.mapper.mappings, router.table) == ((), {})
    assert rig.changes == 1
    await rig.mapper.close()


async def test_a_service_that_comes_up_later(
    rig: Rig,
    router: FakeRouter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(natpmp, "WAITS_S", HASTY)
    router.speaks = set()
    rig.mapper.want(PORTS)
    await rig.mapper.start()
    await rig.until(lambda: len(rig.mapper.tried) == 3)
    assert rig.mapper.tried["PCP"] == f"the router does not answer on port {router.port}"
    tries = len(router.heard)
    await rig.until(lambda: len(router.heard) > 3 * tries)
    laments = [e for e in rig.journal.recent() if e.kind == "ports-not-mapped"]
    assert len(laments) == 1, "said once, not every 20 s"
    assert "UPnP: no device answers the search" in laments[0].text
    monkeypatch.setattr(natpmp, "WAITS_S", PATIENT)
    router.speaks = {"pcp"}
    assert {m.how for m in await rig.change()} == {"PCP"}


async def test_a_router_that_moves_and_is_gone_and_back(
    rig: Rig,
    router: FakeRouter,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    await rig.mapped()
    router.address = "100.64.3.4"
    assert {m.host for m in await rig.change()} == {"100.64.3.4"}
    monkeypatch.setattr(natpmp, "WAITS_S", HASTY)
    router.lose = 1 << 30
    assert await rig.change() == ()
    assert "ports-unmapped" in [e.kind for e in rig.journal.recent()]
    monkeypatch.setattr(natpmp, "WAITS_S", PATIENT)
    router.lose = 0
    router.address = "198.51.100.1"
    assert {m.host for m in await rig.change()} == {"198.51.100.1"}


async def test_mappings_follow_the_wanted_ports(rig: Rig, router: FakeRouter) -> None:
    await rig.mapper.start()
    assert router.heard == []
    rig.mapper.want(PORTS)
    await rig.change()
    rig.mapper.want([*PORTS[:1], ("tcp", 4000), ("tcp", 4000)])
    assert [m.internal for m in await rig.change()] == [31337, 4000]
    assert set(router.table) == {("tcp", 31337), ("tcp", 4000)}
    rig.mapper.want([])
    assert await rig.change() == ()
    assert router.table == {}


async def test_mappings_end_and_return_with_the_gateway(rig: Rig, router: FakeRouter) -> None:
    await rig.mapped()
    rig.gateway = None
    assert await rig.change() == ()
    assert rig.mapper.tried == dict.fromkeys(WAYS, NO_GATEWAY)
    rig.gateway = HERE
    assert len(await rig.change()) == 3


async def test_a_process_that_was_killed_maps_again_by_its_secret(router: FakeRouter) -> None:
    router.speaks = {"pcp"}
    for secret, works in ((b"mine", True), (b"mine", True), (b"another", False), (b"", False)):
        rig = Rig(router, every_s=1000.0, secret=secret)
        rig.mapper.want(PORTS)
        await rig.mapper.start()
        await rig.until(lambda r=rig: len(r.mapper.tried) == 3)
        assert bool(rig.mapper.mappings) is works, rig.mapper.tried
        rig.mapper._ways = ()  # nothing is removed: it is killed
        await rig.mapper.close()


def test_without_a_secret_the_nonce_is_new_every_time() -> None:
    assert len({PortMapper(Journal(), lambda: None)._nonce for _ in range(9)}) == 9
