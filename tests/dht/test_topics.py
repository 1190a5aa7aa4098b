"""What is posted under topics: what a node takes, what it refuses, and how long it keeps it."""

from __future__ import annotations

import math
import time

import pytest
from hivemind.dht.crypto import DHTRecord
from hivemind.dht.routing import DHTID
from hivemind.utils import MSGPackSerializer

from node.core.clock import SystemClock
from node.core.errors import WireError
from node.core.ids import RunId
from node.dht import guard, topics
from node.dht.author import Author
from node.dht.record import Posting
from node.dht.record_store import RecordStore, TopicStore
from node.dht.settings import DirectorySettings
from node.identity.keys import Identity

RUN, OTHER = RunId("ab" * 32), RunId("cd" * 32)
ALICE, BOB = Identity.ephemeral(), Identity.ephemeral()
HERE, THERE = "outer/7/all", "outer/8/all"
SETTINGS = DirectorySettings()


def sealed(
    who: Identity, body: bytes, topic: str = HERE, run: RunId = RUN, times: float = 1.0
) -> tuple[bytes, float]:
    return Author(who, run, SETTINGS, b"", topic).seal(body, time.time(), times=times)


def store(**settings: int) -> TopicStore:
    return TopicStore(RUN, DirectorySettings(**settings), BOB.peer_id)


def test_a_posting_is_found_under_its_topic_until_it_expires() -> None:
    s, (raw, until) = store(), sealed(ALICE, b"here")
    assert s.offer(HERE, ALICE.peer_id, raw, until, time.time())
    found = s.entries(HERE, time.time())
    assert found == {
        ALICE.peer_id: Posting(ALICE.peer_id, b"here", found[ALICE.peer_id].seq, until)
    }
    assert not s.entries(THERE, time.time())
    assert not s.entries(HERE, until)
    assert not len(s), "what has expired takes no room"


def test_a_posting_signed_for_another_topic_or_run_is_refused() -> None:
    s = store()
    for topic, run in ((THERE, RUN), (HERE, OTHER)):
        raw, until = sealed(ALICE, b"moved", topic, run)
        with pytest.raises(WireError):
            s.offer(HERE, ALICE.peer_id, raw, until, time.time())
    raw, until = sealed(ALICE, b"by another")
    with pytest.raises(WireError):
        s.offer(HERE, BOB.peer_id, raw, until, time.time())
    assert not len(s)


def test_a_posting_that_is_too_long_is_refused() -> None:
    raw, until = sealed(ALICE, b"x" * (topics.MAX_POSTING + 1))
    with pytest.raises(WireError, match="at most"):
        store().offer(HERE, ALICE.peer_id, raw, until, time.time())


def test_strangers_cannot_fill_a_node_with_topics() -> None:
    s = store(max_postings=3)
    for window in range(3):
        raw, until = sealed(ALICE, b"x", f"outer/{window}/all")
        s.offer(f"outer/{window}/all", ALICE.peer_id, raw, until, time.time())
    raw, until = sealed(ALICE, b"x", "outer/9/all")
    with pytest.raises(WireError, match="3 postings"):
        s.offer("outer/9/all", ALICE.peer_id, raw, until, time.time())
    raw, until = sealed(BOB, b"own", "outer/9/all")
    assert s.offer("outer/9/all", BOB.peer_id, raw, until, time.time())


def record(topic: str, raw: bytes, until: float, key: str = "") -> DHTRecord:
    of = DHTID.generate(source=key or topics.key_of(RUN, topic)).to_bytes()
    pack = MSGPackSerializer.dumps
    return DHTRecord(of, pack(str(ALICE.peer_id)), pack(raw), until)


@pytest.mark.parametrize("case", ["good", "other key", "no topic", "a topic of no grammar", "nan"])
def test_a_node_stores_what_stands_under_the_key_of_its_topic(case: str) -> None:
    s, (raw, until) = store(), sealed(ALICE, b"here")
    validator = guard.EnvelopeValidator(
        RecordStore(RUN, SETTINGS), SystemClock(), SETTINGS.max_record, topics=s
    )
    given = {
        "good": record(HERE, topics.wrap(HERE, raw), until),
        "other key": record(THERE, topics.wrap(HERE, raw), until),
        "no topic": record(HERE, raw, until),
        "a topic of no grammar": record("", b"cells\n" + raw, until, f"tutti/{RUN}/cells"),
        "nan": record(HERE, topics.wrap(HERE, raw), math.nan),
    }[case]
    assert validator.validate(given) is (case == "good")
    assert bool(s.entries(HERE, time.time())) is (case == "good")


async def test_nodes_find_each_others_postings(swarm, addresses, eventually) -> None:
    one, p2p = await swarm.node()
    other, _ = await swarm.node(await addresses(p2p))

    async def there(topic: str, who: set[str]) -> bool:
        return set(await one.look(topic)) == who == set(await other.look(topic))

    async def posted() -> bool:
        return await one.post(HERE, b"one", 15.0)

    assert await eventually(posted)
    assert await other.post(HERE, b"other", 15.0)
    assert await other.post(THERE, b"elsewhere", 15.0)
    assert await eventually(lambda: there(HERE, {one.me, other.me}))
    assert await eventually(lambda: there(THERE, {other.me}))
    assert (await one.look(HERE))[other.me].body == b"other"
    assert await other.post(HERE, b"again", 15.0)

    async def newer() -> bool:
        return (await one.look(HERE))[other.me].body == b"again"

    assert await eventually(newer)
    assert not await one.read(), "what peers say of themselves is somewhere else"


async def test_what_others_would_refuse_is_not_posted(swarm) -> None:
    directory = swarm.directory(swarm.identity())
    with pytest.raises(WireError, match="2048"):
        await directory.post(HERE, b"x" * 2049, 15.0)
    with pytest.raises(WireError, match="nothing is posted"):
        await directory.post("elsewhere", b"x", 15.0)
    assert not await directory.post(HERE, b"x", 15.0), "it is attached to no network"
    assert set(await directory.look(HERE)) == {directory.me}
