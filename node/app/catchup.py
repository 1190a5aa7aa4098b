"""A peer that starts takes the newest state at hand: what the swarm has committed, else its own
newest checkpoint."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path
from statistics import median_high

from node.checkpoint.partial import Partial
from node.core.errors import OutOfResources, PeerFault, Refused
from node.core.ids import ENDS
from node.telemetry.events import Journal
from node.training.presence import Presence
from node.training.stage_runtime import StageRuntime

TRIES = 5
"""Downloads that may fail before a joiner takes part as a listener instead."""
RETRY_S = 1.0
DONORS, SAID = 16, 10
"""Peers asked at once for what the run begins from, and how many times they are asked before that
is said again and they are asked more rarely."""


async def catch_up(
    work: StageRuntime,
    presence: Presence,
    incoming: Path | None,
    journal: Journal,
    retry_s: float = RETRY_S,
    given: str = "",
) -> None:
    """Leave the best there is in place. What was fetched and verified stays in ``incoming`` over
    failures and restarts (None: in memory, over failures). ``given``: the digest of what the stage
    begins from, where that is not drawn; while nobody has trained yet it is waited for.

    Which epoch others hold is what most of them say, and where any of them is there whom this peer
    has worked with, only those are asked: one stranger's word sends nobody after parameters that do
    not exist.
    """
    for version in reversed(work.checkpoints()):
        try:
            await work.restore(version)
        except Refused as e:
            journal.emit("checkpoint", "restore-failed", str(e), "error")
            continue
        journal.emit(
            "checkpoint",
            "restored",
            f"epoch {version.epoch} is back from the disk",
            epoch=version.epoch,
        )
        break
    partial = Partial(incoming)
    for tries in itertools.count():
        held = {
            p: e.body.epoch
            for p, e in presence.replicas(work.stage.stage).items()
            if e.body.state in ("training", "ready", "finished")
            and e.body.epoch <= work.settings.epochs
        }
        held = {p: epoch for p, epoch in held.items() if p in work.colleagues} or held
        newest = median_high(held.values()) if held else 0
        first = work.stage.empty and newest == 0
        if (newest <= work.version.epoch or tries >= TRIES) and not first:
            break
        try:
            if first:
                likely, there = (work.stage.stage, ENDS), presence.others()
                near = sorted(there, key=lambda p: there[p].body.stage not in likely)
                await work.join(near[:DONORS], 0, given, partial)
                return
            if not await work.join(
                sorted(p for p, epoch in held.items() if epoch >= newest - 1), None, partial=partial
            ):
                # What is in the directory was written before all were started again, and the disk
                # here has more than theirs.
                journal.emit(
                    "checkpoint",
                    "fetch-older",
                    f"others hold less than epoch {work.version.epoch}, which stays",
                )
                break
            return
        except PeerFault as e:
            if not first:
                journal.emit("checkpoint", "fetch-failed", f"{e}; trying again", "warning")
            elif tries % SAID == 0:
                journal.emit(
                    "checkpoint",
                    "weights-awaited",
                    f"the run begins from a model that nobody in reach gives yet ({e}); whoever "
                    "owns the run has it; asking again",
                    "warning",
                )
        except OutOfResources as e:
            journal.emit(
                "checkpoint",
                "fetch-failed",
                f"{e}; {e.next_step}; going on without keeping pieces",
                "error",
            )
            partial = Partial()
        await asyncio.sleep(retry_s * (SAID if first and tries > SAID else 1))
    # The first round it takes part in brings every fresh parameter anyway: it joins as a listener.
    await asyncio.to_thread(Partial(incoming).clear)
