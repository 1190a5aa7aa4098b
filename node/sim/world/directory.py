"""The directory of the simulated swarm: records with an end, spread with a delay, kept apart by
walls, each key held by the nodes next to it.

A record carries its writer's wall clock, and a reader judges it by its own, as on the real board: a
reader far ahead takes everybody's records for expired.
"""

import hashlib
from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from node.core.clock import Clock
from node.core.ids import PeerId
from node.dht.record import DirectoryEntry, PeerBody, PeerEntry, Posting
from node.dht.settings import DirectorySettings
from node.dht.topics import PEERS, check_posting, most_writers
from node.sim.world.network import SimLinks, Wall

GONE = "gone"
"""State of a record that was taken down."""
BITS = 64
NEAREST = 8
"""Nodes that hold a key, and that a bucket of a routing table has room for (Kademlia's k)."""


@dataclass(frozen=True, slots=True)
class HeldRecord:
    """A peer's record, or a posting. ``walls``: the walls that stood when it was posted; it never
    reaches the peers behind them."""

    entry: Any
    visible: float
    walls: tuple[Wall, ...]


class SimDht:
    """The posted records of all peers. A reader's view depends on the time, and on the walls
    between it and the writer. ``ring``: the nodes, which hold the keys next to them."""

    def __init__(
        self,
        links: SimLinks,
        settings: DirectorySettings,
        spread_s: float,
        now: Callable[[], float],
    ) -> None:
        self.links = links
        self.settings = settings
        self.now = now
        self._spread = spread_s
        self.ring = Ring()
        self._topics: dict[str, dict[PeerId, list[HeldRecord]]] = defaultdict(dict)
        """Records and postings of each writer, the newest first."""
        self._under: dict[PeerId, str] = {}
        """The topic of each peer's record."""
        self._seq: dict[PeerId, int] = {}
        self.reads: Counter[tuple[PeerId, str]] = Counter()
        """Number of times that a peer has read a topic, and written under it."""
        self.writes: Counter[tuple[PeerId, str]] = Counter()

    def post(
        self, peer: PeerId, body: PeerBody, wall: float, times: float = 1.0, topic: str = PEERS
    ) -> bool:
        """Publish a record; an older one stays for readers that this one does not reach, until it
        expires. A record published under another topic is withdrawn. Returns False if the topic is
        full."""
        if (before := self._under.get(peer, topic)) != topic:
            self.withdraw(peer, wall)
            self.writes[peer, before] += 1
        self.ring.add(peer)
        if not self._room(topic, peer):
            return False
        self._under[peer] = topic
        self._seq[peer] = max(self._seq.get(peer, 0) + 1, int(1000 * wall))
        life = min(times * self.settings.ttl_s, self.settings.max_ttl_s)
        self._hold(topic, DirectoryEntry(peer, body, self._seq[peer], wall + life), wall)
        return True

    def put(self, topic: str, peer: PeerId, body: bytes, wall: float, life_s: float) -> bool:
        """Post under a topic; an older posting stays as an older record does. False where there is
        no room for another writer. Raises WireError for what the real board refuses."""
        check_posting(body, life_s)
        most_writers(topic)
        if not self._room(topic, peer):
            return False
        seq = int(1000 * wall)
        longest = wall + self.settings.max_ttl_s
        until = min(wall + life_s, longest)
        for last in self._topics[topic].get(peer, ())[:1]:  # later in both, as an author sees to
            seq = max(seq, last.entry.seq + 1)
            until = max(until, min(last.entry.not_after + 0.002, longest))
        self._hold(topic, DirectoryEntry(peer, body, seq, until), wall)
        return True

    def withdraw(self, peer: PeerId, wall: float) -> None:
        """Take the record down."""
        if peer in self._under:
            topic = self._under[peer]
            body = self._topics[topic][peer][0].entry.body
            self.post(peer, replace(body, state=GONE), wall, topic=topic)

    def read(self, reader: PeerId, wall: float, topic: str = PEERS) -> dict[PeerId, PeerEntry]:
        """The newest record of every peer under a topic that this reader can see and believes to
        hold, in PeerId order."""
        seen = self._seen(topic, reader, wall).items()
        return {peer: entry for peer, entry in seen if entry.body.state != GONE}

    def look(self, topic: str, reader: PeerId, wall: float) -> dict[PeerId, Posting]:
        """Postings under a topic, as :meth:`read` for records. Raises WireError for an unknown
        topic."""
        most_writers(topic)
        return self._seen(topic, reader, wall)

    def under(self, topic: str) -> list[Any]:
        """The newest record of every writer that is stored under a topic now."""
        newest = [held[0].entry for held in self._topics.get(topic, {}).values()]
        return [entry for entry in newest if entry.not_after > self.now()]

    def _room(self, topic: str, peer: PeerId) -> bool:
        """Return True if this writer may write under a topic. Expired postings are dropped when a
        new writer comes."""
        self.writes[peer, topic] += 1
        posted = self._topics[topic]
        if peer in posted:
            return True
        for name in [p for p, held in posted.items() if held[0].entry.not_after <= self.now()]:
            if self._under.get(name) != topic:
                del posted[name]
        if topic == PEERS:
            most = self.settings.max_peers
        else:
            most = most_writers(topic)
        return len(self.under(topic)) < most

    def _hold(self, topic: str, entry: Any, wall: float) -> None:
        """Of a writer's records each reader sees the newest that has reached it."""
        now = self.now()
        walls = tuple(self.links.walls)
        kept = [HeldRecord(entry, now + self._spread, walls)]
        reached = set[tuple[Wall, ...]]()
        for r in self._topics[topic].get(entry.peer, ()):
            # Of records that reach the same readers the newest that has spread replaces all before
            # it.
            if r.entry.not_after > wall and r.walls not in reached:
                kept.append(r)
                if r.visible <= now:
                    reached.add(r.walls)
        self._topics[topic][entry.peer] = kept

    def _seen(self, topic: str, reader: PeerId, wall: float) -> dict[PeerId, Any]:
        self.reads[reader, topic] += 1
        now = self.now()
        longest = wall + self.settings.max_ttl_s
        seen = dict[PeerId, Any]()
        for peer, held in sorted(self._topics.get(topic, {}).items()):
            for r in held:
                if peer == reader or (
                    r.visible <= now and not any(w.parts(peer, reader) for w in r.walls)
                ):
                    if wall < r.entry.not_after <= longest:
                        seen[peer] = r.entry
                    break
        return seen


class SimDirectory:
    """The board as one peer uses it: :class:`~node.dht.record.DirectoryPort`."""

    def __init__(self, record_store: SimDht, me: PeerId, clock: Clock) -> None:
        self._record_store = record_store
        self._me = me
        self._clock = clock

    async def publish(self, body: PeerBody, times: float = 1.0, topic: str = PEERS) -> bool:
        return self._record_store.post(self._me, body, self._clock.wall(), times, topic)

    @property
    def neighbours(self) -> int:
        return self._record_store.ring.neighbours(self._me)

    async def withdraw(self) -> None:
        self._record_store.withdraw(self._me, self._clock.wall())

    async def read(self, topic: str = PEERS) -> dict[PeerId, PeerEntry]:
        return self._record_store.read(self._me, self._clock.wall(), topic)

    async def post(self, topic: str, body: bytes, life_s: float) -> bool:
        return self._record_store.put(topic, self._me, body, self._clock.wall(), life_s)

    async def look(self, topic: str) -> dict[PeerId, Posting]:
        return self._record_store.look(topic, self._me, self._clock.wall())

    async def close(self) -> None:
        """Nothing is refreshed."""


class Ring:
    """Positions of the nodes on the ring, and the holders of each key. Node ids are hashes of
    names; every node is known to all nodes that have room for it."""

    def __init__(self) -> None:
        self._at: dict[PeerId, int] = {}
        self._sorted: list[tuple[int, PeerId]] = []
        self._neighbours: dict[PeerId, int] = {}

    def add(self, peer: PeerId) -> None:
        """A node takes part from now on."""
        if peer not in self._at:
            self._at[peer] = at = _place(f"tutti/node/{peer}")
            insort(self._sorted, (at, peer))
            self._neighbours = {}

    def neighbours(self, peer: PeerId) -> int:
        """Nodes in the routing table of this peer: for each number of leading bits, at most
        :data:`NEAREST` of the nodes that share exactly this number with it."""
        if peer not in self._neighbours:
            at = self._at.get(peer, _place(f"tutti/node/{peer}"))
            known = 0
            for bit in reversed(range(BITS)):
                first = (at >> bit ^ 1) << bit
                known += min(NEAREST, self._between(first, first + (1 << bit)))
                same = at >> bit << bit
                if self._between(same, same + (1 << bit)) <= 1:
                    break
            self._neighbours[peer] = known
        return self._neighbours[peer]

    def holders(self, topic: str) -> list[PeerId]:
        """The nodes that hold a topic's postings: the nearest ones to its key."""
        key = _place(topic)
        bit = BITS
        low = 0
        high = len(self._sorted)
        # The nodes nearest by XOR share the most leading bits.
        while bit and high - low > NEAREST:
            start = key >> (bit - 1) << (bit - 1)
            lower = self._index(start)
            upper = self._index(start + (1 << (bit - 1)))
            if upper - lower < NEAREST:
                break
            low = lower
            high = upper
            bit = bit - 1
        near = sorted(self._sorted[low:high], key=lambda node: node[0] ^ key)
        return [peer for _, peer in near[:NEAREST]]

    def _between(self, first: int, end: int) -> int:
        return self._index(end) - self._index(first)

    def _index(self, at: int) -> int:
        return bisect_left(self._sorted, (at, PeerId("")))


def _place(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[: BITS // 8], "big")
