"""The cells of a run, as one peer sees them by reading a few prefixes now and then. While the peer
leads, it posts the record of its own cell.

All peers work in the same thirds of a period of wall-clock time. In the first third leaders post
their records. In the second they read the records of their prefix, and the scribes post the number
of cells in it. In the last the scribes read the counts of their region and of all regions. So cells
that read the same records compute with the same counts.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from node.core.clock import Clock, begins
from node.core.ids import CellId, PeerId
from node.dht.record import DirectoryPort
from node.dht.topics import CENSUS, PREFIXES, cells_topic, prefix_of, region_of, region_topic
from node.outer.census import (
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

REFRESH_S = 60.0
"""Seconds between two postings of a cell's record."""
LIVES = 3
"""Life of a record, in such periods."""
SAMPLED = 2
"""Prefixes that a peer reads when it looks for a cell."""
WINDOW = 4
"""Periods between two looks of a peer that does not lead."""
THIRDS = 3


class CellReader:
    """Reads the records of cells."""

    def __init__(self, directory: DirectoryPort) -> None:
        self._directory = directory

    async def prefix(self, prefix: int) -> Mapping[CellId, CellRecord]:
        """The records of the cells of a prefix."""
        of = cells_in(await self._look(cells_topic(prefix)))
        return {cell: record for cell, record in of.items() if prefix_of(cell) == prefix}

    async def region(self, region: int) -> Counts:
        """The number of cells of each prefix of a region."""
        return region_in(region, await self._look(region_topic(region)))

    async def counts(self) -> Counts:
        """The number of cells of every prefix."""
        return counts_in(await self._look(CENSUS))

    async def sample(
        self, text: str, counts: Counts = (), most: int = SAMPLED
    ) -> dict[CellId, CellRecord]:
        """The cells of ``most`` prefixes, drawn by a hash of ``text``; only from prefixes that have
        cells if ``counts`` are given. Without them the counts are read when a drawn prefix is
        empty."""
        drawn = draw(text, _populated(counts) or range(PREFIXES), most)
        found = await self._prefixes(drawn)
        if not counts and not all(found):
            rest = [p for p in _populated(await self.counts()) if p not in drawn]
            found += await self._prefixes(draw(text, rest, most - sum(map(bool, found))))
        return {cell: record for of in found for cell, record in of.items()}

    async def _look(self, topic: str) -> list[bytes]:
        """The postings under the topic, the oldest first."""
        found = await self._directory.look(topic)
        return [p.body for p in sorted(found.values(), key=lambda p: p.seq)]

    async def _prefixes(self, drawn: Sequence[int]) -> list[Mapping[CellId, CellRecord]]:
        return list(await asyncio.gather(*map(self.prefix, drawn)))


class CellRegister:
    """One peer's view of the cells of a run. ``about()``: its cell's record while it leads, else
    None; ``cell()``: the id of its cell; ``pace``: factor of the periods, at most 1."""

    def __init__(
        self,
        me: PeerId,
        directory: DirectoryPort,
        clock: Clock,
        about: Callable[[], CellRecord | None],
        cell: Callable[[], CellId],
        pace: float,
    ) -> None:
        self.me = me
        self._directory = directory
        self._clock = clock
        self._about = about
        self._cell = cell
        self.every = REFRESH_S * pace
        self._reader = CellReader(directory)
        self._counts: Counts = ()
        """Counts that were read last, to be told in the own record."""
        self._near: Mapping[CellId, CellRecord] = {}
        self.seen: Mapping[CellId, CellRecord] = {}
        """Other cells that the last looks showed: in the own prefix and in two more."""

    @property
    def told(self) -> Counts:
        """The number of cells of every prefix, from the record of the own prefix's scribe; empty
        until it reports them."""
        scribe = scribe_of(self._near)
        if scribe is None:
            return ()
        return self._near[scribe].counts or self._counts

    def standing(self) -> tuple[int, int]:
        """The number of the own cell among all, and the number of cells."""
        return standing(self._cell(), self._near.keys(), self.told)

    async def keep(self) -> None:
        """Read the records, and post the own one while this peer leads. Postings expire."""
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
        # Counts are read from the scribe's record, or from the next cell's when the scribe is gone.
        first = sorted({record.cell, *self._near})[:2]
        record = replace(record, counts=self._counts if record.cell in first else ())
        topic = cells_topic(prefix_of(record.cell))
        life = LIVES * self.every
        await self._directory.post(topic, record.pack(), life)

    async def _read(self) -> None:
        self._near = await self._reader.prefix(prefix_of(self._cell()))
        if told := self.told:
            self._counts = told

    async def _count(self, cell: CellId) -> None:
        """As scribe, post the number of cells in the own prefix."""
        if scribe_of(self._near) == cell:
            prefix = prefix_of(cell)
            body = pack_count(prefix, len(self._near))
            await self._directory.post(region_topic(region_of(prefix)), body, LIVES * self.every)

    async def _tally(self, prefix: int) -> None:
        """As scribe, read the counts of all regions. The first scribe of a region also posts the
        counts of that region."""
        self._counts = await self._reader.counts()
        region = region_of(prefix)
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
