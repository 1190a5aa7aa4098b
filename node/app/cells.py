"""Which cell this daemon belongs to. Enters: the directory, what was kept of an earlier start.
Leaves: a cell for presence and for what is built. Never: the choice itself; that is
:func:`node.scheduler.cells.choose_cell`."""

from __future__ import annotations

import asyncio
import contextlib

from node.core.ids import CellId, first_cell
from node.manifest import Manifest
from node.scheduler.cells import choose_cell
from node.scheduler.choosing import LOOK_S
from node.training.presence import Presence


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
    return choose_cell(presence.cells(), stages, presence.me, kept=kept, first=first)
