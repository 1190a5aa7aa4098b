"""The noticeboard of the simulated swarm: records with an end, spread with a delay, kept apart by
walls.

A record carries its writer's wall clock, a reader judges it by its own, as on the real board: who
is far ahead takes everybody's records for expired.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from node.core.ids import PeerId
from node.dht.settings import DirectorySettings
from node.scheduler.choosing import Placed, able
from node.sim.links import Links, Wall

COMING = ("choosing", "starting", "joining")
"""States of a peer that does not take part yet, as in ``node.training.presence``."""


@dataclass(frozen=True, slots=True)
class Body:
    """What a peer says of itself. ``stage``: None while it chooses one."""

    stage: int | None
    state: str
    epoch: int
    leads: bool = False
    speed: float = 0.0
    open_to: str = ""
    settled: bool = True
    follows: PeerId | None = None


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
    """One board for all; what a reader sees of it depends on when, and on what lies between it and
    the writer."""

    def __init__(self, links: Links, settings: DirectorySettings, spread_s: float) -> None:
        self._links, self.settings, self._spread = links, settings, spread_s
        self._posted: dict[PeerId, list[Record]] = {}
        self._boards: dict[int | None, dict[PeerId, None]] = {}
        """By stage, who may be seen there."""
        self._seq: dict[PeerId, int] = {}

    def post(self, peer: PeerId, body: Body, now: float, wall: float) -> None:
        """Publish; an older record stays for readers that this one does not reach, until it
        expires."""
        self._seq[peer] = self._seq.get(peer, 0) + 1
        walls = tuple(self._links.walls)
        record = Record(
            peer, body, self._seq[peer], wall + self.settings.ttl_s, now + self._spread, walls
        )
        kept, reached = [record], set[tuple[Wall, ...]]()
        for r in self._posted.get(peer, ()):
            # Of records that reach the same readers the newest that has spread replaces all before
            # it.
            if r.not_after > wall and r.walls not in reached:
                kept.append(r)
                if r.visible <= now:
                    reached.add(r.walls)
        self._posted[peer] = kept
        self._boards.setdefault(body.stage, {})[peer] = None
        stages = {r.body.stage for r in kept}
        for stage, board in self._boards.items():
            if stage not in stages:
                board.pop(peer, None)

    def withdraw(self, peer: PeerId, now: float, wall: float) -> None:
        """Take the record down."""
        if peer in self._posted:
            self.post(peer, replace(self._posted[peer][0].body, state="gone"), now, wall)

    def read(self, reader: PeerId, stage: int | None, now: float, wall: float) -> Iterator[Record]:
        """The newest record of every other peer of a stage that this reader can see and believes to
        hold."""
        longest = self.settings.max_ttl_s
        for peer in self._boards.get(stage, ()):
            if peer == reader:
                continue
            for r in self._posted[peer]:
                if r.visible <= now and not any(w.parts(peer, reader) for w in r.walls):
                    holds = wall < r.not_after <= wall + longest and r.body.state != "gone"
                    if holds and r.body.stage == stage:
                        yield r
                    break

    def _everybody(self, reader: PeerId, now: float, wall: float) -> Iterator[Record]:
        for stage in list(self._boards):
            yield from self.read(reader, stage, now, wall)

    def placed(self, reader: PeerId, stages: int, now: float, wall: float) -> dict[PeerId, Placed]:
        """Where others are or will be, as ``Presence.placed``."""
        here = {r.peer: r.body for r in self._everybody(reader, now, wall)}
        return {
            p: Placed(b.stage, able(b.open_to, stages), b.settled, b.speed)
            for p, b in sorted(here.items())
            if b.state != "draining"
        }

    def follows(self, reader: PeerId, now: float, wall: float) -> dict[PeerId, PeerId]:
        """Whose plan each other peer says that it follows, as ``Presence.follows``."""
        return {
            r.peer: r.body.follows for r in self._everybody(reader, now, wall) if r.body.follows
        }

    def coming(self, reader: PeerId, now: float, wall: float) -> dict[PeerId, int | None]:
        """Who is about to take part, as ``Presence.coming``."""
        here = self._everybody(reader, now, wall)
        return {r.peer: r.body.stage for r in here if r.body.state in COMING}
