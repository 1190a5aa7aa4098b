"""A peer changes its stage: it leaves the old one as one that drains, and becomes a fresh image of
the same process.

The process id, the identity, the p2p port, the parent that holds its leash and the event file stay;
everything that was built for the old stage is gone with certainty, because nothing of it is carried
over.
"""

from __future__ import annotations

import asyncio
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from node.app.assembly import Assembled, under
from node.app.room import room
from node.config import MOVED, NodeConfig
from node.core.ids import ENDS
from node.manifest import Manifest
from node.scheduler.choosing import able
from node.transport.addresses import part_of

if TYPE_CHECKING:
    from node.app.daemon import Daemon

MOVE_S = 60.0
"""For the epoch under way and the hand-over, before a peer changes its stage all the same."""


class Mover:
    """``target`` is the stage this daemon is changing to, ``done`` that stage and the p2p port of
    the image that follows."""

    def __init__(self, daemon: Daemon) -> None:
        self._d = daemon
        self.target: int | None = None
        self.done: tuple[int, int] | None = None

    def asked(self, stage: int) -> str:
        """The leader, or the rule where there is none, wants this peer at ``stage``: "" when it
        goes, else why not."""
        d = self._d
        if self.target is not None:
            return f"it is on its way to {place(self.target)}"
        if d.assembled is None or d.manifest is None or d.draining or d.ending:
            return "it is coming or going itself"
        known = under(d.manifest, d.assembled.training.standing.known)
        taken = stage == ENDS and d.presence is not None and d.presence.ends()
        why = refusal(d.config, known, d.assembled, stage, d.placing.open_to)
        if why := "somebody else is at the ends" if taken else why:
            text = f"asked to host {place(stage)}: {why}"
            d.journal.emit("daemon", "move-refused", text, stage=stage)
            return why
        self.target = stage
        d.tasks.spawn(self._move(d.assembled, stage), "move")
        return ""

    async def _move(self, a: Assembled, stage: int) -> None:
        d = self._d
        text = f"moving to {place(stage)}: finishes the epoch under way and hands over what it owns"
        d.journal.emit("daemon", "moving", text, stage=stage, source=a.stage.stage)
        if d.presence is not None:
            d.presence.changed()
        try:
            async with asyncio.timeout(MOVE_S):
                await a.training.leave(f"moves to {place(stage)}")
                await a.work.saved()
        except TimeoutError:
            why = f"the epoch did not end in {MOVE_S:.0f} s; moving all the same"
            d.journal.emit("daemon", "move-hasty", why, "warning")
        if d.draining:
            return  # its operator wants it to end, and is told so by who carries that out
        self.done = stage, p2p_port(d.addresses())
        d.stop(f"moving to {place(stage)}")


def place(stage: int) -> str:
    """A stage, for people."""
    return "the ends" if stage == ENDS else f"stage {stage}"


def refusal(config: NodeConfig, manifest: Manifest, a: Assembled, stage: int, open_to: str) -> str:
    """Why this peer will not host ``stage`` instead of its own; empty when it will. ``open_to``:
    which stages it would host, as in its record."""
    if not open_to:
        return "its operator wants it where it is"
    here, stages = a.stage.stage, manifest.pipeline.stages
    if stage == here or not {here, stage} <= set(able(open_to, stages)):
        return f"there is no way from {place(here)} to {place(stage)}"
    verdict = room(config, manifest, stage, a.memory_limit, a.main_memory)
    return "" if verdict.ok else verdict.text


def p2p_port(addresses: list[str]) -> int:
    """The TCP port among a peer's own multiaddrs, 0 when there is none; a relay's is not its
    own."""
    own = (a for a in addresses if "/p2p-circuit" not in a)
    return next((int(p) for a in own if (p := part_of(a, "tcp"))), 0)


def again(stage: int, port: int) -> NoReturn:
    """Become this program anew, with the arguments it was started with, to host ``stage``. Close
    everything before."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.environ[MOVED] = f"{stage}:{port}"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])
