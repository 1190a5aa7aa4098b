"""The newest state for a peer that starts: the version that the swarm has committed, else its own
newest checkpoint."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from hashlib import sha256
from pathlib import Path
from statistics import median_high

from node.checkpoint.fetch import Partial
from node.coordinator.presence import Presence
from node.core.errors import OutOfResources, PeerFault, Refused
from node.core.ids import ENDS, PeerId, stage_name
from node.dht.record import PeerEntry
from node.model.pretrained import keep_weights
from node.stage.runtime import StageRuntime
from node.telemetry.events import Journal

TRIES = 5
"""Downloads that may fail before a joiner takes part as a listener instead."""
RETRY_S = 1.0
DONORS = 16
"""Peers asked at once for the newest state, or for the weights that the run begins from."""
SAID = 10
"""The journal reports every SAID-th attempt for the weights that failed; after the first SAID
attempts the pauses are SAID times as long."""
LOOKS = 20
"""Looks for a lost stage in other cells after which the pauses between them are SAID times as long.
Each look sees a sample of the cells, and their records take up to a minute to spread."""
LOOK_PAUSE = 3.0
"""Pause between two looks, as a multiple of the pause between two downloads."""
Elsewhere = Callable[[int], Awaitable[Mapping[PeerId, PeerEntry] | None]]
"""Looks for replicas of the stage in other cells, given the number of looks before. None where
there can be none."""
WITHOUT_LEADER = 3
"""Number of other holders of the newest state from which on the leader is not asked for it: it has
the most to do."""


async def begin(
    work: StageRuntime,
    presence: Presence,
    partial: Partial,
    journal: Journal,
    given: str,
    retry_s: float = RETRY_S,
) -> None:
    """Wait until the weights that the stage begins from are in place, with the digest ``given``.
    Without adapters they are not needed once others have trained: their newest state is taken."""
    for tries in itertools.count():
        if not work.stage.empty:
            return
        replicas = presence.view.replicas(work.stage.stage)
        if work.stage.frozen is None and _newest(work, replicas)[0]:
            return
        there = presence.view.everybody
        likely = work.stage.stage, ENDS
        near = sorted(there, key=lambda p: there[p].body.stage not in likely)
        try:
            await work.take_base(near[:DONORS], given, partial)
            break
        except (PeerFault, OutOfResources) as e:
            if isinstance(e, OutOfResources):
                partial.writes = False
            if tries % SAID == 0:
                text = f"the weights that the run begins from are awaited: {e}; its owner has them"
                journal.emit("checkpoint", "weights-awaited", text, "warning")
        pause = retry_s
        if tries > SAID:
            pause *= SAID
        await asyncio.sleep(pause)


async def keep_base(work: StageRuntime, directory: Path, journal: Journal) -> None:
    """Write the weights beside which adapters are trained to ``directory``: every start needs
    them."""
    try:
        await asyncio.to_thread(keep_weights, directory, work.stage.frozen or {})
    except OutOfResources as e:
        journal.emit("checkpoint", "weights-not-kept", f"{e}; {e.next_step}", "warning")


def _newest(
    work: StageRuntime, replicas: Mapping[PeerId, PeerEntry]
) -> tuple[int, dict[PeerId, int]]:
    """Return the epoch at which most other peers hold the stage, 0 without any, and each peer's."""
    held = {
        p: e.body.epoch
        for p, e in replicas.items()
        if e.body.state in ("training", "ready", "finished")
        and e.body.epoch <= work.settings.epochs
    }
    held = {p: epoch for p, epoch in held.items() if p in work.colleagues.all} or held
    if not held:
        return 0, held
    return median_high(held.values()), held


def donors_of(presence: Presence, held: Mapping[PeerId, int], newest: int) -> list[PeerId]:
    """Choose the peers to fetch the newest state from among its holders. The draw differs between
    joiners, so that a crowd does not ask the same few."""
    able = [p for p, epoch in held.items() if epoch >= newest - 1]
    others = [p for p in able if p not in presence.view.leaders]
    chosen = able
    if len(others) >= WITHOUT_LEADER:
        chosen = others
    return sorted(chosen, key=lambda p: sha256(f"{presence.me}/{p}".encode()).digest())[:DONORS]


async def _look_again(work: StageRuntime, journal: Journal, looks: int, retry_s: float) -> None:
    """Wait until the next look for a lost stage: nobody in the own cell can train it, so this peer
    has nothing else to do."""
    if looks % LOOKS == 1:
        text = f"nobody in this cell gives {stage_name(work.stage.stage)}: looks in other cells"
        journal.emit("checkpoint", "looks-elsewhere", text, "warning")
    pause = LOOK_PAUSE * retry_s
    if looks > LOOKS:
        pause *= SAID
    await asyncio.sleep(pause)


async def catch_up(
    work: StageRuntime,
    presence: Presence,
    incoming: Path | None,
    journal: Journal,
    retry_s: float = RETRY_S,
    given: str = "",
    elsewhere: Elsewhere | None = None,
) -> None:
    """Leave the newest parameters that can be had in place. Pieces that were fetched and verified
    stay in ``incoming`` over failures and restarts (None: in memory, over failures). Pieces of
    other stages, in directories beside it, are removed. ``given``: the digest of the parameters
    that the stage begins from, empty where they are drawn.

    The epoch that others hold is the one that most of them report. If this peer has worked with any
    of them, only those are asked: one stranger's word must not send a peer after parameters that do
    not exist.

    Where the own cell trains and nobody in it holds the stage, this lasts until ``elsewhere`` finds
    a peer of another cell that gives its parameters.
    """
    for version in reversed(work.local_checkpoints.versions()):
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
    if incoming is not None:
        await asyncio.to_thread(_forget_other_stages, incoming)
    partial = Partial(incoming)
    await begin(work, presence, partial, journal, given, retry_s)
    failed = False
    tries = 0
    looks = 0
    while tries < TRIES:
        newest, held = _newest(work, presence.view.replicas(work.stage.stage))
        lost = False
        if elsewhere is not None and not work.stage.version.epoch and (failed or not newest):
            seen = await elsewhere(looks)
            looks += 1
            # It has read the own cell again.
            newest, held = _newest(work, presence.view.replicas(work.stage.stage))
            there, others = _newest(work, seen or {})
            if there and (failed or not newest):
                newest, held, lost = there, others, True
            elif seen is not None and not newest:
                await _look_again(work, journal, looks, retry_s)
                continue
        if not lost:
            tries += 1
        failed = not lost
        if newest <= work.stage.version.epoch:
            break
        try:
            donors = donors_of(presence, held, newest)
            if not await work.join(donors, None, partial=partial):
                # The directory still shows records from before all peers were started again; the
                # disk here holds a newer epoch than theirs.
                journal.emit(
                    "checkpoint",
                    "fetch-older",
                    f"others hold less than epoch {work.stage.version.epoch}, which stays",
                )
                break
            if lost:
                journal.emit(
                    "checkpoint",
                    "from-another-cell",
                    f"nobody in this cell gives {stage_name(work.stage.stage)}: begins with the "
                    f"parameters of another cell at epoch {work.stage.version.epoch}",
                    epoch=work.stage.version.epoch,
                )
            break
        except PeerFault as e:
            if looks <= LOOKS or looks % SAID == 0:
                journal.emit("checkpoint", "fetch-failed", f"{e}; trying again", "warning")
        except OutOfResources as e:
            journal.emit(
                "checkpoint",
                "fetch-failed",
                f"{e}; {e.next_step}; going on, and a restart finds no more pieces than now",
                "error",
            )
            partial.writes = False
        if lost:
            await _look_again(work, journal, looks, retry_s)
        else:
            await asyncio.sleep(retry_s)
    # Where nothing came, the first round it takes part in brings every fresh parameter anyway: it
    # joins as a listener.
    await asyncio.to_thread(partial.clear)


def _forget_other_stages(incoming: Path) -> None:
    """Remove the pieces of other stages from the directories beside ``incoming``. They are left
    over from a process that was killed while it fetched another stage."""
    for other in incoming.parent.glob("stage-*"):
        if other != incoming:
            Partial(other).clear()
