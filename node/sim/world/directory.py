"""The directory of the simulated swarm: records with an end, spread with a delay, kept apart by
walls.

A record carries its writer's wall clock, a reader judges it by its own, as on the real board: who
is far ahead takes everybody's records for expired.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from node.core.clock import Clock
from node.core.ids import PeerId
from node.dht.record import PeerBody, PeerEntry, Posting
from node.dht.settings import DirectorySettings
from node.sim.world.links import Links, Wall

GONE = "gone"
"""State of a record that was taken down."""


@dataclass(frozen=True, slots=True)
class HeldRecord:
    """One posting. ``walls`` stood when it was posted: it never reached who was behind one."""

    entry: PeerEntry
    visible: float
    walls: tuple[Wall, ...]


class SimDht:
    """One board for all; what a reader sees of it depends on when, and on what lies between it and
    the writer."""

    def __init__(
        self, links: Links, settings: DirectorySettings, spread_s: float, now: Callable[[], float]
    ) -> None:
        self.links, self.settings, self.now = links, settings, now
        self._spread = spread_s
        self._posted: dict[PeerId, list[HeldRecord]] = {}
        self._seq: dict[PeerId, int] = {}
        self._topics: dict[tuple[str, PeerId], tuple[Posting, float, tuple[Wall, ...]]] = {}
        """By topic and writer: the posting, when it is visible, and what it did not pass."""

    def post(self, peer: PeerId, body: PeerBody, wall: float, times: float = 1.0) -> None:
        """Publish; an older record stays for readers that this one does not reach, until it
        expires."""
        now = self.now()
        self._seq[peer] = max(self._seq.get(peer, 0) + 1, int(1000 * wall))
        walls = tuple(self.links.walls)
        life = min(times * self.settings.ttl_s, self.settings.max_ttl_s)
        entry = PeerEntry(peer, body, self._seq[peer], wall + life)
        kept, reached = [HeldRecord(entry, now + self._spread, walls)], set[tuple[Wall, ...]]()
        for r in self._posted.get(peer, ()):
            # Of records that reach the same readers the newest that has spread replaces all before
            # it.
            if r.entry.not_after > wall and r.walls not in reached:
                kept.append(r)
                if r.visible <= now:
                    reached.add(r.walls)
        self._posted[peer] = kept

    def put(self, topic: str, posting: Posting) -> None:
        """Post under a topic, in the place of what the writer posted there before."""
        now, walls = self.now(), tuple(self.links.walls)
        kept = {at: p for at, p in self._topics.items() if p[1] > now - self.settings.max_ttl_s}
        self._topics = kept | {(topic, posting.peer): (posting, now + self._spread, walls)}

    def look(self, topic: str, reader: PeerId, wall: float) -> dict[PeerId, Posting]:
        """What this reader can see under a topic and believes to hold, in PeerId order."""
        now = self.now()
        return {
            peer: posting
            for (at, peer), (posting, visible, walls) in sorted(self._topics.items())
            if at == topic
            and wall < posting.not_after
            and (
                peer == reader or (visible <= now and not any(w.parts(peer, reader) for w in walls))
            )
        }

    def withdraw(self, peer: PeerId, wall: float) -> None:
        """Take the record down."""
        if peer in self._posted:
            self.post(peer, replace(self._posted[peer][0].entry.body, state=GONE), wall)

    def read(self, reader: PeerId, wall: float) -> dict[PeerId, PeerEntry]:
        """The newest record of every peer that this reader can see and believes to hold, in PeerId
        order."""
        now, longest, seen = self.now(), wall + self.settings.max_ttl_s, dict[PeerId, PeerEntry]()
        for peer in sorted(self._posted):
            for r in self._posted[peer]:
                if peer == reader or (
                    r.visible <= now
                    and not (r.walls and any(w.parts(peer, reader) for w in r.walls))
                ):
                    e = r.entry
                    if wall < e.not_after <= longest and e.body.state != GONE:
                        seen[peer] = e
                    break
        return seen

    @property
    def writers(self) -> int:
        return len(self._posted)


class SimDirectory:
    """The board as one peer uses it: :class:`~node.dht.port.DirectoryPort`."""

    def __init__(self, record_store: SimDht, me: PeerId, clock: Clock) -> None:
        self._record_store, self._me, self._clock = record_store, me, clock

    async def publish(self, body: PeerBody, times: float = 1.0) -> bool:
        self._record_store.post(self._me, body, self._clock.wall(), times)
        return True

    @property
    def neighbours(self) -> int:
        return self._record_store.writers

    async def withdraw(self) -> None:
        self._record_store.withdraw(self._me, self._clock.wall())

    async def read(self) -> dict[PeerId, PeerEntry]:
        return self._record_store.read(self._me, self._clock.wall())

    async def post(self, topic: str, body: bytes, life_s: float) -> bool:
        wall = self._clock.wall()
        self._record_store.put(topic, Posting(self._me, body, int(1000 * wall), wall + life_s))
        return True

    async def look(self, topic: str) -> dict[PeerId, Posting]:
        return self._record_store.look(topic, self._me, self._clock.wall())

    async def close(self) -> None:
        """Nothing is refreshed."""
