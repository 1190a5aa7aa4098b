"""Which cell this daemon belongs to. Enters: the directory, what was kept of an earlier start.
Leaves: a cell for presence and for what is built; later perhaps a change of cell. Never: the choice
itself; that is :mod:`node.scheduler.cells`."""

from __future__ import annotations

import asyncio
import contextlib

from node.app.ports import CellPort
from node.core.ids import CellId, first_cell
from node.manifest import Manifest
from node.scheduler.cells import Dissolution, choose_cell
from node.scheduler.choosing import LOOK_S
from node.training.presence import Presence

EVERY_S = 1.0
"""Between two looks at whether the own cell can go on."""


async def find_cell(
    presence: Presence, manifest: Manifest, *, kept: str = "", company: bool
) -> CellId:
    """The cell to enter. ``kept``: the one it was in before it was started again; ``company``:
    somebody else should come into sight, and is waited for at most ``LOOK_S`` seconds."""
    if company and not kept:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LOOK_S):
                await presence.company.wait()
    stages, first = manifest.pipeline.stages, first_cell(manifest.run_id)
    seen, working = presence.cells(), presence.working()
    return choose_cell(seen, stages, presence.me, kept=kept, first=first, working=working)


async def watch_cell(daemon: CellPort, presence: Presence, stages: int) -> None:
    """For ever: leave the own cell for another one where it cannot go on."""
    d, machine = daemon, Dissolution(presence.me, stages, daemon.clock.now())
    while True:
        await asyncio.sleep(EVERY_S)
        a = d.assembled
        if a is None or d.mover.going or d.draining or d.ending:
            continue
        training, working = a.training, presence.working()
        if training.works:
            working |= {training.cell}
        to = machine.look(
            training.cell,
            training.member.term,
            presence.hosts(),
            presence.cells(),
            working,
            d.clock.now(),
            coming=bool(presence.coming()),
        )
        if to is not None:
            d.mover.joins(to)
