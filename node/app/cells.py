"""Which cells a peer sees, and which one it enters. Enters: the directory, what was kept of an
earlier start. Leaves: a cell for presence and for what is built. Never: the choice itself; that is
:mod:`node.scheduler.cells`.

Of the cells of a run a peer reads a sample: who chooses a cell chooses the one of these that needs
it most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from node.cells.register import CellReader
from node.core.ids import CellId, first_cell
from node.dht.record import DirectoryPort
from node.dht.topics import cell_topic
from node.manifest import Manifest
from node.scheduler.cells import choose_cell
from node.scheduler.choosing import LOOK_S
from node.training.presence import HASTE_S, Presence, View

SAMPLE_S = 10.0
"""Between two looks at other cells while the own one cannot go on."""
ASKED = 4
"""Of the cells in a sample, those that need peers most: how many are looked at closely."""

Sight = tuple[Mapping[CellId, list[int]], set[CellId]]
"""The stages of the peers of each cell, and in which cells a leader is at work."""


async def cells_in_sight(directory: DirectoryPort, text: str, first: CellId, stages: int) -> Sight:
    """A sample of the cells, which a hash of ``text`` draws. Where none has a leader the cell
    ``first``, if somebody is in it."""
    found = await CellReader(directory).sample(text)
    seen = {cell: record.stages for cell, record in found.items()}
    working = {cell for cell, record in found.items() if record.works}

    def need(cell: CellId) -> tuple[bool, int, int]:
        here = seen[cell]
        return cell not in working, min(map(here.count, range(stages + 1))), len(here)

    # What a leader posts is up to a minute old: meanwhile others may have come, or all have gone.
    for cell in sorted(seen, key=need)[:ASKED] or [first]:
        view = View(await directory.read(cell_topic(cell)), cell)
        seen[cell] = view.stages()
        working = working | {cell} if view.led() else working - {cell}
    return {cell: here for cell, here in seen.items() if here}, working


async def find_cell(
    presence: Presence, manifest: Manifest, *, kept: str = "", company: bool
) -> CellId:
    """The cell to enter. ``kept``: the one it was in before it was started again; ``company``:
    somebody else should come into sight, and is waited for at most ``LOOK_S`` seconds."""
    stages, first = manifest.pipeline.stages, first_cell(manifest.run_id)
    if kept or not company:
        return CellId(kept) if kept else first
    for attempt in range(round(LOOK_S / HASTE_S)):
        text = f"{presence.me}/{attempt}"
        seen, working = await cells_in_sight(presence.directory, text, first, stages)
        if seen:
            return choose_cell(seen, stages, presence.me, first=first, working=working)
        await asyncio.sleep(HASTE_S)
    return first
