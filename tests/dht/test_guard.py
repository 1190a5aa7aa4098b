"""Attacks of strangers on a node that must fail. Requests go straight into the protocol's handlers,
as p2pd would deliver them."""

import asyncio
import math
import time
from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import msgpack
import pytest
from hivemind.dht.crypto import DHTRecord
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer

from node.core.ids import RunId
from node.dht import guard, topics
from node.dht.guard import (
    REQUESTS_AT_ONCE,
    STRANGER_RECORDS,
    STRANGERS_S,
    STRANGERS_SHARE,
    SURE_RECORDS,
    UNMET_RECORDS,
    AdmissionFilter,
    RecordSerializer,
)
from node.dht.record import wrap
from node.dht.record_store import RecordStore, TopicStore
from node.dht.room import NO_COMPANY, OTHERS, Company
from node.dht.settings import DirectorySettings
from node.identity.admission import Gate, admission_token
from node.identity.keys import Identity
from node.identity.records import seal
from testbed.fakes.clock import HeldClock

guard.install()
RUN = RunId("ab" * 32)
ALICE = Identity.ephemeral()
BOB = Identity.ephemeral()
KEY = DHTID.generate(source=RecordStore(RUN, DirectorySettings()).key).to_bytes()
OWN_OF_BOB = guard.own_key(RecordStore(RUN, DirectorySettings()).key, str(BOB.peer_id)).to_bytes()
pack = MSGPackSerializer.dumps


def until(seconds: float = 15.0) -> float:
    return round(time.time() + seconds, 3)


def sealed(
    who: Identity, packed: bytes, expires: float, seq: int = 1, admission: bytes = b""
) -> bytes:
    return seal(
        who, RecordStore(RUN, DirectorySettings()).key, wrap(admission, packed), seq, expires
    )


class FakeP2P:
    """Keeps the handlers that a protocol registers, and delivers nothing."""

    peer_id = PeerID.from_base58(ALICE.peer_id)

    async def add_protobuf_handler(self, *args: Any, **kwargs: Any) -> None: ...


def called_by(who: Identity) -> P2PContext:
    return P2PContext("", FakeP2P.peer_id, PeerID.from_base58(who.peer_id))


class Node:
    def __init__(
        self, protocol: guard.SwarmProtocol, record_store: RecordStore, postings: TopicStore
    ) -> None:
        self.protocol = protocol
        self.record_store = record_store
        self.postings = postings
        self.context = called_by(BOB)

    def store(
        self, value: bytes, expires: float, subkey: bytes = b"", key: bytes = KEY, **extra: Any
    ):
        request = dht_pb2.StoreRequest(
            keys=[key],
            subkeys=[subkey or pack(str(BOB.peer_id))],
            values=[value],
            expiration_time=[expires],
            in_cache=[False],
        )
        request.MergeFrom(dht_pb2.StoreRequest(**extra))
        return self.protocol.rpc_store(request, self.context)

    @property
    def stored(self) -> int:
        item = self.protocol.storage.get(DHTID.from_bytes(KEY))
        return len(item.value) if item is not None else 0


@pytest.fixture
async def node() -> Node:
    return await make_node()


async def make_node(
    gate: Gate | None = None,
    tell: Any = lambda *said: None,
    admission: bytes = b"",
    company: Company = NO_COMPANY,
    max_up: float = 0.0,
    **settings: Any,
) -> Node:
    knobs = DirectorySettings(**settings)
    clock = HeldClock(held_now=0.0)  # only the number of requests counts
    record_store = RecordStore(RUN, knobs, admit=gate.admit if gate else None)
    me = guard.node_id_of(FakeP2P.peer_id)
    admit = gate.admit if gate else None
    door = AdmissionFilter(clock, admit, admission, tell, company, max_up)
    postings = TopicStore(RUN, knobs, admit=gate.admit if gate else None)
    validator = guard.EnvelopeValidator(record_store, clock, knobs.max_record, door, postings)
    protocol = await guard.SwarmProtocol.create(
        FakeP2P(), me, 20, 5, 5, 3, record_validator=validator
    )
    assert isinstance(protocol, guard.SwarmProtocol)
    return Node(protocol, record_store, postings)


def nested(depth: int) -> bytes:
    """Extensions inside each other."""
    value: Any = None
    for _ in range(depth):
        value = msgpack.ExtType(0x40, msgpack.packb([value]))
    return msgpack.packb(value)


@pytest.mark.parametrize("depth", [guard.MAX_NESTING + 1, 50, 2000])
def test_over_nested_extensions_are_refused(depth: int) -> None:
    with pytest.raises(ValueError, match="inside each other"):
        MSGPackSerializer.loads(nested(depth))
    assert MSGPackSerializer.loads(pack(((1,), (2, (3,))))) == (
        (1,),
        (2, (3,)),
    )  # and the next message is read again


async def test_over_nested_requests_are_refused_and_the_node_lives(node: Node, body) -> None:
    deep = nested(300)
    expires = until()
    good = pack(sealed(BOB, body().pack(), expires))
    assert list((await node.store(deep, expires)).store_ok) == [False]
    assert list((await node.store(good, expires, subkey=deep)).store_ok) == [False]
    whole = dht_pb2.StoreRequest(
        keys=[KEY], subkeys=[b""], values=[deep], expiration_time=[expires], in_cache=[False]
    )
    assert list((await node.protocol.rpc_store(whole, node.context)).store_ok) == [False]
    assert list((await node.store(good, expires)).store_ok) == [True]


async def test_everything_that_is_not_our_record_is_refused(node: Node, body) -> None:
    expires = until()
    good = pack(sealed(BOB, body().pack(), expires))
    packed = body().pack()
    for attempt in (
        node.store(pack(bytes(1 << 20)), expires),  # a megabyte
        node.store(pack(sealed(BOB, b" " * (1 << 20), expires)), expires),  # signed, but a megabyte
        node.store(
            pack(sealed(ALICE, packed, expires)), expires
        ),  # somebody else's record under this name
        node.store(
            good, expires, subkey=pack(str(ALICE.peer_id))
        ),  # this record under somebody else's name
        node.store(good, expires, subkey=pack(None)),  # no name at all
        node.store(good, expires, subkey=pack([str(BOB.peer_id)])),
        node.store(good, expires, subkey=b"\xc1"),
        node.store(good, expires, subkey=pack("x" * 5000)),
        node.store(good, expires, key=DHTID.generate(source="something else").to_bytes()),
        node.store(good, expires, key=OWN_OF_BOB),  # nobody stores what only its writer gives
        node.store(good + b"\x00", expires),
        node.store(good, expires + 60),  # a longer life than was signed
        node.store(pack({"a": 1}), expires),
        node.store(pack("text"), expires),
        node.store(b"", expires),
    ):
        assert not any((await attempt).store_ok)
    assert len(node.protocol.storage) == 0


async def test_a_bad_record_in_a_dictionary_does_not_hide_good_ones(node: Node, body) -> None:
    expires = until()
    local_checkpoints = DictionaryDHTValue()
    local_checkpoints.store(str(BOB.peer_id), pack(sealed(BOB, body().pack(), expires)), expires)
    local_checkpoints.store(str(ALICE.peer_id), pack(sealed(BOB, body().pack(), expires)), expires)
    local_checkpoints.store("stranger", pack(b"?"), 2.0**62)
    local_checkpoints.latest_expiration_time = math.inf
    assert node.protocol._validate_dictionary(KEY, local_checkpoints)
    assert list(local_checkpoints.data) == [str(BOB.peer_id)]
    assert local_checkpoints.latest_expiration_time == expires
    hostile = DictionaryDHTValue()
    hostile.store("stranger", pack(b"?"), expires)
    assert not node.protocol._validate_dictionary(KEY, hostile)
    assert not node.protocol._validate_dictionary(KEY, ["no dictionary"])


async def test_a_found_dictionary_lives_only_as_long_as_its_records(node: Node, body) -> None:
    expires = until()
    local_checkpoints = DictionaryDHTValue()
    local_checkpoints.store(str(BOB.peer_id), pack(sealed(BOB, body().pack(), expires)), expires)
    bob = PeerID.from_base58(BOB.peer_id)
    alice = PeerID.from_base58(ALICE.peer_id)
    result = dht_pb2.FindResult(
        type=dht_pb2.FOUND_DICTIONARY, value=pack(local_checkpoints), expiration_time=math.inf
    )
    for claimed, peer in ((guard.node_id_of(bob), bob), (DHTID.generate(), alice)):
        result.nearest_node_ids.append(claimed.to_bytes())
        result.nearest_peer_ids.append(peer.to_bytes())
    found = AsyncMock(return_value=dht_pb2.FindResponse(results=[result]))
    node.protocol.get_stub = lambda peer: SimpleNamespace(rpc_find=found)
    key = DHTID.from_bytes(KEY)
    item, nearest = (await node.protocol.call_find(bob, [key]))[key]
    assert (item.expiration_time, nearest) == (expires, {guard.node_id_of(bob): bob})


async def test_requests_are_bounded(node: Node, body) -> None:
    expires = until()
    value = pack(sealed(BOB, body().pack(), expires))
    many = guard.MAX_KEYS + 1
    flood = dht_pb2.StoreRequest(
        keys=[KEY] * many,
        subkeys=[pack(str(BOB.peer_id))] * many,
        values=[value] * many,
        expiration_time=[expires] * many,
        in_cache=[False] * many,
    )
    assert not any((await node.protocol.rpc_store(flood, node.context)).store_ok)
    cached = dht_pb2.StoreRequest(
        keys=[KEY],
        subkeys=[pack(str(BOB.peer_id))],
        values=[value],
        expiration_time=[expires],
        in_cache=[True],
    )
    assert not any((await node.protocol.rpc_store(cached, node.context)).store_ok)
    assert not (
        await node.protocol.rpc_find(dht_pb2.FindRequest(keys=[KEY] * many), node.context)
    ).results
    assert not any(
        (await node.store(value, expires, keys=[KEY])).store_ok
    )  # lists of unequal length
    assert node.stored == 0


async def test_a_place_in_the_dht_cannot_be_chosen(node: Node, body) -> None:
    bob = PeerID.from_base58(BOB.peer_id)
    mine = guard.node_id_of(FakeP2P.peer_id).to_bytes()
    expires = until()
    good = pack(sealed(BOB, body().pack(), expires))
    for elsewhere in (
        DHTID.generate().to_bytes(),
        guard.node_id_of(FakeP2P.peer_id).to_bytes(),
        KEY,
    ):
        chosen = dht_pb2.NodeInfo(node_id=elsewhere)
        reply = await node.protocol.rpc_ping(dht_pb2.PingRequest(peer=chosen), node.context)
        assert (reply.peer.node_id, reply.available) == (mine, False)
        assert not any((await node.store(good, expires, peer=chosen)).store_ok)
        assert not (
            await node.protocol.rpc_find(dht_pb2.FindRequest(keys=[KEY], peer=chosen), node.context)
        ).results
    await node.protocol.update_routing_table(DHTID.generate(), bob)
    await asyncio.sleep(0)  # what the parent does in tasks of its own
    assert not node.protocol.routing_table.uid_to_peer_id
    stored = AsyncMock(return_value=dht_pb2.StoreResponse(store_ok=[True]))
    node.protocol.get_stub = lambda peer: SimpleNamespace(rpc_store=stored)
    own = dht_pb2.NodeInfo(node_id=guard.node_id_of(bob).to_bytes())
    assert list((await node.store(good, expires, peer=own)).store_ok) == [True]
    for _ in range(5):
        await asyncio.sleep(0)
    assert node.protocol.routing_table.peer_id_to_uid == {bob: guard.node_id_of(bob)}


async def test_a_peer_that_asks_too_often_is_limited_alone(node: Node, body) -> None:
    told: list[tuple[str, ...]] = []
    node = await make_node(tell=lambda *said: told.append(said))
    expires = until()
    good = pack(sealed(BOB, body().pack(), expires))
    assert list((await node.store(good, expires)).store_ok) == [True]
    find = dht_pb2.FindRequest(keys=[KEY] * 2)
    for _ in range(2 * round(REQUESTS_AT_ONCE)):
        limited = await node.protocol.rpc_find(find, node.context)
    assert [r.type for r in limited.results] == [dht_pb2.NOT_FOUND] * 2, (
        "as many results as keys, or we would seem gone"
    )
    assert not (await node.store(good, expires)).store_ok[0]
    assert {said[:2] for said in told} == {(BOB.peer_id, "rate-limited")}
    other = await node.protocol.rpc_find(find, called_by(ALICE))
    assert [r.type for r in other.results] == [dht_pb2.FOUND_DICTIONARY] * 2


@pytest.mark.parametrize("kind", ["too many keys", "another id", "store without records"])
async def test_requests_that_nobody_would_answer_are_counted_too(kind: str) -> None:
    """And no token is looked at of a request too many."""
    gate = SimpleNamespace(admit=Mock(return_value=math.inf))
    node: Any = await make_node(gate=cast(Gate, gate))
    keys = [KEY]
    peer = dht_pb2.NodeInfo()
    if kind == "too many keys":
        keys = [KEY] * (guard.MAX_KEYS + 1)
    elif kind == "another id":
        peer = dht_pb2.NodeInfo(node_id=KEY)
    ask = partial(node.protocol.rpc_find, dht_pb2.FindRequest(keys=keys, peer=peer))
    if kind == "store without records":
        ask = partial(node.protocol.rpc_store, dht_pb2.StoreRequest())
    for _ in range(2 * round(REQUESTS_AT_ONCE)):
        await ask(node.context)
    assert node.protocol._door.refusals == {"requests": REQUESTS_AT_ONCE}
    assert gate.admit.call_count == REQUESTS_AT_ONCE


def dictionary_of(writers: list[Identity], packed: bytes, expires: float) -> bytes:
    found = DictionaryDHTValue()
    for who in writers:
        found.store(str(who.peer_id), pack(sealed(who, packed, expires)), expires)
    return pack(found)


async def test_one_connection_fills_nothing_but_its_own_place(node: Node, body) -> None:
    expires = until()
    packed = body().pack()
    crowd = [Identity.ephemeral() for _ in range(3 * OTHERS)]
    for who in crowd[:OTHERS]:
        await node.store(pack(sealed(who, packed, expires)), expires, pack(str(who.peer_id)))
    whole = dictionary_of(crowd, packed, expires)
    request = dht_pb2.StoreRequest(
        keys=[KEY], subkeys=[b""], values=[whole], expiration_time=[expires], in_cache=[False]
    )
    await node.protocol.rpc_store(request, node.context)
    assert len(node.record_store) == node.stored == OTHERS
    assert node.protocol._door.refusals["places"] >= OTHERS
    own = pack(sealed(BOB, packed, expires))
    assert list((await node.store(own, expires)).store_ok) == [True]


async def test_a_record_that_loses_its_place_is_not_passed_on(body) -> None:
    node = await make_node(max_peers=4)
    expires = until()
    packed = body().pack()
    for _ in range(20):
        who = Identity.ephemeral()
        node.context = called_by(who)
        own = pack(sealed(who, packed, expires))
        assert list((await node.store(own, expires, pack(str(who.peer_id)))).store_ok) == [True]
    assert len(node.record_store) == node.stored == 4
    held = node.protocol.storage.get(DHTID.from_bytes(KEY))
    assert held is not None
    assert set(node.record_store.entries(time.time())) == set(held.value.data)


async def test_a_record_that_is_stored_again_takes_no_more_memory(node: Node, body) -> None:
    expires = until()
    good = pack(sealed(BOB, body().pack(), expires))
    for _ in range(50):
        assert list((await node.store(good, expires)).store_ok) == [True]
    held = node.protocol.storage.get(DHTID.from_bytes(KEY))
    assert held is not None
    assert len(held.value.expiration_heap) == len(node.protocol.storage.expiration_heap) == 1


async def test_what_is_no_dictionary_is_not_stored(node: Node) -> None:
    for hostile in (b"", b"\xc1", msgpack.packb([1, 2]), msgpack.packb([1, 2, 3]), b"\x93\x01"):
        raw = msgpack.packb(msgpack.ExtType(0x50, hostile))
        assert not node.protocol._keep(KEY, b"", raw, until())
    assert not len(node.protocol.storage)


async def test_a_long_answer_costs_its_asker_more_than_a_short_one(node: Node, body) -> None:
    expires = until()
    packed = body().pack()
    for who in [Identity.ephemeral() for _ in range(400)]:
        node.protocol.storage.store_subkey(
            DHTID.from_bytes(KEY), str(who.peer_id), pack(sealed(who, packed, expires)), expires
        )
    answers = 0
    for _ in range(round(REQUESTS_AT_ONCE)):
        found = await node.protocol.rpc_find(dht_pb2.FindRequest(keys=[KEY] * 8), node.context)
        answers += found.results[0].type == dht_pb2.FOUND_DICTIONARY
    assert 1 < answers < REQUESTS_AT_ONCE / 4
    assert node.protocol._door.refusals["requests"] == REQUESTS_AT_ONCE - answers


def keep_records_of(node: Node, writers: list[Identity], body: Any) -> None:
    expires = until()
    for who in writers:
        record = pack(sealed(who, body().pack(), expires))
        node.protocol.storage.store_subkey(DHTID.from_bytes(KEY), str(who.peer_id), record, expires)


def writers_in(found: dht_pb2.FindResponse) -> set[str]:
    answer = RecordSerializer.loads(found.results[0].value)
    return {str(writer) for writer in answer.data}


async def test_an_answer_holds_few_records_of_writers_that_were_never_met(body) -> None:
    members = [Identity.ephemeral() for _ in range(STRANGER_RECORDS - 10)]
    met = [Identity.ephemeral() for _ in range(5)]
    unmet = [Identity.ephemeral() for _ in range(2 * UNMET_RECORDS)]
    established = {who.peer_id for who in members}
    proven = {who.peer_id for who in met}
    company = Company(lambda peer: peer in established, lambda peer: peer in proven)
    node = await make_node(company=company)
    keep_records_of(node, unmet + met + members, body)
    known = {str(who.peer_id) for who in members + met}
    find = dht_pb2.FindRequest(keys=[KEY])
    to_stranger = writers_in(await node.protocol.rpc_find(find, node.context))
    assert known <= to_stranger
    assert len(to_stranger) == STRANGER_RECORDS
    established.add(BOB.peer_id)
    to_member = writers_in(await node.protocol.rpc_find(find, node.context))
    assert known <= to_member
    assert len(to_member) == len(known) + UNMET_RECORDS


async def test_the_own_record_is_in_every_answer(body) -> None:
    node = await make_node()
    made_up = [Identity.ephemeral() for _ in range(2 * UNMET_RECORDS)]
    keep_records_of(node, made_up, body)
    key = DHTID.from_bytes(KEY)
    own = FakeP2P.peer_id.to_base58()
    node.protocol.storage.store_subkey(key, own, pack(b"own"), until())
    found = await node.protocol.rpc_find(dht_pb2.FindRequest(keys=[KEY]), node.context)
    assert own in writers_in(found)


async def test_answers_to_strangers_leave_most_of_a_cap_and_each_gets_one(body) -> None:
    cap = 100_000.0
    node = await make_node(max_up=cap)
    keep_records_of(node, [Identity.ephemeral() for _ in range(STRANGER_RECORDS)], body)
    answered = Counter[str]()
    lengths: list[int] = []
    find = dht_pb2.FindRequest(keys=[KEY])
    crowd = [Identity.ephemeral() for _ in range(8)]
    greedy = [crowd[0], crowd[1]] * 20
    for who in [*greedy, *crowd]:
        found = await node.protocol.rpc_find(find, called_by(who))
        if found.results[0].type == dht_pb2.FOUND_DICTIONARY:
            answered[who.peer_id] += 1
            lengths.append(len(writers_in(found)))
    assert len(answered) == 8, "none is kept from joining by the others"
    assert lengths[0] == STRANGER_RECORDS
    assert lengths[-1] == SURE_RECORDS
    assert answered[crowd[0].peer_id] + answered[crowd[1].peer_id] <= 1 + 2 * 2
    assert node.protocol._door.refusals["answers"] > 0
    moved = 0
    for who in [Identity.ephemeral() for _ in range(100)]:
        moved += (await node.protocol.rpc_find(find, called_by(who))).ByteSize()
    assert moved <= STRANGERS_SHARE * STRANGERS_S * cap, "however many there are"


class Near:
    """A node that is new near a key and takes all records that are offered to it."""

    def __init__(self, node: Node) -> None:
        self.writers: list[set[str]] = []
        node.protocol.get_stub = lambda peer: SimpleNamespace(rpc_store=self.stored)

    async def stored(self, request: dht_pb2.StoreRequest, timeout: float) -> dht_pb2.StoreResponse:
        for value in request.values:
            self.writers.append(set(map(str, RecordSerializer.loads(value).data)))
        return dht_pb2.StoreResponse(store_ok=[True] * len(request.keys))


async def test_a_node_that_is_new_near_a_key_is_offered_few_records(body) -> None:
    members = [Identity.ephemeral() for _ in range(OTHERS // 2)]
    established = {who.peer_id for who in members}
    node = await make_node(company=Company(lambda peer: peer in established), max_up=100_000.0)
    keep_records_of(node, [*(Identity.ephemeral() for _ in range(200)), *members], body)
    orders = DHTID.generate(source="orders")
    owner = str(ALICE.peer_id)
    node.protocol.storage.store_subkey(orders, owner, pack(b"order"), until())
    near = Near(node)
    for who in [Identity.ephemeral() for _ in range(20)]:
        peer = PeerID.from_base58(who.peer_id)
        await node.protocol.update_routing_table(guard.node_id_of(peer), peer)
        for _ in range(5):
            await asyncio.sleep(0)
    few, many = near.writers[:2]
    assert few == {owner}
    assert {str(who.peer_id) for who in members} <= many
    assert len(many) == OTHERS - 1
    assert 2 <= len(near.writers) < 20, "strangers get no more than answers to them may hold"


PAIR = "outer/7/all"


def key_bytes(topic: str, run: RunId = RUN) -> bytes:
    return DHTID.generate(source=topics.key_of(run, topic)).to_bytes()


def posting(
    who: Identity, expires: float, topic: str = PAIR, said: str = "", run: RunId = RUN
) -> bytes:
    """A posting signed for `topic` of `run`, presented as one for `said`."""
    raw = seal(who, topics.key_of(run, topic), wrap(b"", b"here"), 1, expires)
    return pack(topics.wrap(said or topic, raw))


async def test_hostile_postings_are_refused(node: Node, body) -> None:
    expires = until()
    elsewhere = RunId("cd" * 32)
    good = posting(BOB, expires)
    key = key_bytes(PAIR)
    peers = key_bytes("peers")
    oversized = seal(BOB, topics.key_of(RUN, PAIR), wrap(b"", bytes(2049)), 1, expires)
    unheard = seal(BOB, f"tutti/{RUN}/other/7", wrap(b"", b"here"), 1, expires)
    for attempt in (
        node.store(posting(BOB, expires, run=elsewhere), expires, key=key_bytes(PAIR, elsewhere)),
        node.store(posting(BOB, expires, run=elsewhere), expires, key=key),
        node.store(posting(BOB, expires, "outer/8/all", PAIR), expires, key=key),
        node.store(posting(BOB, expires, PAIR, "outer/8/all"), expires, key=key),
        node.store(good, expires, key=key_bytes("outer/8/all")),
        node.store(good, expires, key=peers),
        node.store(posting(BOB, expires, "peers"), expires, key=peers),
        node.store(pack(sealed(BOB, body().pack(), expires)), expires, key=key),
        node.store(
            pack(b"other/7\n" + unheard),
            expires,
            key=DHTID.generate(source=f"tutti/{RUN}/other/7").to_bytes(),
        ),
        node.store(pack(topics.wrap(PAIR, oversized)), expires, key=key),
        node.store(pack(topics.wrap(PAIR, bytes(1 << 20))), expires, key=key),
        node.store(good[:-1] + b"!", expires, key=key),
        node.store(posting(ALICE, expires), expires, key=key),  # under Bob's name
        node.store(good, expires, key=key, subkey=pack(str(ALICE.peer_id))),
        node.store(good, expires + 60, key=key),
    ):
        assert not any((await attempt).store_ok)
    assert (len(node.protocol.storage), len(node.postings)) == (0, 0)
    assert (await node.store(good, expires, key=key)).store_ok[0]


async def test_the_directory_of_a_private_run_is_closed_to_strangers(body) -> None:
    owner = Identity.ephemeral()
    expires = until()
    told = []
    gate = Gate(RUN, owner.peer_id, private=True)
    token = admission_token(owner, RUN, BOB.peer_id, time.time() + 60)
    node = await make_node(gate, tell=lambda *said: told.append(said))
    auth = {"client_access_token": {"signature": token}}
    good = pack(sealed(BOB, body().pack(), expires, admission=token))
    claim = dht_pb2.NodeInfo(node_id=guard.node_id_of(PeerID.from_base58(BOB.peer_id)).to_bytes())

    assert list((await node.store(good, expires)).store_ok) == [False], "no token in the request"
    without = pack(sealed(BOB, body().pack(), expires))
    assert list((await node.store(without, expires, auth=auth)).store_ok) == [False], (
        "no token in the record"
    )
    assert list((await node.store(good, expires, auth=auth, peer=claim)).store_ok) == [True]
    assert list(node.record_store.entries(time.time())) == [BOB.peer_id]

    find = dht_pb2.FindRequest(keys=[KEY], auth=auth)
    (found,) = (await node.protocol.rpc_find(find, node.context)).results
    assert found.type == dht_pb2.FOUND_DICTIONARY
    thief = called_by(ALICE)  # knows the run and has read the token somewhere
    for answer in (
        await node.protocol.rpc_find(find, thief),
        await node.protocol.rpc_ping(dht_pb2.PingRequest(auth=auth, peer=claim), thief),
        await node.protocol.rpc_find(dht_pb2.FindRequest(keys=[KEY]), node.context),
    ):
        assert answer.ByteSize() == 0, "neither a record nor a neighbour nor our own place"
    assert {said[1] for said in told} == {"not-admitted"}
    assert (await node.protocol.rpc_ping(dht_pb2.PingRequest(), called_by(owner))).peer.node_id


async def test_validator_refuses_what_is_not_bytes(node: Node) -> None:
    validator = node.protocol.record_validator
    assert validator is not None
    for subkey, value, expires in (
        (None, b"", 1.0),
        (b"", None, 1.0),
        (pack("x"), pack(b"x"), "soon"),
    ):
        assert not validator.validate(DHTRecord(KEY, subkey, value, expires))  # type: ignore


def dictionary(*records: Any) -> bytes:
    """A dictionary of records as hivemind packs it, with any values as records."""
    body = msgpack.packb([math.inf, until(), list(records)])
    return msgpack.packb(msgpack.ExtType(0x50, body))


def test_a_dictionary_comes_back_as_it_was_packed() -> None:
    made = DictionaryDHTValue()
    expires = until()
    for name in ("alice", "bob"):
        made.store(name, name.encode(), expires)
    found = guard.RecordSerializer.loads(pack(made))
    assert dict(found.items()) == dict(made.items())
    assert found.latest_expiration_time == made.latest_expiration_time


def test_of_a_long_dictionary_the_first_records_are_looked_at() -> None:
    rows = [[f"{i}", b"", until()] for i in range(guard.MAX_ENTRIES + 9)]
    assert len(guard.RecordSerializer.loads(dictionary(*rows)).data) == guard.MAX_ENTRIES


@pytest.mark.parametrize(
    "raw",
    [
        msgpack.packb([[]] * 100_000),  # containers cost fifty times their bytes
        msgpack.packb({i: [] for i in range(1000)}),
        msgpack.packb(msgpack.ExtType(0x40, msgpack.packb([1]))),
        dictionary([]),
        dictionary(["name", [], until()]),
        dictionary(["name", {}, until()]),
        dictionary(["name", b"", "soon"]),
        dictionary(["name", msgpack.ExtType(0x50, b""), until()]),
        dictionary(["name", bytes(guard.MAX_VALUE + 1), until()]),
        dictionary(["n" * 200, b"", until()]),
        msgpack.packb(msgpack.ExtType(0x50, b"")),
        msgpack.packb(msgpack.ExtType(0x50, msgpack.packb([1, 2]))),
        msgpack.packb(msgpack.ExtType(0x50, bytes(guard.MAX_DICTIONARY + 1))),
    ],
    ids=lambda raw: f"{len(raw)} bytes",
)
def test_what_is_no_dictionary_of_records_is_refused_before_it_is_built(raw: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - msgpack's own, and ours
        guard.RecordSerializer.loads(raw)


@pytest.mark.parametrize(
    "result",
    [
        dht_pb2.FindResult(nearest_node_ids=[b"a"] * (guard.MAX_NEAREST + 1)),
        dht_pb2.FindResult(nearest_peer_ids=[b"a"] * (guard.MAX_NEAREST + 1)),
        dht_pb2.FindResult(nearest_node_ids=[bytes(guard.MAX_ID + 1)]),
    ],
    ids=["nodes", "peers", "long"],
)
async def test_an_answer_that_names_too_many_nodes_is_none(
    node: Node, result: dht_pb2.FindResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    bob = PeerID.from_base58(BOB.peer_id)
    key = DHTID.from_bytes(KEY)
    answers = [dht_pb2.FindResult(type=dht_pb2.NOT_FOUND), result]
    stub = SimpleNamespace(
        rpc_find=AsyncMock(side_effect=[dht_pb2.FindResponse(results=[r]) for r in answers])
    )
    monkeypatch.setattr(guard.DHTProtocol, "get_stub", lambda self, peer: stub)
    assert await node.protocol.call_find(bob, [key]) == {key: (None, {})}
    assert await node.protocol.call_find(bob, [key]) is None
