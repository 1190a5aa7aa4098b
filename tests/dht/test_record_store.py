"""Records that stand and records that do not, in virtual time: the store is given the time."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.core.errors import UsageFault, WireError
from node.core.ids import RunId
from node.dht.record import unwrap, wrap
from node.dht.record_store import Author, RecordStore
from node.dht.room import Company, NoRoom
from node.dht.settings import DirectorySettings
from node.identity.admission import Gate, admission_token
from node.identity.keys import Identity
from node.identity.records import seal

NOW = 1_800_000_000.0
RUN = RunId("ab" * 32)
ALICE = Identity.ephemeral()
BOB = Identity.ephemeral()


def record_store(**settings) -> RecordStore:
    return RecordStore(RUN, DirectorySettings(**settings))


def sealed(
    who: Identity,
    packed: bytes,
    seq: int = 1,
    until: float = NOW + 15,
    key: str = "",
    admission: bytes = b"",
) -> bytes:
    return seal(who, key or record_store().key, wrap(admission, packed), seq, until)


def test_a_good_record_is_news_once(body) -> None:
    b = record_store()
    raw = sealed(ALICE, body().pack())
    assert b.offer(ALICE.peer_id, raw, NOW + 15, NOW) is True
    assert b.offer(ALICE.peer_id, raw, NOW + 15, NOW + 1) is False
    assert b.entries(NOW)[ALICE.peer_id].body == body()


@pytest.mark.parametrize(
    "expires",
    [
        math.inf,
        -math.inf,
        math.nan,
        NOW,
        NOW - 1,
        NOW + 601,
        2.0**62,
        9_999_999_999.0,
        NOW + 15.5,
        NOW + 14.5,
    ],
)
def test_an_expiry_that_was_not_signed_or_is_absurd_is_refused(body, expires: float) -> None:
    b = record_store()
    with pytest.raises(WireError):
        b.offer(ALICE.peer_id, sealed(ALICE, body().pack()), expires, NOW)
    assert b.entries(NOW) == {}


def test_another_writer_key_or_size_is_refused(body) -> None:
    b = record_store()
    packed = body().pack()
    for raw in (
        sealed(BOB, packed),  # Bob's record under Alice's name
        sealed(ALICE, packed, key="tutti/" + "cd" * 32 + "/peers"),  # of another run
        sealed(ALICE, packed)[:-1] + b"!",  # changed on the way
        sealed(ALICE, packed)[:50],
        sealed(ALICE, b" " * 5000),
        bytes(1 << 20),
        sealed(ALICE, b"{}"),  # signed, but no body
        b"",
    ):
        with pytest.raises(WireError):
            b.offer(ALICE.peer_id, raw, NOW + 15, NOW)
    for writer in ("", "Alice", "Qm" * 23, "1" * 500):
        with pytest.raises(WireError):
            b.offer(writer, sealed(ALICE, packed), NOW + 15, NOW)
    assert b.entries(NOW) == {}


def test_an_old_record_cannot_come_back(body) -> None:
    b = record_store()
    first = sealed(ALICE, body(epoch=1).pack(), 1)
    second = sealed(ALICE, body(epoch=2).pack(), 2, NOW + 16)
    b.offer(ALICE.peer_id, first, NOW + 15, NOW)
    b.offer(ALICE.peer_id, second, NOW + 16, NOW)
    with pytest.raises(WireError, match="after"):
        b.offer(ALICE.peer_id, first, NOW + 15, NOW)
    with pytest.raises(WireError, match="after"):  # same number, other content
        b.offer(ALICE.peer_id, sealed(ALICE, body(epoch=9).pack(), 2, NOW + 17), NOW + 17, NOW)
    assert b.entries(NOW)[ALICE.peer_id].body.epoch == 2
    forged = sealed(BOB, body(epoch=9).pack(), 2, NOW + 17)
    with pytest.raises(WireError, match="after"):  # before its signature is checked
        b.offer(ALICE.peer_id, forged, NOW + 17, NOW)


def test_a_withdrawal_hides_its_writer_and_survives_a_replay(body) -> None:
    b = record_store()
    old = sealed(ALICE, body().pack(), 1, NOW + 100)
    b.offer(ALICE.peer_id, old, NOW + 100, NOW)
    b.offer(ALICE.peer_id, sealed(ALICE, b"", 2, NOW + 101), NOW + 101, NOW)
    with pytest.raises(WireError):
        b.offer(ALICE.peer_id, old, NOW + 100, NOW + 50)
    assert b.entries(NOW + 50) == {}


def test_a_writer_is_forgotten_with_its_last_record(body) -> None:
    b = record_store()
    b.offer(ALICE.peer_id, sealed(ALICE, body().pack(), 100), NOW + 15, NOW)
    assert b.newest(ALICE.peer_id) == (100, NOW + 15)
    assert b.entries(NOW + 15) == {}
    assert b.newest(ALICE.peer_id) == (0, 0.0)
    b.offer(ALICE.peer_id, sealed(ALICE, body().pack(), 7, NOW + 30), NOW + 30, NOW + 15)
    assert b.entries(NOW + 16)[ALICE.peer_id].seq == 7


def test_the_writer_limit_frees_up_when_records_expire(body) -> None:
    settings = DirectorySettings(max_peers=3)
    packed = body().pack()
    b = RecordStore(RUN, settings, BOB.peer_id, company=Company(proven=lambda peer: True))
    crowd = [Identity.ephemeral() for _ in range(5)]
    for one in crowd[:3]:
        b.offer(one.peer_id, sealed(one, packed), NOW + 15, NOW)
    with pytest.raises(NoRoom, match="3 records for strangers"):
        b.offer(crowd[3].peer_id, sealed(crowd[3], packed), NOW + 15, NOW)
    # known ones go on
    b.offer(crowd[0].peer_id, sealed(crowd[0], packed, 2, NOW + 16), NOW + 16, NOW)
    b.offer(BOB.peer_id, sealed(BOB, packed), NOW + 15, NOW)  # and so does the owner of the board
    assert len(b.entries(NOW)) == 4
    assert b.offer(crowd[4].peer_id, sealed(crowd[4], packed, 1, NOW + 30), NOW + 30, NOW + 15.5)


def test_established_writers_keep_their_records_while_strangers_change(body) -> None:
    members = [Identity.ephemeral() for _ in range(3)]
    names = {m.peer_id for m in members}
    company = Company(established=names.__contains__)
    b = RecordStore(RUN, DirectorySettings(max_peers=3), BOB.peer_id, company=company)
    dropped: list[str] = []
    b.on_drop = lambda key, writer, evicted: dropped.append(writer)
    packed = body().pack()
    for one in (*members, *(Identity.ephemeral() for _ in range(20))):
        b.offer(one.peer_id, sealed(one, packed), NOW + 15, NOW)
    found = b.entries(NOW)
    assert names < set(found)
    assert len(found) == len(b) == 6
    assert len(dropped) == 17
    assert not names & set(dropped)


@given(st.lists(st.integers(-2_000, 20_000) | st.just(-86_400_000), max_size=30))
def test_a_record_is_newer_than_the_last_whatever_the_clock(steps: list[int]) -> None:
    settings = DirectorySettings(max_ttl_s=60)
    b = record_store(max_ttl_s=60)
    author = Author(ALICE, RUN, settings)
    now = NOW
    for step in steps:
        now += step / 1000
        raw, expires = author.seal(b"", now, b.newest(ALICE.peer_id))
        assert b.offer(ALICE.peer_id, raw, expires, now)


@given(st.floats(0, 1000))
def test_a_record_of_the_longest_life_is_taken(later: float) -> None:
    b = record_store()
    author = Author(ALICE, RUN, DirectorySettings())
    raw, expires = author.seal(b"", NOW + later, times=math.inf)
    assert b.offer(ALICE.peer_id, raw, expires, NOW + later)


def test_a_ttl_that_others_would_refuse_is_a_settings_error() -> None:
    with pytest.raises(UsageFault, match="ttl_s"):
        Author(ALICE, RUN, DirectorySettings(ttl_s=700))


def test_a_private_run_accepts_records_only_while_admitted(body) -> None:
    owner = Identity.ephemeral()
    packed = body().pack()
    gate = Gate(RUN, owner.peer_id, private=True)
    token = admission_token(owner, RUN, ALICE.peer_id, NOW + 10)
    b = RecordStore(RUN, DirectorySettings(), BOB.peer_id, gate.admit)

    for raw in (
        sealed(ALICE, packed),
        sealed(ALICE, packed, admission=token[:-1]),
        sealed(ALICE, packed, admission=admission_token(owner, RUN, BOB.peer_id, NOW + 10)),
        sealed(
            ALICE,
            packed,
            admission=admission_token(owner, RunId("cd" * 32), ALICE.peer_id, NOW + 10),
        ),
        sealed(ALICE, packed, admission=admission_token(owner, RUN, None, NOW + 10)),
        sealed(ALICE, b""),  # a withdrawal takes room as well
    ):
        with pytest.raises(WireError):
            b.offer(ALICE.peer_id, raw, NOW + 15, NOW)
    assert b.entries(NOW) == {}

    assert b.offer(ALICE.peer_id, sealed(ALICE, packed, admission=token), NOW + 15, NOW)
    assert b.offer(owner.peer_id, sealed(owner, packed), NOW + 15, NOW)
    assert b.offer(BOB.peer_id, sealed(BOB, packed), NOW + 15, NOW), (
        "the own record is for others to judge"
    )
    assert set(b.entries(NOW + 9)) == {ALICE.peer_id, BOB.peer_id, owner.peer_id}
    assert set(b.entries(NOW + 10)) == {BOB.peer_id, owner.peer_id}
    with pytest.raises(WireError, match="expired"):
        b.offer(
            ALICE.peer_id, sealed(ALICE, packed, 2, NOW + 25, admission=token), NOW + 25, NOW + 10
        )
    assert b.offer(owner.peer_id, sealed(owner, b"", 2, NOW + 16), NOW + 16, NOW)
    assert set(b.entries(NOW)) >= {ALICE.peer_id}
    assert owner.peer_id not in b.entries(NOW)


def test_what_wraps_a_body_is_checked() -> None:
    assert unwrap(wrap(b"token", b"body")) == (b"token", b"body")
    assert unwrap(wrap(b"", b"")) == (b"", b"")
    with pytest.raises(WireError):
        wrap(bytes(513), b"")
    for raw in (b"", b"\0", b"\0\x05four", b"\xff\xff" + bytes(70_000), b"\x02\x01" + bytes(513)):
        with pytest.raises(WireError):
            unwrap(raw)
