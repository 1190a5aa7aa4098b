"""Walks through a DHT of many nodes on loopback, of which no node knows all others."""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hivemind.dht.routing import DHTID
from hivemind.p2p import PeerID

from node.core.clock import SystemClock
from node.core.ids import CellId, RunId
from node.dht.directory import Directory
from node.dht.guard import node_id_of
from node.dht.settings import DirectorySettings
from node.dht.topics import cell_topic, key_of
from node.dht.walk import Walk
from node.identity.keys import Identity
from node.telemetry.events import Journal
from testbed.networks.loopback import LoopbackP2P, multiaddr_of
from tests.dht.conftest import eventually, make_body

RUN = RunId("cd" * 32)
CELL = CellId("5" * 16)
TOPIC = cell_topic(CELL)
PATIENT = DirectorySettings(refresh_s=600.0, ttl_s=500.0, lookup_timeout_s=600.0)
NODES, MEMBERS = 32, 6
FAR = 4
"""Nodes that a reader still knows, more than the sources of a walk."""


class Crowd:
    """Nodes that joined one after another by the address of the founder."""

    def __init__(self) -> None:
        self.identities: list[Identity] = []
        self.p2ps: list[LoopbackP2P] = []
        self.directories: list[Directory] = []

    async def join(self) -> Directory:
        number = len(self.identities)
        identity = Identity.of_seed(hashlib.sha256(f"walker {number}".encode()).digest())
        p2p = LoopbackP2P(identity.peer_id)
        await p2p.start()
        directory = Directory(identity, PATIENT, SystemClock(), RUN, Journal())
        seeds = [multiaddr_of(first.peer_id) for first in self.identities[:1]]
        self.identities.append(identity)
        self.p2ps.append(p2p)
        self.directories.append(directory)
        others: Any = p2p
        await directory.attach(others, seeds)
        await eventually(lambda: directory.neighbours or not seeds)
        return directory

    def nearest(self) -> list[int]:
        """Numbers of all nodes, the nearest to the topic's key first."""
        key = DHTID.generate(source=key_of(RUN, TOPIC))
        peers = [PeerID.from_base58(identity.peer_id) for identity in self.identities]
        return sorted(range(len(peers)), key=lambda i: key.xor_distance(node_id_of(peers[i])))

    async def close(self) -> None:
        for directory in self.directories:
            await directory.close()
        for p2p in self.p2ps:
            await p2p.shutdown()


@pytest.fixture
async def crowd() -> AsyncIterator[Crowd]:
    made = Crowd()
    for _ in range(NODES):
        await made.join()
    yield made
    await made.close()


@pytest.fixture
def body() -> Callable[..., Any]:
    return lambda number: make_body(name=f"n{number}", cell=CELL)


def numbered(*numbers: int) -> dict[DHTID, PeerID]:
    """Nodes with these ids; the distance from key 0 is the id."""
    return {DHTID(n): PeerID(bytes((n,))) for n in numbers}


def asks(walk: Walk) -> list[int]:
    """Ids of the nodes that the walk asks before it hears from any of them."""
    found = []
    while (node := walk.next()) is not None:
        walk.asked.add(node)
        found.append(int(node))
    return found


def test_a_walk_asks_the_nearest_nodes_that_it_hears_of() -> None:
    walk = Walk(DHTID(0), 3, numbered(50, 60, 70, 80))
    assert asks(walk) == [50, 60, 70]
    walk.heard(DHTID(50), numbered(5, 65))
    assert asks(walk) == [5]
    walk.heard(DHTID(5), numbered(50, 90))
    walk.heard(DHTID(60), {})
    assert asks(walk) == []
    assert walk.found() == [5, 50, 60]


def test_a_node_that_is_gone_leaves_its_place_to_the_next() -> None:
    walk = Walk(DHTID(0), 2, numbered(1, 2, 3, 4))
    assert asks(walk) == [1, 2]
    walk.missed(DHTID(1))
    walk.missed(DHTID(2))
    assert asks(walk) == [3, 4]
    walk.heard(DHTID(3), numbered(1, 2))
    assert asks(walk) == [], "whoever is gone stays so for this walk, though others name it"
    walk.heard(DHTID(4), {})
    assert walk.found() == [3, 4]


async def test_records_are_found_by_a_reader_that_knows_only_nodes_far_from_them(
    crowd, body
) -> None:
    near = crowd.nearest()
    reader, *members = [crowd.directories[i] for i in near[-MEMBERS:]]
    for member in members:
        assert await member.publish(body(0), topic=TOPIC)
    table = reader._node.protocol.routing_table
    known = [n for i in near if (n := table.get(peer_id=crowd.p2ps[i].peer_id)) is not None]
    for nearer in known[:-FAR]:
        del table[nearer]
    found = await reader.read(TOPIC)
    assert {member.me for member in members} <= set(found)


async def test_failures_of_invented_nodes_are_forgotten(crowd, monkeypatch) -> None:
    monkeypatch.setattr("node.dht.walk.PEERS_KEPT", 8)
    reader = crowd.directories[-1]
    counted = reader._node.blacklist.ban_counter
    for number in range(9):
        counted[PeerID(bytes((number,)))] = 1
    await reader.look(TOPIC)
    assert not counted


async def test_nodes_that_do_not_answer_hold_up_neither_a_post_nor_a_reading(crowd, body) -> None:
    near = crowd.nearest()
    reader, *members = [crowd.directories[i] for i in near[-MEMBERS:]]
    for member in members:
        assert await member.publish(body(0), topic=TOPIC)
    # In a walk before, all nodes have answered the reader, which so knows how long that takes.
    await reader.read(TOPIC)
    for directory in (reader, members[0]):
        directory._node.protocol.wait_timeout = 3600.0
    for i in near[:2]:
        crowd.p2ps[i].fall_silent()
    async with asyncio.timeout(120):
        assert await members[0].publish(body(1), topic=TOPIC)
        found = await reader.read(TOPIC)
    assert {member.me for member in members} <= set(found)
    assert found[members[0].me].body.name == "n1"
