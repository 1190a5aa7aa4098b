"""The mapper in virtual time, against a router that can be absent, restart, refuse and move."""

import asyncio
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from node.reach.gateway import Gateway, Granted, Port, RouterFault
from node.reach.portmap import NO_GATEWAY, SHORTEST_S, WAYS, Mapping, PortMapper
from node.telemetry.events import Journal

EVERY = 20.0
HOME = Gateway("192.168.1.1", "192.168.1.9")
CAFE = Gateway("10.0.0.1", "10.0.0.77")
PORTS: tuple[Port, ...] = (("tcp", 31337), ("udp", 31337), ("tcp", 31338))
SILENT = {"PCP": 3.75, "NAT-PMP": 3.75, "UPnP": 4.0}
QUICK = {"PCP": 0.01, "NAT-PMP": 0.01, "UPnP": 1.0}


class Virtual(asyncio.SelectorEventLoop):
    """Event loop in virtual time, which jumps to the next timer."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self._look = self._selector.select
        self._selector.select = self._jump

    def time(self) -> float:
        return self.now

    def _jump(self, wait: float):
        if wait:
            self.now = max(self.now, self._scheduled[0]._when)
        return self._look(0)


class Way:
    def __init__(self, world: "World", name: str) -> None:
        self.world = world
        self.name = name

    async def probe(self) -> None:
        await self._answer("probe", QUICK[self.name])

    async def check(self) -> bool:
        await self._answer("check", 0.02)
        w = self.world
        return {m.host for m in w.mapper.mappings} == {w.host} and w.mapped == set(w.table)

    async def map(self, ports) -> Granted:
        w = self.world
        refused = self.name in self.world.refuses
        if self.name in w.speaks and not refused:
            w.table = dict.fromkeys(ports, w.loop.now + w.lease)
        made = tuple(Mapping(*p, w.host, p[1], self.name) for p in ports)
        await self._answer("map", 0.02)
        if refused:
            raise RouterFault(f"{self.name} refuses")
        return made, w.lease if ports else math.inf

    async def _answer(self, kind: str, after: float) -> None:
        w = self.world
        name = self.name
        speaks = name in w.speaks
        w.done.append((w.loop.now, kind, name))
        assert len(w.done) < 50_000, "it runs in circles"
        await asyncio.sleep(after if speaks else SILENT[name])
        if not speaks:
            raise RouterFault(f"no {name}")

    def close(self) -> None:
        pass


@dataclass
class World:
    """A router in virtual time, and the mapper. ``at`` plans a change."""

    speaks: set[str] = field(default_factory=set)
    refuses: set[str] = field(default_factory=set)
    gateway: Gateway | None = HOME
    host: str = "203.0.113.7"
    lease: float = 3600.0

    def __post_init__(self) -> None:
        self.loop = Virtual()
        self.errors = []
        self.planned = 0
        self.mapper = PortMapper(
            Journal(),
            lambda: self.told.append((self.loop.now, self.mapper.mappings)),
            lambda *error: self.errors.append(error),
            every_s=EVERY,
            look=lambda: self.gateway,
            ways=lambda _: [Way(self, name) for name in WAYS],
        )
        self.table: dict[Port, float] = {}
        """Mappings of the router: port to the time of expiry."""
        self.done: list[tuple[float, str, str]] = []
        self.told: list[tuple[float, tuple[Mapping, ...]]] = []
        self.loop.run_until_complete(self.mapper.start())
        worlds.append(self)

    def at(self, when: float, change: "Callable[[World], object]") -> "World":
        # The loop may call the later of two changes at one time first.
        self.planned += 1
        self.loop.call_at(when + 1e-9 * self.planned, change, self)
        return self

    def want(self, ports: tuple[Port, ...] = PORTS) -> "World":
        self.mapper.want(ports)
        return self

    def restart(self) -> None:
        self.table.clear()

    def run(self, until: float) -> "World":
        self.loop.run_until_complete(asyncio.sleep(until - self.loop.now))
        assert self.errors == []
        return self

    # ----------------------------------------------------------- looking back

    @property
    def how(self) -> set[str]:
        return {m.how for m in self.mapper.mappings}

    @property
    def mapped(self) -> set[Port]:
        return {(m.protocol, m.internal) for m in self.mapper.mappings}

    def times(self, kind: str, way: str = "") -> list[float]:
        return [t for t, what, by in self.done if what == kind and way in ("", by)]


worlds: list[World] = []


@pytest.fixture(autouse=True)
def _end() -> Iterator[None]:
    yield
    while worlds:
        world = worlds.pop()
        world.loop.run_until_complete(world.mapper._tasks.close())
        world.loop.close()


@pytest.mark.parametrize(
    ("speaks", "used"),
    [
        ({"PCP", "NAT-PMP", "UPnP"}, "PCP"),
        ({"NAT-PMP", "UPnP"}, "NAT-PMP"),
        ({"PCP", "UPnP"}, "PCP"),
        ({"UPnP"}, "UPnP"),
    ],
)
def test_the_preferred_way_that_works_is_used(speaks: set[str], used: str) -> None:
    world = World(speaks).want().run(15)
    assert (world.how, world.mapped) == ({used}, set(PORTS))
    assert [way for _, kind, way in world.done if kind == "map"] == [used], (
        "no other is asked to map"
    )
    unused = f"the router answers, but {used} is used"
    said = {way: "" if way == used else unused if way in speaks else f"no {way}" for way in WAYS}
    assert world.mapper.tried == said


def test_a_way_that_answers_and_refuses_is_passed_over() -> None:
    world = World({"PCP", "NAT-PMP", "UPnP"}, refuses={"PCP", "NAT-PMP"}).want().run(5)
    assert world.how == {"UPnP"}
    assert world.mapper.tried == {"PCP": "PCP refuses", "NAT-PMP": "NAT-PMP refuses", "UPnP": ""}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tenths", range(0, 450, 7))
def test_a_service_that_comes_up_later_is_found_within_25_s(way: str, tenths: int) -> None:
    up = tenths / 10
    assert World().want().at(up, lambda w: w.speaks.add(way)).run(up + 25).how == {way}


# ------------------------------------------------------------ while mapped


@pytest.mark.parametrize(
    ("lease", "within", "late"),
    [(3600.0, 3 * 3600, EVERY + 1), (16.0, 600, 0.1)],
    ids=["long", "shorter than the checks"],
)
def test_renewals_come_at_half_of_the_lease(lease: float, within: float, late: float) -> None:
    world = World({"PCP"}, lease=lease).want().run(within)
    maps = world.times("map")
    assert all(lease / 2 <= b - a <= lease / 2 + late for a, b in pairwise(maps))
    assert len(maps) >= 6
    assert len(world.told) == 1, "renewing is nobody's business"


@pytest.mark.parametrize("lease", [0.0, 0.001, 1.0])
def test_absurd_leases_do_not_keep_us_busy(lease: float) -> None:
    world = World({"PCP"}, lease=lease).want().run(600)
    assert all(b - a >= SHORTEST_S for a, b in pairwise(world.times("map")))


def test_a_permanent_lease_is_checked_and_not_renewed() -> None:
    world = World({"UPnP"}, lease=math.inf).want().run(4 * 3600)
    assert len(world.times("map")) == 1
    assert len(world.times("check")) == pytest.approx(4 * 3600 / EVERY, abs=3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("down", [0.0, 1.0, 30.0, 90.0])
@pytest.mark.parametrize("when", [5.0, 21.0, 27.3, 33.9, 39.99])
def test_a_router_that_restarts_is_mapped_again_in_time(way: str, down: float, when: float) -> None:
    def off(w: World) -> None:
        w.restart()
        w.speaks.clear()

    world = World({way}).want().at(when, off)
    world.at(when + down, lambda w: w.speaks.add(way)).run(when + down + 60)
    assert set(world.table) == world.mapped == set(PORTS)
    assert world.how == {way}


@pytest.mark.parametrize(
    ("lease", "silent", "until", "asked"),
    [(3600.0, (19, 22), 60, ("probe", 2)), (16.0, (7.5, 9), 14, ("map", 3))],
    ids=["at a check", "at a renewal"],
)
def test_a_router_silent_for_a_moment_is_not_reported(lease, silent, until, asked) -> None:
    world = World({"PCP"}, lease=lease).want().at(silent[0], lambda w: w.speaks.clear())
    world.at(silent[1], lambda w: w.speaks.add("PCP")).run(until)
    assert len(world.told) == 1
    assert world.how == {"PCP"}
    assert len(world.times(asked[0], "PCP")) == asked[1], "it was noticed, though"


def test_another_way_takes_over() -> None:
    world = World({"PCP", "UPnP"}).want().run(18)
    world.at(19, lambda w: w.speaks.discard("PCP")).run(79)
    assert world.how == {"UPnP"}
    assert len(world.told) == 2, "never without a mapping"
    assert world.mapper.tried == {"PCP": "no PCP", "NAT-PMP": "no NAT-PMP", "UPnP": ""}


def test_a_renewal_that_is_refused_leads_to_another_way() -> None:
    world = World({"PCP", "NAT-PMP"}).want().run(1700)
    world.refuses.add("PCP")
    world.run(1900)
    assert world.how == {"NAT-PMP"}
    assert world.mapper.tried["PCP"] == "PCP refuses"


def test_mappings_of_a_gateway_end_when_another_one_takes_over() -> None:
    world = World({"PCP"}).want().run(30)
    world.gateway = CAFE
    world.host = "198.51.100.1"
    world.speaks = {"UPnP"}
    world.run(41)
    assert world.told[-1] == (40, ()), "what the other router maps is of no use here"
    assert world.mapper.tried == {}
    world.run(60)
    assert world.how == {"UPnP"}
    world.gateway = None
    world.run(100)
    assert world.told[-1][1] == ()
    assert world.mapper.tried == dict.fromkeys(WAYS, NO_GATEWAY)


def test_this_host_has_another_address() -> None:
    world = World({"PCP"}).want().run(30)
    world.gateway = Gateway(HOME.address, "192.168.1.10")
    world.run(42)
    assert [m != () for _, m in world.told] == [True, False, True]


# ------------------------------------------------------------ other ports


def test_other_ports_while_nothing_maps_are_tried_at_once() -> None:
    world = World(set()).want().run(10)
    world.want(PORTS[:1]).run(19)
    assert world.times("probe", "PCP") == [0, 10]
    world.want(PORTS[:1]).run(19.5)
    assert world.times("probe", "PCP") == [0, 10], "the same ports are no news"


@pytest.mark.parametrize("when", [0.005, 0.015, 2.0, 20.01])
@pytest.mark.parametrize("speaks", [{"PCP"}, {"UPnP"}, set()])
def test_mappings_are_removed_when_no_ports_are_wanted(when: float, speaks: set[str]) -> None:
    world = World(speaks).want().at(when, lambda w: w.want(())).run(when + 10)
    assert (world.mapper.mappings, world.table) == ((), {})
    quiet = len(world.done)
    world.run(500)
    assert len(world.done) == quiet
    world.want().run(520)
    assert world.mapped == (set(PORTS) if speaks else set())


# ------------------------------------------------------------ anything


@pytest.mark.parametrize("seed", range(60))
def test_all_ports_are_mapped_after_an_hour_of_faults(seed: int) -> None:
    """After an hour of faults comes peace: requests end, and finally all ports are mapped."""
    dice = random.Random(seed)

    def fault(w: World) -> None:
        w.speaks = {way for way in WAYS if dice.random() < 0.5}
        w.refuses = {way for way in WAYS if dice.random() < 0.3}
        w.lease = dice.choice([0.0, 1.0, 30.0, 3600.0, math.inf])
        w.host = dice.choice(["203.0.113.7", "100.64.3.4"])
        if dice.random() < 0.2:
            w.gateway = dice.choice([None, HOME, CAFE])
        if dice.random() < 0.3:
            w.restart()
        if dice.random() < 0.2:
            w.want(tuple(dice.sample(PORTS, dice.randrange(4))))

    def peace(w: World) -> None:
        w.speaks = {"UPnP", "NAT-PMP"}
        w.refuses = set()
        w.lease = 3600.0
        w.gateway = HOME

    world = World().want()
    for _ in range(120):
        world.at(dice.uniform(0, 3600), fault)
    world.at(3600, peace).run(3700)
    world.want(PORTS).run(3760)
    assert world.mapped == set(world.table) == set(PORTS)
    assert len(world.done) < 3760 / SHORTEST_S * 4
