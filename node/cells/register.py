"""The cells of a run, as one peer reads them: a few prefixes now and then. While it leads, it posts
its own cell's record there.

All peers do the same in the same thirds of a period of wall-clock time: leaders post their records,
then read those of their prefix and the scribes post how many these are, then the scribes read the
counts of their region and of all. So cells that read the same records compute with the same counts.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from node.cells.census import (
    CellRecord,
    Counts,
    cells_in,
    counts_in,
    draw,
    pack_count,
    pack_region,
    region_in,
    scribe_of,
    standing,
)
from node.core.clock import Clock, begins
from node.core.ids import CellId, PeerId
from node.dht.record import DirectoryPort
from node.dht.topics import CENSUS, PREFIXES, cells_topic, prefix_of, region_of, region_topic

REFRESH_S, LIVES = 60.0, 3
"""Seconds between two postings of a cell's record, and for how many of them it lives."""
SAMPLED = 2
"""Prefixes that who looks for a cell reads."""
WINDOW = 4
"""Periods between two looks of who does not lead."""
THIRDS = 3


class CellReader:
    """Reads the records of cells."""

    def __init__(self, directory: DirectoryPort) -> None:
        self._directory = directory

    async def prefix(self, prefix: int) -> Mapping[CellId, CellRecord]:
        """The cells of a prefix."""
        of = cells_in(await self._look(cells_topic(prefix)))
        return {cell: record for cell, record in of.items() if prefix_of(cell) == prefix}

    async def region(self, region: int) -> Counts:
        """Cells of the prefixes of a region."""
        return region_in(region, await self._look(region_topic(region)))

    async def counts(self) -> Counts:
        """Cells of every prefix."""
        return counts_in(await self._look(CENSUS))

    async def sample(
        self, text: str, counts: Counts = (), most: int = SAMPLED
    ) -> dict[CellId, CellRecord]:
        """The cells of ``most`` prefixes, which a hash of ``text`` draws; of those that have cells,
        once that is known. Without ``counts`` it is asked for when not all are found at once."""
        drawn = draw(text, _populated(counts) or range(PREFIXES), most)
        found = await self._prefixes(drawn)
        if not counts and not all(found):
            rest = [p for p in _populated(await self.counts()) if p not in drawn]
            found += await self._prefixes(draw(text, rest, most - sum(map(bool, found))))
        return {cell: record for of in found for cell, record in of.items()}

    async def _look(self, topic: str) -> list[bytes]:
        """What was posted there, the oldest first."""
        found = await self._directory.look(topic)
        return [p.body for p in sorted(found.values(), key=lambda p: p.seq)]

    async def _prefixes(self, drawn: Sequence[int]) -> list[Mapping[CellId, CellRecord]]:
        return list(await asyncio.gather(*map(self.prefix, drawn)))


class CellRegister:
    """Of one peer. ``about()``: its cell's record while it leads, else None; ``cell()``: which cell
    that is. ``pace``: everything is so many times as fast, at most 1."""

    def __init__(
        self,
        me: PeerId,
        directory: DirectoryPort,
        clock: Clock,
        about: Callable[[], CellRecord | None],
        cell: Callable[[], CellId],
        pace: float,
    ) -> None:
        self.me, self._directory, self._clock = me, directory, clock
        self._about, self._cell = about, cell
        self.every = REFRESH_S * pace
        self._reader = CellReader(directory)
        self._counts: Counts = ()
        """As they were read last, to be told."""
        self._near: Mapping[CellId, CellRecord] = {}
        self.seen: Mapping[CellId, CellRecord] = {}
        """Of other cells, what the last looks showed: of the own prefix and of two more."""

    @property
    def told(self) -> Counts:
        """Cells of every prefix as the scribe of the own one says; empty while it has not."""
        scribe = scribe_of(self._near)
        return (self._near[scribe].counts or self._counts) if scribe is not None else ()

    def standing(self) -> tuple[int, int]:
        """The number of the own cell among all, and how many there are."""
        return standing(self._cell(), self._near.keys(), self.told)

    async def keep(self) -> None:
        """Read, and post while this peer leads. What was posted expires."""
        number = -1
        while True:
            number = await begins(self._clock, self.every / THIRDS, number)
            leads = self._about()
            if leads is None:
                if number % (WINDOW * THIRDS) == 1:
                    await self._read()
                    await self._sample(number)
            elif number % THIRDS == 0:
                await self._post(leads)
            elif number % THIRDS == 1:
                await self._read()
                await self._count(leads.cell)
            else:
                if scribe_of(self._near) == leads.cell:
                    await self._tally(prefix_of(leads.cell))
                if number % (WINDOW * THIRDS) == 2:
                    await self._sample(number)

    async def _post(self, record: CellRecord) -> None:
        # Those of the scribe are read; the next one's, when that is gone.
        first = sorted({record.cell, *self._near})[:2]
        record = replace(record, counts=self._counts if record.cell in first else ())
        topic, life = cells_topic(prefix_of(record.cell)), LIVES * self.every
        await self._directory.post(topic, record.pack(), life)

    async def _read(self) -> None:
        self._near = await self._reader.prefix(prefix_of(self._cell()))
        if told := self.told:
            self._counts = told

    async def _count(self, cell: CellId) -> None:
        """The scribe says how many cells its prefix has."""
        if scribe_of(self._near) == cell:
            prefix = prefix_of(cell)
            body = pack_count(prefix, len(self._near))
            await self._directory.post(region_topic(region_of(prefix)), body, LIVES * self.every)

    async def _tally(self, prefix: int) -> None:
        """The scribe of a prefix reads all counts; the first of a region says those of the
        region."""
        self._counts, region = await self._reader.counts(), region_of(prefix)
        here = await self._reader.region(region)
        if any(here) and prefix % len(here) == next(i for i, n in enumerate(here) if n):
            await self._directory.post(CENSUS, pack_region(region, here), LIVES * self.every)

    async def _sample(self, number: int) -> None:
        more: Mapping[CellId, CellRecord] = {}
        if counts := self.told:
            more = await self._reader.sample(f"{self.me}/{number}", counts)
        own = self._cell()
        self.seen = {c: r for c, r in {**more, **self._near}.items() if c != own}


def _populated(counts: Counts) -> list[int]:
    return [prefix for prefix, count in enumerate(counts) if count]
