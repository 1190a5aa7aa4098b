"""The directory inside one process: the same records and the same checks, without a network."""

import contextlib
from dataclasses import dataclass, field

from node.core.clock import Clock
from node.core.errors import WireError
from node.core.ids import PeerId, RunId
from node.dht.record import PeerBody, PeerEntry, Posting, peers_among
from node.dht.record_store import Admit, Author, RecordStore, TopicStore
from node.dht.settings import DirectorySettings
from node.dht.topics import PEERS, check_posting, key_of
from node.identity.keys import Identity

SEAL = 180
"""Bytes of a record beside its body: signature, key, numbers, admission."""


@dataclass
class Wall:
    """Where the directories of one process pin their sealed records: (key, subkey) -> (record,
    expiry)."""

    pinned: dict[tuple[str, str], tuple[bytes, float]] = field(default_factory=dict)
    down: bool = False
    """Nobody reaches it: records of others stay as they were last heard."""


class MemoryDirectory:
    """A directory over a shared :class:`Wall`. Unlike the real one it does not refresh by itself:
    time is the test's."""

    def __init__(
        self,
        identity: Identity,
        settings: DirectorySettings,
        clock: Clock,
        run_id: RunId,
        wall: Wall,
        admit: Admit | None = None,
        admission: bytes = b"",
    ) -> None:
        self.me = identity.peer_id
        self._clock = clock
        self._wall = wall
        self._record_store = RecordStore(run_id, settings, self.me, admit)
        self._author = Author(identity, run_id, settings, admission)
        self._topics = TopicStore(run_id, settings, self.me, admit)
        self._ttl_s = settings.ttl_s
        self._published = self._closed = False
        self._topic = PEERS

    @property
    def neighbours(self) -> int:
        """Everybody at the wall."""
        return len({writer for _, writer in self._wall.pinned})

    async def publish(self, body: PeerBody, times: float = 1.0, topic: str = PEERS) -> bool:
        """See ``DirectoryPort``. Raises WireError for a body that others would refuse."""
        packed = body.pack()
        if topic != self._topic:
            await self.withdraw()
        self._published = True
        self._topic = topic
        return self._post(packed, times)

    async def withdraw(self) -> None:
        if self._published:
            self._published = False
            self._post(b"")

    async def read(self, topic: str = PEERS) -> dict[PeerId, PeerEntry]:
        if topic != PEERS:
            return peers_among(await self.look(topic))
        now = self._clock.wall()
        for writer, raw, expires in self._found(self._record_store.key, now):
            with contextlib.suppress(WireError):
                self._record_store.offer(writer, raw, expires, now)
        return self._record_store.entries(now)

    async def post(self, topic: str, body: bytes, life_s: float) -> bool:
        """See ``DirectoryPort``."""
        check_posting(body, life_s)
        return self._put(topic, body, life_s / self._ttl_s)

    def _put(self, topic: str, body: bytes, times: float) -> bool:
        now = self._clock.wall()
        self._topics.use(topic, now)
        heard = self._topics.newest(topic, self.me)
        raw, expires = self._author.seal(body, now, heard, times, topic)
        self._topics.offer(topic, self.me, raw, expires, now)
        return self._pin(key_of(self._topics.run_id, topic), raw, expires)

    async def look(self, topic: str) -> dict[PeerId, Posting]:
        """See ``DirectoryPort``."""
        now = self._clock.wall()
        self._topics.use(topic, now)
        for writer, raw, expires in self._found(key_of(self._topics.run_id, topic), now):
            with contextlib.suppress(WireError):
                self._topics.offer(topic, writer, raw, expires, now)
        return self._topics.entries(topic, now)

    async def close(self) -> None:
        self._closed = True

    def _post(self, packed: bytes, times: float = 1.0) -> bool:
        if self._topic != PEERS:
            return self._put(self._topic, packed, times)
        now = self._clock.wall()
        raw, expires = self._author.seal(packed, now, self._record_store.newest(self.me), times)
        self._record_store.offer(self.me, raw, expires, now)
        return self._pin(self._record_store.key, raw, expires)

    def _found(self, key: str, now: float) -> list[tuple[str, bytes, float]]:
        """Writer, record and expiry of each valid record pinned under a key."""
        if self._wall.down or self._closed:
            return []
        pinned = self._wall.pinned.items()
        return [(w, raw, until) for (k, w), (raw, until) in pinned if k == key and until > now]

    def _pin(self, key: str, raw: bytes, expires: float) -> bool:
        if self._wall.down or self._closed:
            return False
        self._wall.pinned[key, str(self.me)] = raw, expires
        return True
