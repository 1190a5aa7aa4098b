"""hivemind's DHT, made to distrust what strangers send.

``install()`` before the first node starts: it bounds how deep msgpack extensions may nest (each
level is a C stack frame in hivemind's decoder, which runs before any validator is asked), and makes
nodes speak :class:`SwarmProtocol`, which limits requests and keeps only the records that the
validator accepts.

In a private run every request carries the caller's admission token, in a field of hivemind's
messages that nobody else uses here. A token names its peer, and libp2p has proven who calls, so it
need not be kept secret.
"""

# hivemind ships no types for its generated messages.
# pyright: reportAttributeAccessIssue=false

import contextlib
import itertools
import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import node.core.bare  # noqa: F401  first: hivemind without its averager and optimizer

# isort: split
import hivemind.dht.node
import msgpack
from hivemind.dht.crypto import DHTRecord, RecordValidatorBase
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DictionaryDHTValue
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from hivemind.utils.timed_storage import ValueWithExpiration, get_dht_time

from node.core.clock import Clock
from node.core.errors import Refused, WireError
from node.core.ids import PeerId, short
from node.dht.record_store import Admit, RecordStore, TopicStore
from node.dht.room import NO_COMPANY, OTHERS, Company, NoRoom, Source
from node.dht.topics import key_of, unwrap
from node.identity.faults import TokenBucket

MAX_NESTING = 4
"""Extensions inside extensions; a dictionary of records needs one."""
MAX_DICTIONARY = 4 << 20
"""Bytes of a dictionary of records: those of 512 writers take 2 MiB at most."""
MAX_KEYS = 8
"""Keys in one request; we use one, and every key of a search costs a whole dictionary in the
answer."""
MAX_ENTRIES = 1024
"""Records in one dictionary, as many as a node keeps under one key; more are not even looked at. A
signature takes about 0.1 ms."""
MAX_SUBKEY = 128
"""Bytes of a packed subkey; a PeerId has 52."""
MAX_NEAREST, MAX_ID = 64, 64
"""Nodes near a key in one answer, and bytes of the id of each. hivemind makes objects of all of
them, which takes seconds for a million."""
MAX_VALUE = 8192
"""Bytes of a packed value; a record has at most 4 KiB."""
REQUESTS_PER_S, REQUESTS_AT_ONCE = 50.0, 100.0
"""DHT requests of one established peer: sustained rate, and burst. Reading and posting every few
seconds takes one or two a second."""
STRANGERS_PER_S = 10.0
"""Sustained rate for a stranger, with the same burst."""
ANSWER_BYTES = 1 << 16
"""Bytes of an answer that cost an established asker as much as one request."""
STRANGER_BYTES = 1 << 12
"""Bytes of an answer that cost a stranger as much as one request."""
UNMET_RECORDS = 32
"""Records in an answer whose writers this peer has not met. A writer that exists is met by the
peers that it dials, and they pass its record on. A member reads 16 KiB of such records from each of
five nodes every few seconds, which a thin line can bear."""
STRANGER_RECORDS = 64
"""Records in an answer to a stranger: enough to join by. A shorter answer stays as it is."""
SURE_RECORDS = 8
"""Records in an answer that a stranger gets although answers to strangers are too many: some
members to join by."""
STRANGERS_UP = 1 << 20
"""Bytes a second of answers to all strangers together, where the operator set no cap."""
STRANGERS_SHARE = 0.1
"""Share of the operator's cap for these answers."""
STRANGERS_S = 4.0
"""Seconds of these answers that may go at once."""
SURE_EVERY_S = 10.0
"""Seconds after which a stranger may have a short answer although others have used up the share of
all strangers, so that they cannot keep it from joining. Two may go at once. Together these answers
have a share of the same size; when they need more, the strangers that ask first get them."""
BROUGHT_PER_S = 1.0
"""Rate at which one peer may store records of writers that are new here, beside its own; it may
store :data:`OTHERS` at once."""

Tell = Callable[[PeerId, str, str], None]
"""``tell(peer, kind, text)`` records something a peer did."""

_depth = threading.local()
_decode_unbounded = MSGPackSerializer._decode_ext_types.__func__


def _decode_bounded(cls: type[MSGPackSerializer], type_code: int, data: bytes) -> Any:
    depth = getattr(_depth, "value", 0)
    if depth >= MAX_NESTING:
        raise ValueError(f"more than {MAX_NESTING} msgpack extensions inside each other")
    _depth.value = depth + 1
    try:
        return _decode_unbounded(cls, type_code, data)
    finally:
        _depth.value = depth


def install() -> None:
    """Put the bounds in place, for every DHT node of this process. Safe to call again."""
    MSGPackSerializer._decode_ext_types = classmethod(_decode_bounded)
    hivemind.dht.node.DHTProtocol = SwarmProtocol
    # Whatever a stranger sends may end up in these lines, and a stranger decides how many there
    # are.
    logging.getLogger("hivemind.utils.serializer").setLevel(logging.ERROR)


@lru_cache(maxsize=4096)  # every answer names some nodes, again and again the same
def node_id_of(peer: PeerID) -> DHTID:
    """The place of a peer in the DHT: a hash of its PeerId, so that a peer has one place. Whoever
    makes many keys finds some whose places are next to a key (:mod:`node.dht.walk`)."""
    return DHTID.generate(source=b"tutti/node/" + peer.to_bytes())


@lru_cache(maxsize=4096)  # a node compares a question with the keys of all its own records
def own_key(key: str, writer: str) -> DHTID:
    """The key under which the node ``writer`` gives its own record of the topic ``key``. Nothing is
    posted there."""
    return DHTID.generate(source=f"{key}/{writer}")


def _refuse_extension(code: int, data: bytes) -> Any:
    raise ValueError("no extensions inside a record")


def _unpack_flat(packed: bytes, longest: int) -> Any:
    """One msgpack scalar; raises WireError for containers, extensions, anything longer, or bytes
    left over."""
    if not isinstance(packed, bytes) or len(packed) > longest + 5:
        raise WireError(f"not a packed value of at most {longest} bytes")
    try:
        return msgpack.unpackb(
            packed,
            raw=False,
            ext_hook=_refuse_extension,
            max_str_len=longest,
            max_bin_len=longest,
            max_array_len=0,
            max_map_len=0,
            max_ext_len=0,
        )
    except (ValueError, TypeError, msgpack.UnpackException) as e:
        raise WireError("not a packed scalar") from e


def unpack_dictionary(data: bytes) -> DictionaryDHTValue:
    """The first :data:`MAX_ENTRIES` records of a dictionary as hivemind packs it. Raises WireError
    for anything else, before objects are made of it: [size, expiry, [[subkey, value, expiry], …]].
    """
    if len(data) > MAX_DICTIONARY:
        raise WireError(f"a dictionary of {len(data)} bytes, at most {MAX_DICTIONARY} are read")
    packed = msgpack.Unpacker(
        raw=False,
        ext_hook=_refuse_extension,
        max_buffer_size=MAX_DICTIONARY,
        read_size=1 << 14,
        max_str_len=MAX_SUBKEY,
        max_bin_len=MAX_VALUE,
        max_array_len=0,
        max_map_len=0,
        max_ext_len=0,
    )
    packed.feed(data)
    try:
        size = float(_triple(packed))
        expires = float(packed.unpack())
        count = packed.read_array_header()
        found = DictionaryDHTValue(size)
        with found.freeze():
            for _ in range(min(count, MAX_ENTRIES)):
                writer = _triple(packed)
                value = packed.unpack()
                until = packed.unpack()
                if not isinstance(writer, str) or not isinstance(value, bytes):
                    raise ValueError("not the record of a writer")
                found.store(writer, value, float(until))
        found.latest_expiration_time = expires
    except (ValueError, TypeError, msgpack.UnpackException) as e:
        raise WireError("not a dictionary of records") from e
    return found


def _triple(packed: msgpack.Unpacker) -> Any:
    """The first of three values. Raises ValueError where others stand."""
    if packed.read_array_header() != 3:
        raise ValueError("expected three values")
    return packed.unpack()


def _dictionary(code: int, data: bytes) -> Any:
    if code != MSGPackSerializer._ext_types[DictionaryDHTValue]:
        raise ValueError("an extension that is no dictionary of records")
    return unpack_dictionary(data)


class RecordSerializer(MSGPackSerializer):
    """hivemind's serializer for what others send: a value or a dictionary of records, and no other
    container."""

    @classmethod
    def loads(cls, buf: bytes) -> Any:
        """Raises ValueError for bytes that are neither."""
        return msgpack.loads(
            buf,
            ext_hook=_dictionary,
            raw=False,
            max_str_len=MAX_SUBKEY,
            max_bin_len=MAX_VALUE,
            max_array_len=0,
            max_map_len=0,
            max_ext_len=MAX_DICTIONARY,
        )


class AdmissionFilter:
    """Checks and makes the admission tokens of DHT requests, and limits how often a peer may ask
    and store. ``admit`` raises Refused for a peer that the run does not admit (None: an open run),
    ``admission`` is our own token. ``max_up``: bytes a second that this peer sends at most; 0: no
    cap. ``refusals`` counts by kind."""

    def __init__(
        self,
        clock: Clock,
        admit: Admit | None = None,
        admission: bytes = b"",
        tell: Tell = lambda peer, kind, text: None,
        company: Company = NO_COMPANY,
        max_up: float = 0.0,
    ) -> None:
        self._clock, self._admit, self._admission, self._tell = clock, admit, admission, tell
        self._company = company
        strangers_up = STRANGERS_SHARE * max_up or STRANGERS_UP
        self._answers = TokenBucket(strangers_up, STRANGERS_S * strangers_up)
        self._sure = TokenBucket(1 / SURE_EVERY_S, 2.0)
        self._rate = TokenBucket(REQUESTS_PER_S, REQUESTS_AT_ONCE)
        self._strangers = TokenBucket(STRANGERS_PER_S, REQUESTS_AT_ONCE)
        self._brought = TokenBucket(BROUGHT_PER_S, OTHERS)
        self.refusals: Counter[str] = Counter()
        self.on_refusal: Callable[[PeerId], None] = lambda peer: None
        """Told of each peer that was refused."""

    def refuse(self, kind: str, peer: PeerId) -> None:
        """Count a refusal."""
        self.refusals[kind] += 1
        self.on_refusal(peer)

    def admits(self, caller: PeerID, request: Any) -> bool:
        """Whether the caller belongs to the run, by the token in its request."""
        if self._admit is None:
            return True
        peer = PeerId(caller.to_base58())
        try:
            self._admit(peer, request.auth.client_access_token.signature, self._clock.wall())
        except Refused as e:
            self.refuse("not admitted", peer)
            self._tell(peer, "not-admitted", f"{short(peer)} may not use the directory: {e.what}")
            return False
        return True

    def in_time(self, caller: PeerID, cost: float = 1.0) -> bool:
        """Count a request that costs as much as ``cost`` usual ones; False when it is one too
        many."""
        peer = PeerId(caller.to_base58())
        if self._bucket(peer).allow(peer, self._clock.now(), cost):
            return True
        self.refuse("requests", peer)
        self._tell(
            peer, "rate-limited", f"{short(peer)} sends too many DHT requests; some are refused"
        )
        return False

    def may_answer(self, caller: PeerID, nbytes: int) -> bool:
        """Count an answer of ``nbytes``; False when those to strangers are too many already."""
        peer = PeerId(caller.to_base58())
        now = self._clock.now()
        if self._company.established(peer):
            self._rate.charge(peer, now, nbytes / ANSWER_BYTES)
            return True
        self._strangers.charge(peer, now, nbytes / STRANGER_BYTES)
        return self._answers.allow(_USUAL, now, nbytes)

    def may_have_short_answer(self, caller: PeerID) -> bool:
        """Count a short answer to a stranger that gets no usual one; False when it has had its
        answers lately. It counts also if :meth:`may_answer_shortly` refuses it then: so each
        stranger has the same chance, however often it asks."""
        peer = PeerId(caller.to_base58())
        if self._sure.allow(peer, self._clock.now()):
            return True
        self.refuse("answers", peer)
        return False

    def may_answer_shortly(self, caller: PeerID, nbytes: int) -> bool:
        """Count a short answer of ``nbytes``; False when those to strangers are too many
        already."""
        if self._answers.allow(_SHORT, self._clock.now(), nbytes):
            return True
        self.refuse("answers", PeerId(caller.to_base58()))
        return False

    def passed_on(
        self, caller: PeerID, writers: Iterable[str], me: PeerID, most: int | None = None
    ) -> list[str]:
        """The ``writers`` whose records ``caller`` gets: ``me`` and established ones, those that
        were met, and at most :data:`UNMET_RECORDS` others, each group by lot. ``most`` of these are
        passed on; None: to a stranger the first :data:`STRANGER_RECORDS`, to others all."""
        company = self._company
        if most is None and not company.established(PeerId(caller.to_base58())):
            most = STRANGER_RECORDS
        own = me.to_base58()
        mine: list[str] = []
        established: list[str] = []
        met: list[str] = []
        others: list[str] = []
        for writer in writers:
            if writer == own:
                mine.append(writer)
            elif company.established(PeerId(writer)):
                established.append(writer)
            elif company.proven(PeerId(writer)):
                met.append(writer)
            else:
                others.append(writer)
        for group in (established, met, others):
            random.shuffle(group)
        found = mine + established + met + others[:UNMET_RECORDS]
        return found[:most]

    def source(self, peer: PeerID, *, asked: bool = False) -> Source:
        """The source of records that a connected peer brings."""
        who = PeerId(peer.to_base58())
        return Source(who, self._company.block(who), asked)

    def may_bring(self, source: Source) -> bool:
        """Count a record that a peer stores and that a new writer made; False when it is one too
        many."""
        return self._brought.allow(source.peer, self._clock.now())

    def _bucket(self, peer: PeerId) -> TokenBucket:
        if self._company.established(peer):
            return self._rate
        return self._strangers

    def label(self, stub: Any) -> Any:
        """``stub`` with our token in every request."""
        if self._admission:
            return _Labelled(stub, self._admission)
        return stub


_USUAL = PeerId("usual")
_SHORT = PeerId("short")
"""The names under which the usual answers to all strangers share a bucket, and the short ones."""


class _Labelled:
    """A stub that adds a token to what it sends."""

    def __init__(self, stub: Any, token: bytes) -> None:
        self._stub, self._token = stub, token

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._stub, name)

        async def labelled(request: Any, **options: Any) -> Any:
            request.auth.client_access_token.signature = self._token
            return await call(request, **options)

        return labelled


class _Bounded:
    """A stub whose answers name a few nodes near each key; others raise WireError."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stub, name)

    async def rpc_find(self, request: Any, *, timeout: float) -> Any:
        answer = await self._stub.rpc_find(request, timeout=timeout)
        for result in answer.results[: len(request.keys)]:
            for near in (result.nearest_node_ids, result.nearest_peer_ids):
                if len(near) > MAX_NEAREST or any(len(n) > MAX_ID for n in near):
                    raise WireError("an answer that names too many nodes")
        return answer


@dataclass(frozen=True, slots=True)
class _Change:
    """A record that a store keeps from now on, packed. ``value`` None: it has lost its place."""

    key: str
    writer: str
    value: bytes | None = None
    expires: float = 0.0


class EnvelopeValidator(RecordValidatorBase):
    """Lets through what the stores take: our signed records, under our keys and the signer's
    PeerId; nothing else.

    ``door`` decides who may ask for and store them.
    """

    def __init__(
        self,
        record_store: RecordStore,
        clock: Clock,
        max_record: int,
        door: AdmissionFilter,
        topics: TopicStore,
    ) -> None:
        self._topics, self.door = topics, door
        self._record_store, self._clock, self._max_record = record_store, clock, max_record
        self._key = DHTID.generate(source=record_store.key).to_bytes()
        self.changes: list[_Change] = []
        """Records that were kept, and records that lost their places to others, since it was last
        emptied."""
        record_store.on_drop = topics.on_drop = self._dropped

    def _dropped(self, key: str, writer: str, evicted: bool) -> None:
        if evicted:
            self.changes.append(_Change(key, writer))

    def validate(self, record: DHTRecord) -> bool:
        """Return True for a record that may be stored and passed on."""
        try:
            self.offer(record)
        except NoRoom:
            self._refuse("places")
            return False
        except WireError:
            self._refuse("records")
            return False
        return True

    def _refuse(self, kind: str) -> None:
        """Count a record that a peer stores; those in an answer are nobody's request."""
        source = _source.get()
        if source is not None and not source.asked:
            self.door.refuse(kind, source.peer)

    def offer(self, record: DHTRecord) -> bool:
        """Offer a record to its store; True when it is news. Raises WireError, NoRoom."""
        writer = _unpack_flat(record.subkey, MAX_SUBKEY)
        raw = _unpack_flat(record.value, self._max_record)
        expires = record.expiration_time
        if not isinstance(writer, str) or not isinstance(raw, bytes):
            raise WireError("not a record of ours")
        if not isinstance(expires, float):
            raise WireError("a record without a time until which it is stored")
        now, source = self._clock.wall(), _source.get()
        key = self._record_store.key
        if record.key == self._key or self._is_own(record.key, key, writer, source):
            self._check_bearer(source, writer, writer in self._record_store)
            news = self._record_store.offer(writer, raw, expires, now, source)
        else:
            topic, sealed = unwrap(raw)
            key = key_of(self._topics.run_id, topic)
            under = DHTID.generate(source=key).to_bytes()
            if record.key != under and not self._is_own(record.key, key, writer, source):
                raise WireError("not the key of this topic in this run")
            self._check_bearer(source, writer, self._topics.knows(topic, writer))
            news = self._topics.offer(topic, writer, sealed, expires, now, source)
        if news:
            self.changes.append(_Change(key, writer, record.value, expires))
        return news

    def _is_own(self, asked: bytes, key: str, writer: str, source: Source | None) -> bool:
        """Return True for a record under ``key`` that this node has asked its writer for."""
        if source is None or not source.asked or source.peer != writer:
            return False
        return asked == own_key(key, writer).to_bytes()

    def own(self, key: DHTID) -> Any:
        """A dictionary of the own record, if ``key`` asks for that, else None."""
        for name, writer, raw, expires in self._own_records():
            if key == own_key(name, writer):
                found = DictionaryDHTValue()
                found.store(writer, MSGPackSerializer.dumps(raw), expires)
                return found
        return None

    def _own_records(self) -> Iterator[tuple[str, PeerId, bytes, float]]:
        """The own records: key, writer, bytes and expiry."""
        own = self._record_store.own()
        if own is not None:
            yield self._record_store.key, *own
        yield from self._topics.own()

    def _check_bearer(self, source: Source | None, writer: str, known: bool) -> None:
        """Raises NoRoom, before a signature is checked, when a peer stores too many records of
        others."""
        if source is None or source.asked or known or source.peer == writer:
            return
        if not self.door.may_bring(source):
            raise NoRoom(f"{short(source.peer)} stores too many records of others")


_source: ContextVar[Source | None] = ContextVar("source", default=None)
"""The peer whose records are being looked at."""


@contextlib.contextmanager
def _from(source: Source) -> Iterator[None]:
    token = _source.set(source)
    try:
        yield
    finally:
        _source.reset(token)


class SwarmProtocol(DHTProtocol):
    """hivemind's protocol with limits. Its other name keeps nodes without them from taking part."""

    # hivemind caches these on the class; inherited, they would still carry the parent's name.
    _rpc_handlers = None
    _stub_type = None
    serializer = RecordSerializer

    @property
    def _validator(self) -> EnvelopeValidator:
        return cast(EnvelopeValidator, self.record_validator)

    @property
    def _door(self) -> AdmissionFilter:
        return self._validator.door

    def _welcome(self, context: P2PContext) -> "_Welcome":
        return _Welcome(context.handle_name, context.local_id, context.remote_id)

    def get_stub(self, peer: PeerID) -> Any:
        return _Bounded(self._door.label(super().get_stub(peer)))

    async def rpc_ping(
        self, request: dht_pb2.PingRequest, context: P2PContext
    ) -> dht_pb2.PingResponse:
        if not isinstance(context, _Welcome):
            refusal = dht_pb2.PingResponse(
                peer=self.node_info, dht_time=get_dht_time(), available=False
            )
            # First of all: each other check costs more.
            if not self._door.in_time(context.remote_id):
                return refusal
            if not self._door.admits(context.remote_id, request):
                return dht_pb2.PingResponse()
            if _pretender(request.peer, context):
                return refusal
        return await super().rpc_ping(request, context)

    async def rpc_store(
        self, request: dht_pb2.StoreRequest, context: P2PContext
    ) -> dht_pb2.StoreResponse:
        count = len(request.keys)
        refusal = [False] * min(count, MAX_KEYS)
        if not self._door.in_time(context.remote_id, max(1, count)):
            return dht_pb2.StoreResponse(store_ok=refusal, peer=self.node_info)
        if not self._door.admits(context.remote_id, request):
            return dht_pb2.StoreResponse(store_ok=refusal)
        aligned = (
            count
            == len(request.subkeys)
            == len(request.values)
            == len(request.expiration_time)
            == len(request.in_cache)
        )
        if (
            not aligned
            or count > MAX_KEYS
            or any(request.in_cache)
            or _pretender(request.peer, context)
        ):
            return dht_pb2.StoreResponse(store_ok=refusal, peer=self.node_info)
        if request.peer.node_id:
            # As in the parent, the caller enters the routing table.
            ping = dht_pb2.PingRequest(peer=request.peer)
            await self.rpc_ping(ping, self._welcome(context))
        with _from(self._door.source(context.remote_id)):
            stored = [
                self._keep(*one)
                for one in zip(
                    request.keys,
                    request.subkeys,
                    request.values,
                    request.expiration_time,
                    strict=True,
                )
            ]
        return dht_pb2.StoreResponse(store_ok=stored, peer=self.node_info)

    def _keep(self, key: bytes, tag: bytes, value: bytes, expires: float) -> bool:
        """Store a record, or the good ones of a dictionary; False when nothing was stored."""
        try:
            if tag != self.IS_DICTIONARY:
                if not self._validate_record(key, tag, value, expires):
                    return False
                writer: Any = self.serializer.loads(tag)
                return self.keep(DHTID.from_bytes(key), writer, value, expires)
            dictionary: Any = self.serializer.loads(value)
            if not self._validate_dictionary(key, dictionary):
                return False
            good = list(dictionary.items())
            return all([self.keep(DHTID.from_bytes(key), subkey, *item) for subkey, item in good])
        except (ValueError, TypeError, AttributeError, msgpack.UnpackException):
            return False
        finally:
            self._follow_stores()

    def keep(self, key: DHTID, writer: str, value: bytes, expires: float) -> bool:
        """Pass on a record from now on that was validated, or is the own one. hivemind's storage
        grows with every call until the record expires, also when it keeps what it has, so it is not
        called for the same record."""
        held = self.storage.get(key)
        if held is not None and isinstance(held.value, DictionaryDHTValue):
            old = held.value.get(writer)
            if old is not None and old.expiration_time >= expires:
                return old.value == value
        return self.storage.store_subkey(key, writer, value, expires)

    def _follow_stores(self) -> None:
        """Pass on the records that the stores keep, also those that were read, and drop those that
        lost their places."""
        changes = self._validator.changes
        for change in changes:
            key = DHTID.generate(source=change.key)
            if change.value is not None:
                self.keep(key, change.writer, change.value, change.expires)
                continue
            held = self.storage.get(key)
            records: Any = None
            if held is not None:
                records = held.value
            if isinstance(records, DictionaryDHTValue):
                del records[change.writer]
        changes.clear()

    async def rpc_find(
        self, request: dht_pb2.FindRequest, context: P2PContext
    ) -> dht_pb2.FindResponse:
        # An answer of the right length: to hivemind another one would mean that we are gone.
        missing = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
        count = min(len(request.keys), MAX_KEYS)
        nothing = dht_pb2.FindResponse(results=[missing] * count, peer=self.node_info)
        asker = context.remote_id
        if not self._door.in_time(asker):
            return nothing
        if not self._door.admits(asker, request):
            return dht_pb2.FindResponse()
        if len(request.keys) > MAX_KEYS or _pretender(request.peer, context):
            return dht_pb2.FindResponse(results=[], peer=self.node_info)
        if request.peer.node_id:
            ping = dht_pb2.PingRequest(peer=request.peer)
            await self.rpc_ping(ping, self._welcome(context))
        answer = self._answer(request, asker)
        if self._door.may_answer(asker, answer.ByteSize()):
            return answer
        if not self._door.may_have_short_answer(asker):
            return nothing
        answer = self._answer(request, asker, SURE_RECORDS)
        if not self._door.may_answer_shortly(asker, answer.ByteSize()):
            return nothing
        return answer

    def _answer(
        self, request: dht_pb2.FindRequest, asker: PeerID, most: int | None = None
    ) -> dht_pb2.FindResponse:
        """The answer to ``asker``: records under each key, and the nodes near it. ``most``: records
        of a key; None: the usual number."""
        asking = DHTID.from_bytes(request.peer.node_id)
        answer = dht_pb2.FindResponse(results=[], peer=self.node_info)
        for key in map(DHTID.from_bytes, request.keys):
            result = dht_pb2.FindResult(type=dht_pb2.NOT_FOUND)
            held = self.storage.get(key)
            if held is not None and isinstance(held.value, DictionaryDHTValue):
                records = self._passed_on(held.value, asker, most)
            else:
                records = self._validator.own(key)
            if records is not None:
                result = dht_pb2.FindResult(
                    type=dht_pb2.FOUND_DICTIONARY,
                    value=self.serializer.dumps(records),
                    expiration_time=records.latest_expiration_time,
                )
            near = self.routing_table.get_nearest_neighbors(key, self.bucket_size, exclude=asking)
            for neighbour, peer in near:
                result.nearest_node_ids.append(neighbour.to_bytes())
                result.nearest_peer_ids.append(peer.to_bytes())
            answer.results.append(result)
        return answer

    def _passed_on(
        self, records: DictionaryDHTValue, peer: PeerID, most: int | None
    ) -> DictionaryDHTValue:
        """The records that ``peer`` gets of these; ``most`` as in
        :meth:`AdmissionFilter.passed_on`."""
        if most is None and len(records) <= STRANGER_RECORDS:
            return records
        short = DictionaryDHTValue()
        writers = map(str, records.data)
        me: Any = self.p2p.peer_id
        for writer in self._door.passed_on(peer, writers, me, most):
            record = records.get(writer)
            if record is not None:
                short.store(writer, record.value, record.expiration_time)
        return short

    async def call_store(
        self, peer: PeerID, keys: Any, values: Any, *rest: Any, **named: Any
    ) -> list[bool] | None:
        """As the parent, which offers all that it keeps to a node that is new near some keys. Such
        a node gets no more records than it takes from one peer, those under the keys with the
        fewest first, and they count as an answer."""
        offered = list(zip(keys, values, strict=True))
        if not any(isinstance(value, DictionaryDHTValue) for _, value in offered):
            return await super().call_store(peer, keys, values, *rest, **named)
        offered.sort(key=lambda one: len(one[1]))
        left = OTHERS
        passed_on: list[tuple[DHTID, DictionaryDHTValue]] = []
        for key, records in offered[:MAX_KEYS]:
            short = self._passed_on(records, peer, left)
            left -= len(short)
            passed_on.append((key, short))
        good = [(key, short) for key, short in passed_on if len(short)]
        nbytes = sum(len(self.serializer.dumps(short)) for _, short in good)
        if not good or not self._door.may_answer(peer, nbytes):
            return None
        expirations = [short.latest_expiration_time for _, short in good]
        new_keys, new_values = zip(*good, strict=True)
        return await super().call_store(peer, new_keys, new_values, expirations)

    async def call_find(self, peer: PeerID, keys: Collection[DHTID]) -> Any:
        """As the parent, but an answer lives as long as its records, not as long as its sender
        says."""
        with _from(self._door.source(peer, asked=True)):
            found = await super().call_find(peer, keys)
        self._follow_stores()
        if found is None:
            return None
        answers: dict[Any, Any] = {}
        for key, (item, nearest) in found.items():
            records = None
            if item is not None and isinstance(item.value, DictionaryDHTValue):
                records = ValueWithExpiration(item.value, item.value.latest_expiration_time)
            closest = itertools.islice(nearest.items(), self.bucket_size)
            answers[key] = (records, {n: p for n, p in closest if n == node_id_of(p)})
        return answers

    async def update_routing_table(
        self, node_id: DHTID | None, peer_id: PeerID, responded: bool = True
    ) -> None:
        if node_id is None or node_id == node_id_of(peer_id):
            await super().update_routing_table(node_id, peer_id, responded)

    def _validate_dictionary(self, key_bytes: bytes, dictionary: Any) -> bool:
        """Keep the good records of a dictionary; True when there are any.

        The parent refuses the whole dictionary for one bad record, so that a single record that
        expired on its way, or is older than what we know, would hide everybody else's.
        """
        if not isinstance(dictionary, DictionaryDHTValue):
            return False
        with dictionary.freeze():
            offered = [(subkey, value, expires) for subkey, (value, expires) in dictionary.items()]
            dictionary.clear()
            dictionary.maxsize, dictionary.latest_expiration_time = float("inf"), float("-inf")
            for subkey, value, expires in offered:
                if isinstance(subkey, str) and self._validate_record(
                    key_bytes, self.serializer.dumps(subkey), value, expires
                ):
                    dictionary.store(subkey, value, expires)
        return bool(dictionary.data)


class _Welcome(P2PContext):
    """The context of a caller that was let in: the parent pings in its name, which is no second
    request."""


def _pretender(claim: dht_pb2.NodeInfo, context: P2PContext) -> bool:
    """Does the caller claim a place in the DHT that is not its own?"""
    return bool(claim.node_id) and claim.node_id != node_id_of(context.remote_id).to_bytes()
