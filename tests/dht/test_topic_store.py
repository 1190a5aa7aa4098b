"""Topics under which peers post, and the amount that is kept, in virtual time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.core.errors import WireError
from node.core.ids import CellId, RunId
from node.dht import topics
from node.dht.record import wrap
from node.dht.record_store import POSTINGS_EACH, TopicStore
from node.dht.room import Company, NoRoom
from node.dht.settings import DirectorySettings
from node.identity.keys import Identity
from node.identity.records import seal

NOW = 1_800_000_000.0
RUN = RunId("ab" * 32)
OTHER_RUN = RunId("cd" * 32)
ALICE = Identity.ephemeral()
BOB = Identity.ephemeral()
PAIR = "outer/7/all"
CELL = f"cell/{'0a' * 8}"


def sealed(
    who: Identity,
    topic: str = PAIR,
    body: bytes = b"here",
    seq: int = 1,
    until: float = NOW + 60,
    run: RunId = RUN,
    admission: bytes = b"",
) -> bytes:
    return seal(who, topics.key_of(run, topic), wrap(admission, body), seq, until)


CONNECTED = Company(proven=lambda peer: True)


def store(company: Company = CONNECTED, **settings: int) -> TopicStore:
    return TopicStore(RUN, DirectorySettings(**settings), BOB.peer_id, company=company)


def post(
    b: TopicStore, who: Identity, topic: str = PAIR, now: float = NOW, life: float = 60.0
) -> bool:
    until = now + life
    return b.offer(topic, who.peer_id, sealed(who, topic, until=until), until, now)


@pytest.mark.parametrize(
    ("topic", "kind"),
    [
        ("peers", "peers"),
        ("cell/0123456789abcdef", "cell"),
        ("cells/00", "cells"),
        ("cells/3f", "cells"),
        ("outer/0/all", "outer"),
        ("outer/1099511627775/" + "1" * 32, "outer"),
        ("outer/7/1.20-3", "outer"),
    ],
)
def test_a_topic_has_a_kind_and_a_key(topic: str, kind: str) -> None:
    assert topics.kind_of(topic) == kind
    assert topics.key_of(RUN, topic) == f"tutti/{RUN}/{topic}"
    assert topics.unwrap(topics.wrap(topic, b"\nsealed\n")) == (topic, b"\nsealed\n")


@pytest.mark.parametrize(
    "topic",
    [
        "",
        "peers/",
        "Peers",
        "peers\n",
        "cell/",
        "cell/0123456789abcde",
        "cell/0123456789abcdef0",
        "cell/0123456789ABCDEF",
        "cells/",
        "cells/g0",
        "cells/3F",
        "cells/3",
        "cells/003",
        "outer//all",
        "outer/7",
        "outer/7/",
        "outer/07/all",
        "outer/-1/all",
        "outer/1099511627776/all",
        "outer/9999999999999/all",
        "outer/٧/all",
        "outer/7/some",
        "outer/7/1/2",
        "outer/7/" + "1" * 33,
        "outer/7/all\n",
        "other/7/all",
        "outer/7/1\ud800",
    ],
)
def test_nothing_else_is_a_topic(topic: str) -> None:
    for refuses in (topics.kind_of, topics.most_writers, lambda t: topics.key_of(RUN, t)):
        with pytest.raises(WireError, match="nothing is posted under"):
            refuses(topic)


def test_topics_are_built_as_they_are_checked() -> None:
    assert topics.cell_topic(CellId("0123456789abcdef")) == "cell/0123456789abcdef"
    assert [topics.cells_topic(n) for n in (0, 10, 255)] == ["cells/00", "cells/0a", "cells/ff"]
    assert [topics.region_topic(n) for n in (0, 15)] == ["census/0", "census/f"]
    assert topics.outer_topic(7, "1.2") == "outer/7/1.2"
    for build in (
        lambda: topics.cell_topic(CellId("")),
        lambda: topics.cells_topic(256),
        lambda: topics.cells_topic(-1),
        lambda: topics.region_topic(16),
        lambda: topics.outer_topic(-1, "all"),
        lambda: topics.outer_topic(2**40, "all"),
        lambda: topics.outer_topic(0, "everybody"),
    ):
        with pytest.raises(WireError):
            build()


@given(st.binary(max_size=200))
def test_what_names_no_topic_is_refused(raw: bytes) -> None:
    with pytest.raises(WireError):
        topics.unwrap(raw)


def test_a_topic_takes_so_many_writers_and_the_own_record() -> None:
    b = store()
    crowd = [Identity.ephemeral() for _ in range(65)]
    for one in crowd[:64]:
        assert post(b, one)
    with pytest.raises(NoRoom, match="64"):
        post(b, crowd[64])
    assert post(b, BOB)
    assert post(b, crowd[64], "outer/7/1"), "another topic has room of its own"
    assert b.offer(PAIR, crowd[0].peer_id, sealed(crowd[0], seq=2), NOW + 60, NOW)
    assert post(b, crowd[64], PAIR, NOW + 60)
    assert set(b.entries(PAIR, NOW + 60)) == {crowd[64].peer_id}


def test_kinds_of_topics_have_room_for_different_numbers(monkeypatch) -> None:
    monkeypatch.setitem(topics.WRITERS, "cell", 1)
    monkeypatch.setitem(topics.WRITERS, "cells", 2)
    b = store()
    crowd = [Identity.ephemeral() for _ in range(3)]
    for topic, most in ((CELL, 1), ("cells/00", 2)):
        for one in crowd[:most]:
            assert post(b, one, topic)
        with pytest.raises(NoRoom, match=f"{most} records for strangers"):
            post(b, crowd[most], topic)


def test_a_full_store_takes_own_records_and_own_topics_only() -> None:
    b = store(max_postings=3)
    strangers = [Identity.ephemeral() for _ in range(4)]
    for n, who in enumerate(strangers[:3]):
        assert post(b, who, f"outer/{n}/all", life=60.0 + n)
    with pytest.raises(NoRoom, match="3 records for strangers"):
        post(b, strangers[3], PAIR)
    with pytest.raises(NoRoom, match="3 records for strangers"):
        post(b, strangers[3], "outer/0/all")
    assert len(b) == 3
    newer = sealed(strangers[0], "outer/0/all", seq=2)
    assert b.offer("outer/0/all", strangers[0].peer_id, newer, NOW + 60, NOW), "in its own place"
    assert post(b, BOB, PAIR, life=300.0)
    b.use(CELL, NOW)
    assert post(b, strangers[3], CELL, life=300.0)
    assert len(b) == 5
    with pytest.raises(NoRoom):
        post(b, Identity.ephemeral(), "outer/5/1", NOW + 59)
    assert post(b, strangers[3], "outer/0/1", NOW + 62), "three have expired"
    assert set(b.entries(CELL, NOW + 62)) == {strangers[3].peer_id}


def test_a_topic_is_the_own_one_for_a_life_after_its_last_use() -> None:
    b = store(max_postings=1)
    first = Identity.ephemeral()
    second = Identity.ephemeral()
    b.use(PAIR, NOW)
    assert post(b, first, "cells/00", NOW, life=600.0)
    assert post(b, first, "cells/01", NOW + 600) is True
    with pytest.raises(NoRoom):
        post(b, second, PAIR, NOW + 600)
    b.use(PAIR, NOW + 600)
    assert post(b, second, PAIR, NOW + 600)
    for topic in ("peers", "nothing"):
        with pytest.raises(WireError):
            b.use(topic, NOW)


def test_what_expires_is_dropped_whatever_topic_is_asked_for() -> None:
    b = store()
    for window in range(10):
        post(b, ALICE, f"outer/{window}/all", NOW, life=10.0 + window)
    assert len(b) == 10
    assert b.entries(CELL, NOW + 14.5) == {}
    assert len(b) == 5
    assert b.entries("outer/4/all", NOW + 14.5) == {}
    assert set(b.entries("outer/5/all", NOW + 14.5)) == {ALICE.peer_id}
    post(b, BOB, CELL, NOW + 30)
    assert len(b) == 1


def test_one_peer_fills_no_topics_but_a_few() -> None:
    b = store()
    for window in range(POSTINGS_EACH):
        assert post(b, ALICE, f"outer/{window}/all")
    with pytest.raises(NoRoom, match=f"{POSTINGS_EACH} records of this peer"):
        post(b, ALICE, "outer/1000/all")
    b.use(CELL, NOW)
    assert post(b, ALICE, CELL), "a topic that this node uses"
    assert len(b) == POSTINGS_EACH + 1


def test_a_newcomer_takes_the_place_of_a_greedy_peer_in_any_topic() -> None:
    b = store(max_postings=40)
    dropped: list[tuple[str, str]] = []
    b.on_drop = lambda key, writer, evicted: dropped.append((key, writer))
    greedy = [Identity.ephemeral() for _ in range(2)]
    for number in range(40):
        post(b, greedy[number % 2], f"outer/{number}/all")
    newcomers = [Identity.ephemeral() for _ in range(5)]
    for who in newcomers:
        assert post(b, who, PAIR)
    assert {who.peer_id for who in newcomers} < set(b.entries(PAIR, NOW))
    assert len(b) == 40
    assert {writer for _, writer in dropped} <= {g.peer_id for g in greedy}
    assert len(dropped) == 5
