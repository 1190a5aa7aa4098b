"""The noticeboard of the simulated swarm: records with an end, spread with a delay, kept apart by walls.

A record carries its writer's wall clock, a reader judges it by its own, as on the real board: who is far ahead takes
everybody's records for expired.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from node.core.ids import PeerId
from node.dht.settings import DirectorySettings
from node.sim.links import Links, Wall


@dataclass(frozen=True, slots=True)
class Body:
    """What a peer says of itself."""

    stage: int
    state: str
    epoch: int
    leads: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """One posting. ``walls`` stood when it was posted: it never reached who was behind one."""

    peer: PeerId
    body: Body
    seq: int
    not_after: float
    visible: float
    walls: tuple[Wall, ...]


class FakeDirectory:
    """One board for all; what a reader sees of it depends on when, and on what lies between it and the writer."""

    def __init__(self, links: Links, settings: DirectorySettings, spread_s: float) -> None:
        self._links, self.settings, self._spread = links, settings, spread_s
        self._posted: dict[int, dict[PeerId, list[Record]]] = {}
        self._seq: dict[PeerId, int] = {}

    def post(self, peer: PeerId, body: Body, now: float, wall: float) -> None:
        """Publish; an older record stays for readers that this one does not reach, until it expires."""
        self._seq[peer] = self._seq.get(peer, 0) + 1
        walls = tuple(self._links.walls)
        record = Record(peer, body, self._seq[peer], wall + self.settings.ttl_s, now + self._spread, walls)
        for stage, board in self._posted.items():
            if stage != body.stage:
                board.pop(peer, None)
        old = self._posted.setdefault(body.stage, {}).get(peer, [])
        kept, reached = list[Record](), set[tuple[Wall, ...]]()
        for r in old:
            # Of records that reach the same readers the newest that has spread replaces all before it.
            if r.not_after > wall and r.walls not in reached:
                kept.append(r)
                if r.visible <= now:
                    reached.add(r.walls)
        self._posted[body.stage][peer] = [record, *kept]

    def withdraw(self, peer: PeerId, now: float, wall: float) -> None:
        """Take the record down."""
        for board in self._posted.values():
            if peer in board:
                gone = board[peer][0]
                self.post(peer, replace(gone.body, state="gone"), now, wall)
                return

    def read(self, reader: PeerId, stage: int, now: float, wall: float) -> Iterator[Record]:
        """The newest record of every other peer of a stage that this reader can see and believes to hold."""
        longest = self.settings.max_ttl_s
        for peer, records in self._posted.get(stage, {}).items():
            if peer == reader:
                continue
            for r in records:
                if r.visible <= now and not any(w.parts(peer, reader) for w in r.walls):
                    if wall < r.not_after <= wall + longest and r.body.state != "gone":
                        yield r
                    break
