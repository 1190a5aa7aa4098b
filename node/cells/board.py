"""The postings of one window: written until the directory has them, read as far as they may be
averaged with; and who finds by them alone whom a cell averages with along edges. It posts under the
key of its own place and reads those of the others. Nobody is asked and nobody consents, so whoever
is missing costs its own edge only. Enters: keys, the directory. Leaves: postings, leaders and
hosts. Never: a parameter."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from node.averaging.strategies.group_forming import Times
from node.averaging.strategies.keys import EdgeKeys
from node.cells.postings import CellFacts, pack_hosts, parse_posting
from node.core.clock import Clock
from node.core.errors import WireError
from node.core.ids import CellId, PeerId, short
from node.core.journey import Partner
from node.dht.record import DirectoryPort
from node.dht.topics import outer_topic
from node.telemetry.events import Journal

Found = Mapping[CellId, Partner]


@dataclass(frozen=True, slots=True)
class WindowBoard:
    """Of one peer. ``times`` are the same in all cells of a run. ``start``, in every method: the
    wall-clock time from which they count under the key."""

    directory: DirectoryPort
    clock: Clock
    journal: Journal
    times: Times

    def latest(self, start: float) -> float:
        """When a posting must have been written, by anybody's wall clock."""
        return start + self.times.post + self.times.clocks

    async def post(self, window: int, key: str, body: bytes, life_s: float, start: float) -> bool:
        """Again, when no storage took it, for as long as others do not call it late; False: it is
        not there in time."""
        while self.clock.wall() <= self.latest(start):
            if await self.directory.post(outer_topic(window, key), body, life_s):
                return True
            await asyncio.sleep(self.times.clocks / 4)
        text = "this cell's posting is not in the directory in time: others cannot find it"
        self.say("outer-not-posted", text, window, "warning", key=key)
        return False

    async def read(
        self, window: int, key: str, change: int, start: float
    ) -> list[tuple[PeerId, CellFacts]]:
        """Who posted a key in time, by settings of the owner's ``change``; in PeerId order."""
        try:
            async with asyncio.timeout(self.times.turn):
                found = await self.directory.look(outer_topic(window, key))
        except TimeoutError:
            self.say("outer-not-read", "the directory does not answer", window, "warning")
            return []
        told: list[tuple[PeerId, CellFacts]] = []
        for peer, posting in sorted(found.items()):
            try:
                said = parse_posting(posting.body)
            except WireError as e:
                self.say("outer-unread", f"{short(peer)}: {e}", window, "debug", peer=peer)
                continue
            if said.change == change and posting.seq / 1000.0 <= self.latest(start):
                told.append((peer, said))
        return told

    def say(self, kind: str, text: str, window: int, level: str = "info", **fields: Any) -> None:
        """Tell the journal of something in a window."""
        self.journal.emit("cells", kind, text, level, window=window, **fields)


@dataclass(frozen=True, slots=True)
class Neighbours:
    """``sources``: cells whose values this one takes in a window; ``targets``: those that take
    its."""

    sources: Found
    targets: Found


class EdgeFinder:
    """Of one peer. ``learn(peer, addresses)`` is told where the leaders of others can be
    dialled."""

    def __init__(self, board: WindowBoard, learn: Callable[[PeerId, Sequence[str]], None]) -> None:
        self.board, self._learn = board, learn

    async def find(
        self, about: CellFacts, window: int, keys: EdgeKeys, start_wall: float
    ) -> Neighbours | None:
        """Who is at the other ends of the cell's edges in ``window``, which begins at
        ``start_wall`` (Unix seconds); None when it is too late to post. Call it
        ``-board.times.post`` seconds earlier.

        A key under which several cells posted, because they see different cells, gives the first
        of them in the order of their names. None also for facts that have no room in a posting.
        """
        try:
            body = pack_hosts(about)
        except WireError as e:
            text = f"this cell cannot post: {e}"
            self.board.say("outer-not-posted", text, window, "warning")
            return None
        times = self.board.times
        life_s = times.attempt - times.post
        if not await self.board.post(window, keys.own, body, life_s, start_wall):
            return None
        await asyncio.sleep(max(0.0, start_wall + times.read - self.board.clock.wall()))
        wanted = list(dict.fromkeys((*keys.sources, *keys.targets)))
        looked = await asyncio.gather(
            *(self._look(about, window, key, start_wall) for key in wanted)
        )
        found = dict(zip(wanted, looked, strict=True))
        return Neighbours(_first(found, keys.sources), _first(found, keys.targets))

    async def _look(
        self, about: CellFacts, window: int, key: str, start_wall: float
    ) -> dict[CellId, Partner]:
        """Who posted a key, as far as it may be averaged with; of two leaders of one cell the first
        in order."""
        told: dict[CellId, Partner] = {}
        for peer, said in await self.board.read(window, key, about.change, start_wall):
            if said.cell != about.cell and said.hosts:
                told.setdefault(said.cell, Partner(said.cell, peer, said.hosts))
                self._learn(peer, said.maddrs)
        return told


def _first(found: Mapping[str, Found], keys: Iterable[str]) -> Found:
    """Of every key the first cell, in the order of their names."""
    cells = {min(of): of[min(of)] for key in keys if (of := found[key])}
    return dict(sorted(cells.items()))
