"""Finds whom a cell averages with along edges: it posts under the key of its own place and reads
those of the others. Nobody is asked and nobody consents, so whoever is missing costs its own edge
only. Enters: keys, the directory. Leaves: leaders and hosts. Never: a parameter."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from node.averaging.strategies.keys import EdgeKeys
from node.cells.board import WindowBoard
from node.cells.postings import CellFacts, pack_hosts
from node.core.errors import WireError
from node.core.ids import CellId, PeerId
from node.core.journey import Partner

Found = Mapping[CellId, Partner]


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
