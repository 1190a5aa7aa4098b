"""Walks through a DHT of many nodes on loopback, of which no node knows all others."""

import asyncio
import dataclasses
import hashlib
import itertools
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import PeerID
from hivemind.proto import dht_pb2

from node.core.clock import SystemClock
from node.core.ids import CellId, PeerId, RunId
from node.dht.directory import Directory
from node.dht.guard import node_id_of
from node.dht.room import NO_COMPANY, Company
from node.dht.settings import DirectorySettings
from node.dht.topics import PEERS, cell_topic, key_of
from node.dht.walk import LANDMARKS, SOURCES, Walk
from node.identity.keys import Identity
from node.telemetry.events import Journal
from testbed.networks.loopback import LoopbackP2P, multiaddr_of
from tests.dht.conftest import eventually, make_body

RUN = RunId("cd" * 32)
CELL = CellId("5" * 16)
TOPIC = cell_topic(CELL)
PATIENT = DirectorySettings(refresh_s=600.0, ttl_s=500.0, lookup_timeout_s=600.0)
NODES, MEMBERS = 32, 6
LIARS = 8
"""Nodes that lie, as many as a walk looks for."""
FAR = 4
"""Nodes that a reader still knows, more than the sources of a walk."""


def numbered_identity(name: str) -> Identity:
    return Identity.of_seed(hashlib.sha256(name.encode()).digest())


def ground(key: DHTID, others: list[Identity], count: int) -> list[Identity]:
    """Identities of nodes that are nearer to a key than all others."""

    def distance(identity: Identity) -> int:
        return key.xor_distance(node_id_of(PeerID.from_base58(identity.peer_id)))

    nearest = min(map(distance, others))
    made = (numbered_identity(f"ground {number}") for number in itertools.count())
    return list(itertools.islice((one for one in made if distance(one) < nearest), count))


def lie(directories: list[Directory]) -> None:
    """Let these nodes give no records but their own, and name no nodes but themselves."""
    liars = {directory.me for directory in directories}

    def of_liars(protocol: Any) -> Callable[..., Any]:
        truth = protocol._answer

        def answer(*asked: Any) -> Any:
            told = truth(*asked)
            for result in told.results:
                if result.type == dht_pb2.FOUND_DICTIONARY:
                    records = DictionaryDHTValue()
                    for writer, record in protocol.serializer.loads(result.value).items():
                        if writer in liars:
                            records.store(writer, *record)
                    result.value = protocol.serializer.dumps(records)
                del result.nearest_node_ids[:], result.nearest_peer_ids[:]
                for peer in map(PeerID.from_base58, liars):
                    result.nearest_node_ids.append(node_id_of(peer).to_bytes())
                    result.nearest_peer_ids.append(peer.to_bytes())
            return told

        return answer

    for directory in directories:
        protocol: Any = directory._node.protocol
        protocol._answer = of_liars(protocol)


class Crowd:
    """Nodes that joined one after another by the address of the founder."""

    def __init__(self) -> None:
        self.identities: list[Identity] = []
        self.p2ps: list[LoopbackP2P] = []
        self.directories: list[Directory] = []

    async def join(
        self,
        identity: Identity | None = None,
        seed: PeerId | None = None,
        settings: DirectorySettings = PATIENT,
        company: Company = NO_COMPANY,
        answered: bool = True,
    ) -> Directory:
        """Let a node join. ``seed``: the node whose address it knows; None: the founder.
        ``answered``: whether to wait until a node answers it."""
        number = len(self.identities)
        identity = identity or numbered_identity(f"walker {number}")
        p2p = LoopbackP2P(identity.peer_id)
        await p2p.start()
        directory = Directory(identity, settings, SystemClock(), RUN, Journal(), company=company)
        seeds = [multiaddr_of(first.peer_id) for first in self.identities[:1]]
        if seed is not None:
            seeds = [multiaddr_of(seed)]
        self.identities.append(identity)
        self.p2ps.append(p2p)
        self.directories.append(directory)
        others: Any = p2p
        await directory.attach(others, seeds)
        await eventually(lambda: directory.neighbours or not seeds or not answered)
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
async def nobody() -> AsyncIterator[Crowd]:
    made = Crowd()
    yield made
    await made.close()


@pytest.fixture
async def crowd(nobody) -> Crowd:
    for _ in range(NODES):
        await nobody.join()
    return nobody


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


async def asked_in_a_reading(reader: Directory) -> tuple[list[PeerID], list[PeerID]]:
    """Nodes that are asked for records in a reading of the topic, and those that are asked only for
    other nodes."""
    sources = list[PeerID]()
    others = list[PeerID]()
    key = DHTID.generate(source=key_of(RUN, TOPIC))
    protocol: Any = reader._node.protocol
    call_find = protocol.call_find

    async def counted(peer: PeerID, keys: Any) -> Any:
        if key in keys:
            sources.append(peer)
        else:
            others.append(peer)
        return await call_find(peer, keys)

    protocol.call_find = counted
    await reader.look(TOPIC)
    return sources, others


async def test_records_are_asked_of_three_nodes_and_the_landmarks(crowd) -> None:
    """Not of the far nodes that a walk passes on its way."""
    near = crowd.nearest()
    reader: Any = crowd.directories[near[-1]]._node
    table = reader.protocol.routing_table
    known = [n for i in near if (n := table.get(peer_id=crowd.p2ps[i].peer_id)) is not None]
    for nearer in known[: -reader.protocol.bucket_size]:
        del table[nearer]
    landmarks = [crowd.p2ps[i].peer_id for i in near[-1 - LANDMARKS : -1]]
    reader.landmarks = lambda: landmarks
    sources, _ = await asked_in_a_reading(crowd.directories[near[-1]])
    nearest = [crowd.p2ps[i].peer_id for i in near[:SOURCES]]
    assert set(sources) == {*landmarks, *nearest}
    assert len(sources) == LANDMARKS + SOURCES


async def test_no_node_of_a_small_swarm_is_asked_twice(nobody) -> None:
    """Its nearest nodes are known beforehand, and a second question takes a round trip."""
    for _ in range(LIARS):
        await nobody.join()
    reader: Any = nobody.directories[nobody.nearest()[-1]]
    table = reader._node.protocol.routing_table
    await reader._node.find_nearest_nodes([reader._node.node_id])
    assert len(table.uid_to_peer_id) == LIARS - 1
    sources, others = await asked_in_a_reading(reader)
    near = [nobody.p2ps[i].peer_id for i in nobody.nearest()]
    assert sorted(map(str, sources + others)) == sorted(map(str, near[:-1]))
    assert set(near[:SOURCES]) <= set(sources)
    assert len(sources) <= SOURCES + LANDMARKS


async def test_a_node_that_knows_only_clients_keeps_its_record_itself(nobody, body) -> None:
    client = await nobody.join()
    await client.serve(False)
    node = await nobody.join(seed=client.me, answered=False)
    assert not node.neighbours
    assert node._landmarks()
    assert await node.publish(body(0), topic=TOPIC)


async def test_a_post_fails_while_no_known_node_answers(nobody, body) -> None:
    """Also if all known nodes are landmarks."""
    founder = await nobody.join()
    node = await nobody.join()
    assert node._landmarks() == [PeerID.from_base58(founder.me)]
    await eventually(lambda: "settle" in node._searches and node._searches["settle"].done())
    await nobody.p2ps[0].shutdown()
    assert not await node.publish(body(0), topic=TOPIC)


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


@pytest.mark.parametrize("topic", [PEERS, TOPIC])
async def test_liars_that_made_keys_next_to_a_topic_hide_nobody(
    crowd, body, topic, monkeypatch
) -> None:
    """Neither from the members nor from a newcomer that knows the address of one of them."""
    # A reading asks, however late the post before.
    monkeypatch.setattr("node.dht.directory.FRESH_S", -1.0)
    honest = list(crowd.directories)
    key = DHTID.generate(source=key_of(RUN, topic))
    liars = [await crowd.join(who) for who in ground(key, crowd.identities, LIARS)]
    lie(liars)
    for directory in (*liars, *honest):
        assert await directory.publish(body(0), topic=topic)
    everybody = {directory.me for directory in honest}
    for member in honest:
        assert everybody <= set(await member.read(topic))
    newcomer = await crowd.join(seed=honest[-1].me)
    assert everybody <= set(await newcomer.read(topic))


@pytest.mark.parametrize("topic", [PEERS, TOPIC])
async def test_a_peer_that_this_one_works_with_is_asked_for_its_record_before_it_expires(
    nobody, body, topic, monkeypatch
) -> None:
    """Its later posts may be found nowhere."""
    monkeypatch.setattr("node.dht.directory.RENEWED", math.inf)  # all records are about to expire
    colleagues = set[PeerId]()
    settings = dataclasses.replace(PATIENT, refresh_s=0.01)
    colleague = await nobody.join()
    stranger = await nobody.join()
    member = await nobody.join(settings=settings, company=Company(colleagues.__contains__))
    for directory in nobody.directories:
        assert await directory.publish(body(0), topic=topic)
    assert {colleague.me, stranger.me} < set(await member.read(topic))
    before = {directory: member._newest(directory.me) for directory in (colleague, stranger)}
    for directory in before:
        node, directory._node = directory._node, None
        assert not await directory.publish(body(1), topic=topic)
        directory._node = node
    colleagues.add(colleague.me)
    await eventually(lambda: member._newest(colleague.me) != before[colleague])
    assert member._newest(stranger.me) == before[stranger]


def test_landmarks_in_different_address_blocks_come_first() -> None:
    blocks = {numbered_identity(f"seed {number}").peer_id: "near" for number in range(9)}
    other = numbered_identity("another seed").peer_id
    blocks[other] = "far"
    directory = Directory(
        numbered_identity("me"),
        PATIENT,
        SystemClock(),
        RUN,
        Journal(),
        company=Company(block=blocks.__getitem__),
    )
    directory.meet([multiaddr_of(peer) for peer in blocks])
    for _ in range(20):  # drawn by lot among each block's
        assert PeerID.from_base58(other) in directory._landmarks()[:LANDMARKS]
