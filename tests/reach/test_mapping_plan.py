"""The plan in virtual time, against a router that can be absent, restart, refuse and move."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import count, pairwise

import pytest

from node.reach.gateway import Gateway
from node.reach.mapping_plan import (
    NO_GATEWAY,
    SHORTEST_S,
    WAYS,
    Mapping,
    MappingPlan,
    Port,
    RouterAsk,
)

EVERY = 20.0
HOME = Gateway("192.168.1.1", "192.168.1.9")
CAFE = Gateway("10.0.0.1", "10.0.0.77")
PORTS: tuple[Port, ...] = (("tcp", 31337), ("udp", 31337), ("tcp", 31338))
SILENT = {"PCP": 3.75, "NAT-PMP": 3.75, "UPnP": 4.0}
QUICK = {"PCP": 0.01, "NAT-PMP": 0.01, "UPnP": 1.0}


@dataclass
class World:
    """A router in virtual time, and the service around the plan. ``at`` plans a change."""

    speaks: set[str] = field(default_factory=set)
    refuses: set[str] = field(default_factory=set)
    gateway: Gateway | None = HOME
    host: str = "203.0.113.7"
    lease: float = 3600.0

    def __post_init__(self) -> None:
        self.plan, self.now = MappingPlan(EVERY), 0.0
        self.table: dict[Port, float] = {}
        """What the router maps, and until when."""
        self.done: list[tuple[float, RouterAsk]] = []
        self.told: list[tuple[float, tuple[Mapping, ...]]] = []
        self._agenda: list[tuple[float, int, Callable[[World], object]]] = []
        self._order = count()

    def at(self, when: float, change: Callable[[World], object]) -> World:
        heapq.heappush(self._agenda, (when, next(self._order), change))
        return self

    def want(self, ports: tuple[Port, ...] = PORTS) -> World:
        self._do(self.plan.want(ports, self.now))
        return self

    def restart(self) -> None:
        self.table.clear()

    def run(self, until: float) -> World:
        while True:
            planned = self._agenda[0][0] if self._agenda else math.inf
            if (soonest := min(self.plan.due, planned)) > until:
                self.now = until
                return self
            self.now = max(self.now, soonest)
            if planned == soonest:
                heapq.heappop(self._agenda)[2](self)
            else:
                self._do(self.plan.look(self.gateway, self.now))

    def _do(self, asks: list[RouterAsk]) -> None:
        for ask in asks:
            self.done.append((self.now, ask))
            assert len(self.done) < 50_000, "it runs in circles"
            way = ask.way
            if ask.kind == "map":
                self._map(ask)
            elif way not in self.speaks:
                self._later(SILENT[way], ask, f"no {way}")
            elif ask.kind == "probe":
                self._later(QUICK[way], ask, None)
            else:
                held = {(m.protocol, m.internal) for m in self.plan.mappings}
                same = {m.host for m in self.plan.mappings} == {self.host}
                self._later(0.02, ask, same and held == set(self.table))
        if self.plan.mappings != (self.told[-1][1] if self.told else ()):
            self.told.append((self.now, self.plan.mappings))

    def _map(self, ask: RouterAsk) -> None:
        way, ports = ask.way, ask.ports
        if way in self.refuses or way not in self.speaks:
            self._later(0.02 if way in self.speaks else SILENT[way], ask, f"{way} refuses")
            return
        self.table = dict.fromkeys(ports, self.now + self.lease)
        made = tuple(Mapping(*p, self.host, p[1], way) for p in ports)
        self._later(0.02, ask, (made, self.lease if ports else math.inf))

    def _later(self, after: float, ask: RouterAsk, answer) -> None:
        self.at(self.now + after, lambda w: w._do(w.plan.answered(ask, answer, w.now)))

    # ----------------------------------------------------------- looking back

    @property
    def how(self) -> set[str]:
        return {m.how for m in self.plan.mappings}

    @property
    def mapped(self) -> set[Port]:
        return {(m.protocol, m.internal) for m in self.plan.mappings}

    def times(self, kind: str, way: str = "") -> list[float]:
        return [t for t, a in self.done if a.kind == kind and way in ("", a.way)]


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
    assert world.how == {used}
    assert world.mapped == set(PORTS)
    asked = [a.way for _, a in world.done if a.kind == "map"]
    assert asked == [used], "no other is asked to map"
    unused = f"the router answers, but {used} is used"
    said = {way: "" if way == used else unused if way in speaks else f"no {way}" for way in WAYS}
    assert world.plan.tried == said


def test_a_way_that_answers_and_refuses_is_passed_over() -> None:
    world = World({"PCP", "NAT-PMP", "UPnP"}, refuses={"PCP", "NAT-PMP"}).want().run(5)
    assert world.how == {"UPnP"}
    assert world.plan.tried == {"PCP": "PCP refuses", "NAT-PMP": "NAT-PMP refuses", "UPnP": ""}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("tenths", range(0, 450, 7))
def test_a_service_that_comes_up_later_is_found_within_25_s(way: str, tenths: int) -> None:
    up = tenths / 10
    world = World().want().at(up, lambda w: w.speaks.add(way)).run(up + 25)
    assert world.how == {way}


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
    assert world.plan.tried == {"PCP": "no PCP", "NAT-PMP": "no NAT-PMP", "UPnP": ""}


def test_a_renewal_that_is_refused_leads_to_another_way() -> None:
    world = World({"PCP", "NAT-PMP"}).want().run(1700)
    world.refuses.add("PCP")
    world.run(1900)
    assert world.how == {"NAT-PMP"}
    assert world.plan.tried["PCP"] == "PCP refuses"


def test_another_gateway() -> None:
    world = World({"PCP"}).want().run(30)
    world.gateway, world.host, world.speaks = CAFE, "198.51.100.1", {"UPnP"}
    world.run(41)
    assert world.told[-1] == (40, ()), "what the other router maps is of no use here"
    assert world.plan.tried == {}
    world.run(60)
    assert world.how == {"UPnP"}
    world.gateway = None
    world.run(100)
    assert world.told[-1][1] == ()
    assert world.plan.tried == dict.fromkeys(WAYS, NO_GATEWAY)


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
def test_no_ports_any_more(when: float, speaks: set[str]) -> None:
    world = World(speaks).want().at(when, lambda w: w.want(())).run(when + 10)
    assert world.plan.mappings == ()
    assert world.table == {}
    quiet = len(world.done)
    world.run(500)
    assert len(world.done) == quiet
    assert world.plan.due == math.inf
    world.want().run(520)
    assert world.mapped == (set(PORTS) if speaks else set())


# ------------------------------------------------------------ anything


def test_answers_from_before_are_ignored() -> None:
    world = World({"PCP"}).want().run(1)
    before = world.plan.mappings, dict(world.plan.tried)
    for kind, answer in (("map", "late"), ("map", ((), 60.0)), ("check", False), ("probe", None)):
        assert world.plan.answered(RouterAsk(kind, "UPnP", 0), answer, 1.0) == []
    assert (world.plan.mappings, world.plan.tried) == before


@pytest.mark.parametrize("seed", range(60))
def test_whatever_the_router_does(seed: int) -> None:
    """Faults for an hour, then peace: it never asks without end, and all is mapped in the end."""
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
        w.speaks, w.refuses, w.lease, w.gateway = {"UPnP", "NAT-PMP"}, set(), 3600.0, HOME

    world = World().want()
    for _ in range(120):
        world.at(dice.uniform(0, 3600), fault)
    world.at(3600, peace).run(3700)
    world.want(PORTS).run(3760)
    assert world.mapped == set(world.table) == set(PORTS)
    assert len(world.done) < 3760 / SHORTEST_S * 4
