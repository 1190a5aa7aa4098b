"""What is posted in one run's directory, as far as this peer has heard: decides which records
stand, and how long the own ones hold.

Pure: time is an argument, and nothing is sent or fetched here. The adapter and the fake both feed
it.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic

from node.core.errors import Refused, UsageFault, WireError
from node.core.ids import PeerId, RunId
from node.dht.record import B, DirectoryEntry, PeerBody, Posting, unwrap, wrap
from node.dht.room import NO_COMPANY, Company, NoRoom, Room, Source
from node.dht.settings import DirectorySettings
from node.dht.topics import MAX_POSTING, PEERS, key_of, most_writers
from node.dht.topics import wrap as wrap_topic
from node.identity.keys import Identity
from node.identity.records import open_record, seal

POSTINGS_EACH = 64
"""Records of one peer under topics that this node does not use itself. A leader posts a dozen."""
SLACK_S = 0.001
"""A record may be stored until this much beside its signed expiry: what a float loses on its
way."""


Admit = Callable[[PeerId, bytes, float], float]
"""``admit(writer, token, now)``: the Unix time until which the writer may take part. Raises
Refused."""
OnDrop = Callable[[str, str, bool], None]
"""``on_drop(key, writer, evicted)`` is told of a record that is no longer kept. ``evicted``: its
place went to another record before it expired."""


@dataclass(frozen=True, slots=True)
class _Posted(Generic[B]):
    raw: bytes
    seq: int
    not_after: float
    entry: DirectoryEntry[B] | None
    """None for a withdrawal, which is kept until it expires so that no older record can take its
    place."""
    admitted: float = math.inf
    """Unix time from which on the writer is no part of the run."""


class _Records(Generic[B]):
    """The newest valid record of every writer under one key.

    Sequence numbers are remembered per writer for as long as an older record could still be valid;
    after that an old record is refused because it has expired. So the memory is bounded, and a
    writer whose clock was set back is heard again after one life of a record. ``most`` strangers
    are remembered, as many established writers of ``company``, and always ``me``; with one record
    of at most ``max_record`` bytes each, that is all the memory that others can take.
    ``read(body)`` raises WireError for a body of another kind. ``admit`` decides whose records
    stand in a private run; None: everybody's.
    """

    def __init__(
        self,
        key: str,
        settings: DirectorySettings,
        most: int,
        read: Callable[[bytes], B],
        me: PeerId | None = None,
        admit: Admit | None = None,
        *,
        company: Company = NO_COMPANY,
    ) -> None:
        self.key, self._me, self._admit = key, me, admit
        self._settings, self._read = settings, read
        self._room = Room[str](most, company)
        self.on_drop: OnDrop = lambda key, writer, evicted: None
        self._posted: dict[str, _Posted[B]] = {}

    def offer(
        self, writer: str, raw: bytes, expires: float, now: float, source: Source | None = None
    ) -> bool:
        """Consider a sealed record found under subkey ``writer``, stored until ``expires`` (Unix
        seconds, as ``now``). ``source``: the peer that it came from; None: its writer.

        True when it is news, False when it was known. Raises WireError when it must not be stored
        or passed on: too large, expired or living too long, not signed by ``writer`` for this
        board, stored for another time than was signed, older than what the writer has posted
        since, without a valid admission, or not a body of its kind; NoRoom for one writer too many.
        """
        limit = self._settings
        if not now < expires <= now + limit.max_ttl_s:  # false for NaN as well
            raise WireError(f"a record lives at most {limit.max_ttl_s:.0f} s from now")
        known = self._posted.get(writer)
        if known is not None and known.not_after <= now:
            self.drop(writer)
            known = None
        if known is not None and known.raw == raw and abs(known.not_after - expires) <= SLACK_S:
            return False  # saves checking the same signature at every reading
        peer = PeerId(writer)
        newest = -1
        if known is not None:
            newest = known.seq
        record = open_record(
            raw,
            key=self.key,
            writer=peer,
            now_wall=now,
            max_ttl_s=limit.max_ttl_s,
            max_bytes=limit.max_record,
            newest=newest,
        )
        if abs(record.not_after - expires) > SLACK_S:
            raise WireError(
                "a record is stored for as long as its writer signed, not for longer or shorter"
            )
        token, body = unwrap(record.body)
        admitted = self._admitted(peer, token, now)
        entry = None
        if body:
            entry = DirectoryEntry(peer, self._read(body), record.seq, record.not_after)
        if peer != self._me:
            self._enter(peer, source, now)
        self._posted[writer] = _Posted(raw, record.seq, record.not_after, entry, admitted)
        return True

    def _enter(self, writer: PeerId, source: Source | None, now: float) -> None:
        """Take a place for a record. Raises NoRoom."""
        try:
            evicted = self._room.enter(writer, writer, source)
        except NoRoom:
            if self.soonest > now:
                raise
            self.forget_expired(now)
            evicted = self._room.enter(writer, writer, source)
        if evicted is not None:
            self.drop(evicted, evicted=True)

    def drop(self, writer: str, *, evicted: bool = False) -> None:
        """Forget a writer's record, if there is one."""
        self._room.leave(writer)
        if self._posted.pop(writer, None) is not None:
            self.on_drop(self.key, writer, evicted)

    def _admitted(self, peer: PeerId, token: bytes, now: float) -> float:
        """Our own records stand whatever others think of our token. Raises WireError."""
        if self._admit is None or peer == self._me:
            return math.inf
        try:
            return self._admit(peer, token, now)
        except Refused as e:
            raise WireError(f"a record of somebody who is no part of this run: {e.what}") from e

    def own(self) -> tuple[PeerId, bytes, float] | None:
        """Writer, bytes and expiry of the own record, withdrawn or not; None if there is none."""
        me = self._me
        if me is None or me not in self._posted:
            return None
        posted = self._posted[me]
        return me, posted.raw, posted.not_after

    def newest(self, writer: PeerId) -> tuple[int, float]:
        """Sequence number and expiry of the writer's newest record, withdrawn or not; zeros for
        none."""
        posted = self._posted.get(writer)
        if posted is None:
            return 0, 0.0
        return posted.seq, posted.not_after

    def entries(self, now: float) -> dict[PeerId, DirectoryEntry[B]]:
        """Everybody admitted whose record holds at ``now`` and is not withdrawn, in PeerId
        order."""
        self.forget_expired(now)
        present = [
            p.entry for p in self._posted.values() if p.entry is not None and p.admitted > now
        ]
        return {entry.peer: entry for entry in sorted(present, key=lambda entry: entry.peer)}

    def __len__(self) -> int:
        return len(self._posted)

    def __contains__(self, writer: str) -> bool:
        return writer in self._posted

    @property
    def soonest(self) -> float:
        """When the first of the records expires, Unix seconds."""
        return min((posted.not_after for posted in self._posted.values()), default=math.inf)

    def forget_expired(self, now: float) -> None:
        """What holds no longer takes no room."""
        for writer in [w for w, posted in self._posted.items() if posted.not_after <= now]:
            self.drop(writer)


class RecordStore(_Records[PeerBody]):
    """What every peer of a run says of itself."""

    def __init__(
        self,
        run_id: RunId,
        settings: DirectorySettings,
        me: PeerId | None = None,
        admit: Admit | None = None,
        *,
        company: Company = NO_COMPANY,
    ) -> None:
        most, key = settings.max_peers, key_of(run_id, PEERS)
        super().__init__(key, settings, most, PeerBody.parse, me, admit, company=company)


def _posting(body: bytes) -> bytes:
    if len(body) > MAX_POSTING:
        raise WireError(f"a posting has at most {MAX_POSTING} bytes, not {len(body)}")
    return body


class TopicStore:
    """What is posted under other topics of a run.

    Each topic takes as many strangers as its kind has room for (``topics.WRITERS``), and as many
    established writers. All topics together take ``max_postings`` records of strangers,
    :data:`POSTINGS_EACH` of one peer, and as many of established writers. The records under topics
    that this node uses itself (:meth:`use`) do not count there, and those of ``me`` stand in any
    case. What has expired is dropped at the next call, whatever topic that is about.
    """

    def __init__(
        self,
        run_id: RunId,
        settings: DirectorySettings,
        me: PeerId | None = None,
        admit: Admit | None = None,
        *,
        company: Company = NO_COMPANY,
    ) -> None:
        self.run_id, self._settings, self._me, self._admit = run_id, settings, me, admit
        self._company = company
        self.on_drop: OnDrop = lambda key, writer, evicted: None
        self._room = Room[tuple[str, str]](settings.max_postings, company, POSTINGS_EACH)
        self._topics: dict[str, _Records[bytes]] = {}
        self._used: dict[str, float] = {}
        """Until when a topic counts as the node's own, Unix seconds."""
        self._soonest = math.inf

    def use(self, topic: str, now: float) -> None:
        """This node posts or looks under ``topic``, which counts as its own for one longest life of
        a record. Raises WireError for what is no topic to post under."""
        most_writers(topic)
        self._used = {t: until for t, until in self._used.items() if until > now}
        self._used[topic] = now + self._settings.max_ttl_s

    def offer(
        self,
        topic: str,
        writer: str,
        sealed: bytes,
        expires: float,
        now: float,
        source: Source | None = None,
    ) -> bool:
        """Consider a sealed record; as :meth:`RecordStore.offer`. Raises WireError also for what is
        no topic."""
        self.forget_expired(now)
        records = self._topics.get(topic) or self._records_of(topic)
        news = records.offer(writer, sealed, expires, now, source)
        self._topics[topic] = records  # only now: what is refused takes no room
        self._soonest = min(self._soonest, expires - SLACK_S)
        if news and writer != self._me and self._used.get(topic, 0.0) <= now:
            try:
                evicted = self._room.enter((topic, writer), PeerId(writer), source)
            except NoRoom:
                self._drop(topic, writer)
                raise
            if evicted is not None:
                self._drop(*evicted)
        return news

    def _drop(self, topic: str, writer: str) -> None:
        records = self._topics[topic]
        records.drop(writer, evicted=True)
        if not len(records):
            del self._topics[topic]

    def _records_of(self, topic: str) -> _Records[bytes]:
        """No records yet, under a topic. Raises WireError for what is no topic."""

        def dropped(key: str, writer: str, evicted: bool) -> None:
            self._room.leave((topic, writer))
            self.on_drop(key, writer, evicted)

        made = _Records(
            key_of(self.run_id, topic),
            self._settings,
            most_writers(topic),
            _posting,
            self._me,
            self._admit,
            company=self._company,
        )
        made.on_drop = dropped
        return made

    def own(self) -> Iterator[tuple[str, PeerId, bytes, float]]:
        """The own records under topics: key, writer, the bytes as they are stored there, expiry."""
        for topic in self._used:
            records = self._topics.get(topic)
            if records is not None and (own := records.own()) is not None:
                writer, sealed, expires = own
                yield key_of(self.run_id, topic), writer, wrap_topic(topic, sealed), expires

    def knows(self, topic: str, writer: str) -> bool:
        """Return True if a record of ``writer`` is kept under ``topic``."""
        records = self._topics.get(topic)
        return records is not None and writer in records

    def newest(self, topic: str, writer: PeerId) -> tuple[int, float]:
        """As :meth:`RecordStore.newest`."""
        records = self._topics.get(topic)
        if records is not None:
            return records.newest(writer)
        return (0, 0.0)

    def entries(self, topic: str, now: float) -> dict[PeerId, Posting]:
        """Everybody's posting under a topic that holds at ``now``, in PeerId order."""
        self.forget_expired(now)
        records = self._topics.get(topic)
        if records is None:
            return {}
        return records.entries(now)

    def __len__(self) -> int:
        return sum(map(len, self._topics.values()))

    def forget_expired(self, now: float) -> None:
        """What holds no longer takes no room."""
        if now < self._soonest:
            return
        for records in self._topics.values():
            records.forget_expired(now)
        self._topics = {topic: records for topic, records in self._topics.items() if len(records)}
        self._soonest = min((r.soonest for r in self._topics.values()), default=math.inf)


class Author:
    """Seals one identity's records for one run's directory, each newer and longer-lived than the
    one before under its topic.

    Sequence numbers are the milliseconds of the writer's wall clock, so they keep growing over
    restarts without a file. The expiry must grow too: storages keep whichever record expires later.
    Raises UsageFault for a life that others would refuse. ``admission`` is the writer's token for a
    private run, part of every record.
    """

    def __init__(
        self,
        identity: Identity,
        run_id: RunId,
        settings: DirectorySettings,
        admission: bytes = b"",
    ) -> None:
        if not 0 < settings.ttl_s <= settings.max_ttl_s:
            raise UsageFault(
                f"ttl_s {settings.ttl_s} is not between 0 and max_ttl_s {settings.max_ttl_s}",
                "lower ttl_s",
            )
        self._identity, self._run_id = identity, run_id
        self._settings, self._admission = settings, admission

    def seal(
        self,
        body: bytes,
        now: float,
        heard: tuple[int, float] = (0, 0.0),
        times: float = 1.0,
        topic: str = PEERS,
    ) -> tuple[bytes, float]:
        """The sealed record of ``body`` (empty: a withdrawal) and the Unix time until which it
        holds: ``times`` ``ttl_s`` from now, as far as others take it.

        ``heard`` is the number and expiry of the newest own record that is known under the topic:
        also after a restart with a clock that was set back, others still hold that one.
        """
        # what is rounded below must not live longer than others take
        longest = self._settings.max_ttl_s - 0.001
        life = min(times * self._settings.ttl_s, longest)
        until, after_last = now + life, heard[1] + 0.002
        # further off: the clock was wrong, nobody took it
        if until < after_last <= now + longest:
            until = after_last
        # within SLACK_S of board.py, and the same number on every way it travels
        not_after = round(until, 3)
        key, sealed = key_of(self._run_id, topic), wrap(self._admission, body)
        seq = max(heard[0] + 1, int(now * 1000))
        return seal(self._identity, key, sealed, seq, not_after), not_after
