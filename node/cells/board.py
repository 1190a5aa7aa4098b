"""The postings of one window: written until the directory has them, read as far as they may be
averaged with. Enters: keys, the directory. Leaves: postings, leaders. Never: a parameter."""

import asyncio
from dataclasses import dataclass
from typing import Any

from node.averaging.strategies.group_forming import Times
from node.cells.postings import CellFacts, parse_posting
from node.core.clock import Clock
from node.core.errors import WireError
from node.core.ids import PeerId, short
from node.dht.record import DirectoryPort
from node.dht.topics import outer_topic
from node.telemetry.events import Journal


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

    async def post(self, window: int, key: str, body: bytes, life_s: float, start: float) -> None:
        """Again, when no storage took it, for as long as others do not call it late; then the
        journal says that it is not there."""
        while self.clock.wall() <= self.latest(start):
            if await self.directory.post(outer_topic(window, key), body, life_s):
                return
            await asyncio.sleep(self.times.clocks / 4)
        text = "this cell's posting is not in the directory in time: others cannot find it"
        self.say("outer-not-posted", text, window, "warning", key=key)

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
