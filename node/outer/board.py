"""Postings of one window: writes the own posting until the directory has it, and reads the postings
of cells that this one may average with. Enters: keys, the directory. Leaves: postings, leaders.
Never: a parameter."""

import asyncio
from dataclasses import dataclass
from typing import Any

from node.averaging.strategies.group_forming import Times
from node.core.clock import Clock
from node.core.errors import WireError
from node.core.ids import PeerId, short
from node.dht.record import DirectoryPort
from node.dht.topics import outer_topic
from node.outer.postings import CellFacts, parse_posting
from node.telemetry.events import Journal


@dataclass(frozen=True, slots=True)
class WindowBoard:
    """One peer's access to the postings of a window. ``times`` are the same in all cells of a run.
    In every method ``start`` is the wall-clock time from which the times under the key are
    counted."""

    directory: DirectoryPort
    clock: Clock
    journal: Journal
    times: Times

    def latest(self, start: float) -> float:
        """The latest time at which a posting may be written, by any peer's wall clock."""
        return start + self.times.post + self.times.clocks

    async def post(self, window: int, key: str, body: bytes, life_s: float, start: float) -> None:
        """Post ``body`` under ``key`` for ``life_s`` seconds. While no storage takes it, try again
        until other cells would call it late; then report in the journal that the posting is
        missing."""
        while self.clock.wall() <= self.latest(start):
            if await self.directory.post(outer_topic(window, key), body, life_s):
                return
            await asyncio.sleep(self.times.clocks / 4)
        text = "this cell's posting is not in the directory in time: others cannot find it"
        self.say("outer-not-posted", text, window, "warning", key=key)

    async def read(
        self, window: int, key: str, change: int, start: float
    ) -> list[tuple[PeerId, CellFacts]]:
        """The postings under a key that came in time and go by the owner's ``change``, as pairs of
        leader and facts in PeerId order. Empty if the directory does not answer."""
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
        """Emit a journal event about a window."""
        self.journal.emit("cells", kind, text, level, window=window, **fields)
