"""Finds whom a cell averages with along edges: it posts under the key of its own place and reads
those of the others. Nobody is asked and nobody consents, so whoever is missing costs its own edge
only. Enters: keys, the directory. Leaves: leaders and hosts. Never: a parameter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from node.averaging.strategies.group_forming import TIMES, Times
from node.averaging.strategies.keys import EdgeKeys
from node.cells.facts import CellFacts, Partner
from node.cells.forming import Board
from node.cells.postings import CellPosting
from node.core.clock import Clock
from node.core.errors import UsageFault, WireError
from node.core.ids import CellId, PeerId, short
from node.dht.topics import outer_topic
from node.telemetry.events import Journal

Found = Mapping[CellId, Partner]


@dataclass(frozen=True, slots=True)
class Neighbours:
    """``sources``: cells whose values this one takes in a window; ``targets``: those that take
    its."""

    sources: Found
    targets: Found


class EdgeFinder:
    """Of one peer. ``times`` are the same in all cells of a run; ``learn(peer, addresses)`` is told
    where the leaders of others can be dialled."""

    def __init__(
        self,
        board: Board,
        clock: Clock,
        journal: Journal,
        times: Times = TIMES,
        learn: Callable[[PeerId, Sequence[str]], None] = lambda peer, maddrs: None,
    ) -> None:
        self._board, self._clock, self._journal = board, clock, journal
        self.times, self._learn = times, learn

    async def find(
        self, about: CellFacts, window: int, keys: EdgeKeys, start_wall: float
    ) -> Neighbours | None:
        """Who is at the other ends of the cell's edges in ``window``, which begins at
        ``start_wall`` (Unix seconds); None when it is too late to post. Call it ``-times.post``
        seconds earlier.

        A key under which several cells posted, because they see different cells, gives the first
        of them in the order of their names. Raises UsageFault for facts that have no room in a
        posting.
        """
        try:
            body = CellPosting.hosting(about).pack()
        except WireError as e:
            raise UsageFault(f"this cell cannot post: {e}", "use fewer stages") from e
        if not await self._post(window, keys.own, body, start_wall):
            return None
        await asyncio.sleep(max(0.0, start_wall + self.times.read - self._clock.wall()))
        wanted = list(dict.fromkeys((*keys.sources, *keys.targets)))
        looked = await asyncio.gather(
            *(self._look(about, window, key, start_wall) for key in wanted)
        )
        found = dict(zip(wanted, looked, strict=True))
        return Neighbours(_first(found, keys.sources), _first(found, keys.targets))

    async def _post(self, window: int, key: str, body: bytes, start_wall: float) -> bool:
        """Again, when no storage took it, for as long as others do not call it late."""
        times = self.times
        latest, pause = start_wall + times.post + times.clocks, times.clocks / 4
        life = times.attempt - times.post
        while self._clock.wall() <= latest:
            if await self._board.post(outer_topic(window, key), body, life):
                return True
            await asyncio.sleep(pause)
        text = "the directory did not take this cell's posting: others cannot find it"
        self._say("outer-not-posted", text, window, "warning", key=key)
        return False

    async def _look(
        self, about: CellFacts, window: int, key: str, start_wall: float
    ) -> dict[CellId, Partner]:
        """Who posted a key, as far as it may be averaged with; of two leaders of one cell the first
        in order."""
        try:
            async with asyncio.timeout(self.times.turn):
                found = await self._board.look(outer_topic(window, key))
        except TimeoutError:
            self._say("outer-not-read", "the directory does not answer", window, "warning")
            return {}
        latest = start_wall + self.times.post + self.times.clocks
        told: dict[CellId, Partner] = {}
        for peer, posting in sorted(found.items()):
            try:
                said = CellPosting.parse(posting.body)
            except WireError as e:
                self._say("outer-unread", f"{short(peer)}: {e}", window, "debug", peer=peer)
                continue
            same = said.change == about.change
            if same and said.cell != about.cell and posting.seq / 1000.0 <= latest and said.hosts:
                told.setdefault(said.cell, Partner(peer, said.hosts))
                self._learn(peer, said.maddrs)
        return told

    def _say(self, kind: str, text: str, window: int, level: str, **fields: Any) -> None:
        self._journal.emit("cells", kind, text, level, window=window, **fields)


def _first(found: Mapping[str, Found], keys: Iterable[str]) -> Found:
    """Of every key the first cell, in the order of their names."""
    cells = {min(of): of[min(of)] for key in keys if (of := found[key])}
    return dict(sorted(cells.items()))
