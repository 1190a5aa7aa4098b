"""Which cell this daemon belongs to. Enters: the directory, what was kept of an earlier start.
Leaves: a cell for presence and for what is built; later perhaps a change of cell. Never: the choice
itself; that is :mod:`node.scheduler.cells`.

Of the cells of a run a peer reads a sample: who chooses a cell chooses the one of these that needs
it most.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from math import floor

from node.app.placing import PlacedPeer
from node.cells.register import CellReader
from node.core.ids import CellId, first_cell
from node.dht.port import DirectoryPort
from node.dht.topics import cell_topic
from node.manifest import Manifest
from node.scheduler.cells import Dissolution, choose_cell
from node.scheduler.choosing import LOOK_S
from node.training.presence import HASTE_S, Presence, View

EVERY_S = 1.0
"""Between two looks at whether the own cell can go on."""
SAMPLE_S = 10.0
"""Between two looks at other cells while it cannot."""
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


async def watch_cell(daemon: PlacedPeer, presence: Presence, stages: int, first: CellId) -> None:
    """For ever: leave the own cell for another one where it cannot go on."""
    d, machine = daemon, Dissolution(presence.me, stages, daemon.clock.now())
    sampled = 0.0
    others: Sight = {}, set()
    while True:
        await asyncio.sleep(EVERY_S)
        a = d.assembled
        if a is None or d.mover.going or d.draining or d.ending:
            continue
        training, now = a.training, d.clock.now()
        goes = training.works or presence.view.led()
        if not goes and now - sampled >= SAMPLE_S:
            sampled = now
            # Who leaves the same cell draws the same sample, and they spread over it.
            text = f"{training.cell}/{floor(d.clock.wall() / SAMPLE_S)}"
            others = await cells_in_sight(presence.directory, text, first, stages)
        seen, working = others if not goes else ({}, set())
        own = {training.cell} if goes else set[CellId]()
        to = machine.look(
            training.cell,
            training.member.term,
            presence.view.hosts,
            {**seen, training.cell: presence.view.stages()},
            working - {training.cell} | own,
            d.clock.now(),
            coming=bool(presence.view.coming),
        )
        if to is not None:
            d.mover.joins(to)
