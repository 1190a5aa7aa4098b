"""Census: cells learn their number without reading every record, and a joiner finds the cell that
needs it."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from node.app.peer import cells_in_sight
from node.core.errors import WireError
from node.core.ids import CellId, PeerId, first_cell
from node.core.journey import Version
from node.dht.record import PeerBody
from node.dht.settings import DirectorySettings
from node.dht.topics import PREFIXES, REGIONS, WRITERS, cell_topic, cells_topic, prefix_of
from node.outer import census
from node.outer.census import (
    CellRecord,
    Counts,
    cells_in,
    counts_in,
    pack_count,
    pack_region,
    region_in,
)
from node.outer.register import LIVES, REFRESH_S, CellReader, CellRegister
from node.scheduler.cells import choose_cell
from node.sim.process import SimClock
from node.sim.setup import LinkProfile
from node.sim.world.directory import SimDht, SimDirectory
from node.sim.world.loop import ProcessLoop, VirtualTime, quiet
from node.sim.world.network import SimLinks
from testbed.fakes.memory_directory import SEAL
from testbed.planning.meetings import cell_id, standings

FIRST = first_cell("ab" * 32)


def record(cell: CellId, *replicas: int, works: bool = True, counts: Any = ()) -> CellRecord:
    return CellRecord(cell, Version(3, "ab" * 16), replicas or (1, 1, 1), works, 10.0, counts)


@dataclass
class World:
    """A directory in virtual time, and the leaders of some cells."""

    time: VirtualTime = field(default_factory=lambda: VirtualTime(0))
    registers: dict[CellId, CellRegister] = field(default_factory=dict)
    loops: dict[CellId, ProcessLoop] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = SimClock(self.time)
        links = SimLinks(self.time.rng, LinkProfile())
        self.dht = SimDht(links, DirectorySettings(), 1.0, self.clock.now)

    def directory(self, name: str) -> SimDirectory:
        return SimDirectory(self.dht, PeerId(name), self.clock)

    def lead(self, cell: CellId, replicas: tuple[int, ...] = (1, 1, 1)) -> None:
        """A leader posts and reads from now on; so do the peers of its cell."""
        self.loops[cell] = loop = ProcessLoop(self.time)
        self.registers[cell] = register = CellRegister(
            PeerId(f"leader-{cell}"),
            self.directory(f"leader-{cell}"),
            self.clock,
            lambda: record(cell, *replicas),
            lambda: cell,
            1.0,
        )
        self.time.push(0.0, lambda: loop.create_task(register.keep()), loop=loop)

    def leave(self, cell: CellId) -> None:
        self.registers.pop(cell)
        self.loops.pop(cell).kill()

    def reads(self, cell: CellId) -> int:
        return sum(n for (p, _), n in self.dht.reads.items() if p == f"leader-{cell}")

    def do(self, coro: Any) -> Any:
        """Run the coroutine at this time and return its result."""
        loop = ProcessLoop(self.time)
        done: list[Any] = []

        async def run() -> None:
            done.append(await coro)

        self.time.push(0.0, lambda: loop.create_task(run()), loop=loop)
        self.time.run(self.time.now + 5.0)
        return done[0]


@pytest.fixture
def world() -> Any:
    with quiet():
        yield World()


@pytest.mark.parametrize("count", [1, 2, 65, 1000])
def test_numbers_are_all_different_and_leave_no_hole(count: int) -> None:
    found = standings([cell_id(0, n) for n in range(count)])
    assert sorted(number for number, _ in found.values()) == list(range(count))
    assert {cells for _, cells in found.values()} == {count}


def test_a_number_is_in_range_whatever_the_counts_say() -> None:
    near = [cell_id(0, n) for n in range(9)]
    me = cell_id(0, 4)
    for told in ((), (0,) * PREFIXES, (census.MOST,) * PREFIXES, (1,) + (0,) * (PREFIXES - 1)):
        number, cells = census.standing(me, near, told)
        assert 0 <= number < cells


def test_leaders_that_read_a_few_prefixes_know_their_numbers(world: World) -> None:
    cells = [cell_id(1, n) for n in range(40)]
    for cell in cells:
        world.lead(cell)
    world.time.run(4 * REFRESH_S)
    expected = standings(cells)
    assert {c: r.standing() for c, r in world.registers.items()} == expected
    before = {cell: world.reads(cell) for cell in cells}
    world.time.run(14 * REFRESH_S)
    read = [world.reads(cell) - before[cell] for cell in cells]
    assert max(read) <= 14 * 3, "its prefix, its region, all regions, and now and then two more"
    mates = [c for c in cells if prefix_of(c) == prefix_of(cells[0])]
    for cell in cells[1:]:
        assert set(world.registers[cell].seen) <= set(cells) - {cell}
    assert set(world.registers[cells[0]].seen) >= set(mates) - {cells[0]}


def test_a_cell_that_is_gone_is_no_longer_counted(world: World) -> None:
    cells = [cell_id(2, n) for n in range(12)]
    for cell in cells:
        world.lead(cell)
    world.time.run(4 * REFRESH_S)
    world.leave(cells.pop(3))
    world.time.run((4 + LIVES + 4) * REFRESH_S)
    assert {c: r.standing() for c, r in world.registers.items()} == standings(cells)


def test_two_cells_of_a_prefix_tell_its_counts(world: World) -> None:
    prefix = prefix_of(cell_id(6, 0))
    mates = sorted(c for n in range(2000) if prefix_of(c := cell_id(6, n)) == prefix)[:5]
    for cell in mates:
        world.lead(cell)

    def telling() -> set[CellId]:
        there = world.do(CellReader(world.directory("reader")).prefix(prefix))
        return {cell for cell, said in there.items() if said.counts}

    world.time.run(6 * REFRESH_S)
    assert telling() == set(mates[:2])
    assert {r.told[prefix] for r in world.registers.values()} == {5}
    world.leave(mates[0])
    for _ in range(2 * LIVES):
        world.time.run(world.time.now + REFRESH_S)
        assert all(r.told for r in world.registers.values()), "the second's are there at once"
    assert telling() == set(mates[1:3])
    assert {r.told[prefix] for r in world.registers.values()} == {4}


def test_a_hundred_writers_of_one_prefix_stay_in_its_room(world: World) -> None:
    topic = cells_topic(7)
    strangers = [world.directory(f"stranger-{n}") for n in range(100)]
    taken = [
        world.do(board.post(topic, record(cell_id(3, n)).pack(), 600.0))
        for n, board in enumerate(strangers)
    ]
    assert sum(taken) == WRITERS["cells"]
    assert len(world.do(world.directory("reader").look(topic))) == WRITERS["cells"]
    assert world.do(strangers[0].post(topic, record(cell_id(3, 0)).pack(), 600.0)), "its own place"


def test_a_joiner_takes_the_neediest_of_the_cells_it_sees(
    world: World,
) -> None:
    cells = [cell_id(4, n) for n in range(30)]
    for n, cell in enumerate(cells):
        replicas = (2, 2, 1 + n % 3)
        world.lead(cell, replicas)
        for stage, count in enumerate(replicas):
            for one in range(count):
                role = "stage" if stage else "ends"
                leads = not stage and not one
                body = PeerBody(stage, role, "training", 3, "p", "1", cell=cell, leads=leads)
                mate = PeerId(f"peer-{cell}-{stage}-{one}")
                assert world.dht.post(mate, body, 0.0, 30.0, cell_topic(cell))
    world.time.run(4 * REFRESH_S)
    before = set(world.dht.reads)
    joiner = PeerId("joiner")
    seen, working = world.do(cells_in_sight(world.directory(joiner), "joiner/0", FIRST, 2))
    chosen = choose_cell(seen, 2, joiner, first=FIRST, working=working)
    assert seen
    assert min(map(seen[chosen].count, range(3))) == min(
        min(map(here.count, range(3))) for here in seen.values()
    )
    asked = {topic for peer, topic in set(world.dht.reads) - before if peer == joiner}
    assert sum(t.startswith("cells/") for t in asked) <= 4
    assert sum(t.startswith("cell/") for t in asked) <= 4


def test_a_joiner_finds_the_first_cell_before_it_has_a_leader(world: World) -> None:
    body = PeerBody(0, "ends", "starting", 0, "founder", "1", cell=FIRST)
    assert world.do(cells_in_sight(world.directory("joiner"), "joiner/0", FIRST, 2)) == ({}, set())
    world.do(world.directory("founder").publish(body, topic=cell_topic(FIRST)))
    seen, working = world.do(cells_in_sight(world.directory("joiner"), "joiner/1", FIRST, 2))
    assert (seen, working) == ({FIRST: [0]}, set())


def test_a_record_of_another_prefix_is_not_taken(world: World) -> None:
    cell = cell_id(5, 0)
    other = (prefix_of(cell) + 1) % PREFIXES
    world.do(world.directory("liar").post(cells_topic(other), record(cell).pack(), 100.0))
    world.do(asyncio.sleep(2.0))
    assert not world.do(CellReader(world.directory("reader")).prefix(other))


def test_bad_records_are_refused_and_bad_counts_dropped() -> None:
    good = record(cell_id(0, 0), 2, 1, 3, counts=(1,) * PREFIXES)
    assert (CellRecord.parse(good.pack()), good.stages) == (good, [0, 0, 1, 2, 2, 2])
    body = json.loads(good.pack())
    bad: Mapping[str, list[Any]] = {
        "cell": ["", "x" * 16, None],
        "epoch": [-1, 1.5, 2**53],
        "lineage": [None, "z"],
        "replicas": [[], [1], [1, -1], [1] * 513, "11"],
        "tokens_per_s": [-1, float("nan"), True, "1"],
        "counts": ["zz", "AAAA", "/" * 344, "!" * 344, None],
    }
    for name, values in bad.items():
        for value in values:
            with pytest.raises(WireError):
                CellRecord.parse(json.dumps({**body, name: value}).encode())
    assert list(cells_in([b"{", good.pack(), b"[]"])) == [good.cell]
    bad_counts = [b'{"prefix": 256, "count": 1}', b'{"prefix": 33}', b"\xff", pack_count(3, 7)]
    region = region_in(2, [pack_count(35, 7), *bad_counts])
    assert (region[3], sum(region)) == (7, 7)
    bad_regions = [b'{"region": 16, "counts": ""}', b'{"region": 1, "counts": "AA=="}', b"\xff"]
    counts = counts_in([pack_region(2, region), *bad_regions])
    assert (counts[35], sum(counts)) == (7, 7)


def test_a_crowd_in_a_stage_is_told_as_far_as_others_read() -> None:
    packed = record(cell_id(0, 0), 2, 600, 1).pack()
    assert CellRecord.parse(packed).replicas == (2, census.MAX_REPLICAS - 1, 1)


def test_a_record_of_more_peers_than_any_cell_has_is_refused() -> None:
    full = [census.MAX_REPLICAS - 1] * (census.MAX_PEERS // census.MAX_REPLICAS)
    assert len(CellRecord.parse(record(cell_id(0, 0), *full).pack()).stages) == sum(full)
    with pytest.raises(WireError, match="at most 2048 are read"):
        record(cell_id(0, 0), *full, 5).pack()


def test_answers_of_a_thousand_cells_stay_short(world: World) -> None:
    near: dict[CellId, Counts] = {}
    cells = [cell_id(0, n) for n in range(1000)]
    counts = tuple(sum(prefix_of(c) == prefix for c in cells) for prefix in range(PREFIXES))
    for prefix in range(PREFIXES):
        here = sorted(c for c in cells if prefix_of(c) == prefix)
        near |= {c: counts if c in here[:2] else () for c in here}
    sizes = [0] * PREFIXES
    for cell, told in near.items():
        sizes[prefix_of(cell)] += SEAL + len(record(cell, counts=told).pack())
    regions = [SEAL + len(pack_region(n, counts[16 * n : 16 * n + 16])) for n in range(REGIONS)]
    prefixes = [SEAL + len(pack_count(n, count)) for n, count in enumerate(counts)]
    peers = 10 * (SEAL + 330)
    assert max(*sizes, sum(regions), sum(sorted(prefixes)[-16:])) <= 1.25 * peers
