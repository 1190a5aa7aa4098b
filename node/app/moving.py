"""A peer changes its stage, or its cell: it leaves the old one, and becomes a fresh image of the
same process.

The process id, the identity, the ports, the parent that it ends with and the event file stay;
everything that was built for the old stage is gone with certainty, because nothing of it is
carried over. For a change of stage a peer leaves as one that drains. A cell is left because it
cannot go on: there nothing is finished, and nothing handed over.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from typing import NoReturn

from node.app.assembly import Assembled, Services
from node.app.capacity import check_memory
from node.app.change import under
from node.app.ports import PeerPort
from node.config import MOVED, NodeConfig
from node.core.errors import TimedOut
from node.core.ids import ENDS, CellId, stage_name
from node.manifest import Manifest
from node.scheduler.choosing import able

DRAIN_S = 120.0
"""For an operator's drain that names no time."""
MOVE_S = 60.0
"""For the epoch under way and the hand-over, before a peer changes its stage all the same."""


class Mover:
    """``target`` is the stage this daemon is changing to, ``cell`` the cell, where it chooses one;
    ``done``: all is handed over, and an image for it follows.
    ``refuses(manifest in force, stage)`` says why this peer will not host a stage; empty when it
    will."""

    def __init__(self, daemon: PeerPort, refuses: Callable[[Manifest, int], str]) -> None:
        self._d, self._refuses = daemon, refuses
        self.target: int | None = None
        self.cell: CellId | None = None
        self.done = False

    @property
    def going(self) -> bool:
        """A change of stage or of the cell has begun."""
        return self.target is not None or self.cell is not None

    def asked(self, stage: int) -> str:
        """The leader, or the rule where there is none, wants this peer at ``stage``: "" when it
        goes, else why not."""
        d = self._d
        if self.target is not None:
            return f"it is on its way to {stage_name(self.target)}"
        if self.going or d.assembled is None or d.manifest is None or d.draining or d.ending:
            return "it is coming or going itself"
        taken = stage == ENDS and d.presence is not None and d.presence.view.ends
        known = under(d.manifest, d.assembled.training.standing.known)
        why = self._refuses(known, stage)
        if why := "somebody else is at the ends" if taken else why:
            text = f"asked to host {stage_name(stage)}: {why}"
            d.journal.emit("daemon", "move-refused", text, stage=stage)
            return why
        self.target = stage
        d.tasks.spawn(self._move(d.assembled, stage), "move")
        return ""

    def joins(self, cell: CellId) -> None:
        """The own cell cannot go on: this peer begins anew in that one, without parameters."""
        d = self._d
        if self.going or d.draining or d.ending:
            return
        self.cell = cell
        epoch = d.assembled.stage.version.epoch if d.assembled is not None else 0
        text = (
            f"no leader works in this cell, and others do: joins cell {cell} and gives up what is "
            f"here, epoch {epoch}"
        )
        d.journal.emit("daemon", "cell-left", text, "warning", cell=cell, epoch=epoch)
        if d.presence is not None:
            d.presence.changed()
        self.done = True
        d.stop(f"moving to cell {cell}")

    async def drained(self, timeout_s: float) -> None:
        """Finish the epoch under way, leave the swarm, end. Raises TimedOut."""
        d = self._d
        d.draining = True
        if d.presence is not None:
            d.presence.changed()
        d.journal.emit("daemon", "draining", "finishing the epoch under way, then leaving")
        if (a := d.assembled) is not None:
            try:
                async with asyncio.timeout(timeout_s or DRAIN_S):
                    await a.training.leave("drain")
                    await a.work.local_checkpoints.saved()
            except TimeoutError as e:
                d.draining = False
                a.training.stay()
                raise TimedOut(
                    f"the epoch did not end in {timeout_s:.0f} s", "try again, or tutti stop"
                ) from e
        d.journal.emit("daemon", "drained", "left the swarm: it is safe to switch off")
        d.stop("drained")

    async def _move(self, a: Services, stage: int) -> None:
        d = self._d
        to = stage_name(stage)
        text = f"moving to {to}: finishes the epoch under way and hands over what it owns"
        d.journal.emit("daemon", "moving", text, stage=stage, source=a.stage.stage)
        if d.presence is not None:
            d.presence.changed()
        try:
            async with asyncio.timeout(MOVE_S):
                await a.training.leave(f"moves to {stage_name(stage)}")
                await a.work.local_checkpoints.saved()
        except TimeoutError:
            why = f"the epoch did not end in {MOVE_S:.0f} s; moving all the same"
            d.journal.emit("daemon", "move-hasty", why, "warning")
        if d.draining:
            return  # its operator wants it to end, and is told so by who carries that out
        self.done = True
        d.stop(f"moving to {stage_name(stage)}")


def no_way(here: int, stage: int, stages: int, open_to: str) -> str:
    """Why a peer at ``here`` will not host ``stage`` instead, whatever room it has; empty when it
    will. ``open_to``: which stages it would host, as in its record."""
    if not open_to:
        return "its operator wants it where it is"
    if stage == here or not {here, stage} <= set(able(open_to, stages)):
        return f"there is no way from {stage_name(here)} to {stage_name(stage)}"
    return ""


def refusal(config: NodeConfig, manifest: Manifest, a: Assembled, stage: int, open_to: str) -> str:
    """Why this peer will not host ``stage`` instead of its own; empty when it will."""
    if why := no_way(a.stage.stage, stage, manifest.pipeline.stages, open_to):
        return why
    verdict = check_memory(config, manifest, stage, a.memory_limit, a.main_memory)
    return "" if verdict.ok else verdict.text


def again(stage: int | None) -> NoReturn:
    """Become this program anew, with the arguments it was started with, to host ``stage``; None: as
    these say. Close everything before."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.environ[MOVED] = "-" if stage is None else str(stage)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
