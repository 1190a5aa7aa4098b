"""Who is at the ends of a cell's edges, in virtual time and over a slow directory."""

import asyncio
import json
from dataclasses import replace

import pytest

from node.averaging.strategies.keys import EdgeKeys
from node.averaging.strategies.outer import MOST_EDGE_STAGES
from node.cells.board import EdgeFinder, Neighbours
from node.cells.postings import MAX_HOSTS, CellFacts, pack_hosts, pack_posting, parse_posting
from node.core.errors import WireError
from node.core.ids import PeerId
from node.core.journey import Host, Partner
from node.dht.topics import MAX_POSTING, outer_topic
from tests.cells.leaders import START, WALL, WINDOW, Peer, Row, World, cell_id, facts, unheard


class Walker(Peer):
    """Leads the cell of a place on a ring of three."""

    def __init__(self, world: World, place: int, skew: float = 0.0) -> None:
        super().__init__(world, f"leader-{place}", skew)
        self.facts = facts(cell_id(place))
        self.keys = EdgeKeys(
            str(place), *((str((place + 1) % 3), str((place + 2) % 3)) for _ in range(2))
        )
        self.finder = EdgeFinder(self.board, unheard)

    def looks(
        self, lead_s: float = 5.0, about: CellFacts | None = None
    ) -> asyncio.Future[Neighbours | None]:
        return self.do(
            self.finder.find(about or self.facts, WINDOW, self.keys, WALL + START), START - lead_s
        )

    def posted(self, at: float, **more: int) -> None:
        """Written at that wall-clock second of the window."""
        body = pack_hosts(facts(self.facts.cell, **more))
        row = Row(self.me, body, int((WALL + START + at) * 1000), WALL + START + 600)
        self.world.write(outer_topic(WINDOW, self.keys.own), row)


def found(near: Neighbours | None) -> list[str]:
    return [cell[-1] for cell in near.sources]


def test_everybody_reads_whom_edges_lead_from_and_their_hosts(world: World) -> None:
    walkers = [Walker(world, place, skew) for place, skew in enumerate((0.0, 1.0, -1.0))]
    looking = [w.looks() for w in walkers]
    world.run()
    assert [found(near.result()) for near in looking] == [["1", "2"], ["0", "2"], ["0", "1"]]
    near = looking[0].result()
    assert near.sources == near.targets
    assert near.sources[cell_id(1)] == Partner(cell_id(1), walkers[1].me, walkers[1].facts.hosts)


def test_who_is_missing_costs_its_own_edge_only(world: World) -> None:
    first, last = Walker(world, 0), Walker(world, 2)
    looking = first.looks(), last.looks()
    world.run()
    assert [found(near.result()) for near in looking] == [["2"], ["0"]]


def test_late_postings_other_changes_and_junk_are_left_out(world: World) -> None:
    me, late, other = (Walker(world, place) for place in range(3))
    liar = Peer(world, "liar")
    late.posted(-2.0)
    other.posted(-5.0, change=1)
    liar.posts(facts(cell_id(9)), -5.0, key="1")  # hosts nothing
    looking = me.looks()
    world.run()
    assert looking.result() == Neighbours({}, {})


def test_a_directory_that_takes_no_posting_is_not_read() -> None:
    world = World(down=True)
    me = Walker(world, 0)
    looking = me.looks()
    world.run()
    assert looking.result() is None
    assert me.events("outer-not-posted")
    assert not world.looks


def test_a_posting_has_a_host_of_every_stage_or_is_refused() -> None:
    maddrs = ("/ip4/10.0.0.1/tcp/4001",) * 2
    hosts = {
        stage: tuple(Host(PeerId(f"{stage:02}{n}" + "x" * 48), maddrs) for n in range(6))
        for stage in range(20)
    }
    about = CellFacts(cell_id(1), facts(cell_id(1)).version, hosts)
    raw = pack_hosts(about)
    assert len(raw) <= MAX_POSTING
    assert parse_posting(raw).hosts.keys() == hosts.keys()
    most = {stage: (Host(PeerId("x" * 52), maddrs),) for stage in range(1 + MOST_EDGE_STAGES)}
    assert parse_posting(pack_hosts(replace(about, hosts=most))).hosts.keys() == most.keys()
    few = replace(about, hosts={0: hosts[0]})
    assert len(parse_posting(pack_hosts(few)).hosts[0]) == MAX_HOSTS
    many = replace(about, hosts={stage: hosts[0] for stage in range(60)})
    with pytest.raises(WireError, match="no room"):
        pack_hosts(many)
    world = World()
    looking = Walker(world, 0).looks(about=many)
    world.run()
    assert looking.result() is None


@pytest.mark.parametrize(
    "hosts",
    [
        [],
        {"0": []},
        {"0": [["peer", ["no address"]]]},
        {"0": [["peer", ["/ip4/1.2.3.4/tcp/1"]]] * 5},
        {"0": [["pe er", []]]},
        {"-1": [["peer", []]]},
        {"00": [["peer", []]]},
        {"0": [["peer", "/ip4"]]},
        {"0": [[7, []]]},
    ],
)
def test_hosts_that_are_none_are_refused(hosts: object) -> None:
    body = json.loads(pack_posting(facts(cell_id(1))))
    with pytest.raises(WireError, match="hosts"):
        parse_posting(json.dumps({**body, "hosts": hosts}).encode())
