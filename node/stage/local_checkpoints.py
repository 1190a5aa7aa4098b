"""This peer's own checkpoints of its stage: written beside training and by a stop, read back by
version. Also their faults and the disk's, for the operator."""

import asyncio
import threading
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from node.averaging.strategies.outer import REMOVED
from node.checkpoint.files import Interrupted, yield_to_others
from node.checkpoint.schedule import CheckpointSchedule
from node.checkpoint.store import Checkpoint
from node.core.errors import LocalFault, OutOfResources, Refused
from node.core.ids import PeerId
from node.core.journey import UNKNOWN, Losses, Version, lineage
from node.core.samples import parse_cursor, rows
from node.core.tasks import Tasks
from node.epoch.bounds import Bounds
from node.epoch.plan_context import PlanContext
from node.optim.state_replica import StateReplica
from node.optim.steps import HeldState
from node.stage.engines import Engines
from node.wire.remote import off_device

TOLD = 3
"""Number of unusable checkpoints that the status names; the others are only counted."""
AGAIN_S = 30.0
"""Seconds after a writing that found no room before it is tried again without a newer version: a
disk may fill and empty many times, and each attempt writes all it can."""


@dataclass(frozen=True)
class StageSnapshot:
    """Content of a checkpoint: a stage at one version. Later epochs replace the tensors and do not
    write into them.

    ``optimizer``: state of the parts that this peer owns, by part; ``copies``: of other owners'
    parts, so that a swarm which comes back without some of its peers has their state;
    ``colleagues``: peers that this one has worked with; ``outer_step``: the step of the server of
    pushes that the anchor is of.
    """

    version: Version
    context: PlanContext
    parameters: Mapping[str, Tensor]
    optimizer: Mapping[str, HeldState]
    copies: Mapping[str, StateReplica]
    colleagues: Collection[PeerId] = ()
    outer_step: int = 0

    @property
    def state(self) -> dict[str, HeldState]:
        """Optimizer state of all parts, own and copied."""
        return dict(self.optimizer) | {n: c.state for n, c in self.copies.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        parameters = sum(t.nbytes for t in self.parameters.values())
        return parameters + sum(t.nbytes for state in self.state.values() for t in state.values())

    def on_cpu(self) -> "StageSnapshot":
        """The same with its tensors in main memory, of this process or of others. Blocks on the
        device that has them."""
        return replace(
            self,
            parameters={name: t.detach().cpu() for name, t in self.parameters.items()},
            optimizer={
                name: {key: off_device(t) for key, t in state.items()}
                for name, state in self.optimizer.items()
            },
        )

    def meta(self) -> dict[str, Any]:
        """The part of a checkpoint's manifest that is this module's, as JSON."""
        context = self.context
        meta: dict[str, Any] = {
            "epoch": self.version.epoch,
            "lineage": self.version.lineage,
            "copies": {n: [c.version.epoch, c.version.lineage] for n, c in self.copies.items()},
            "tokens": context.tokens,
            "cursor": rows(context.cursor),
            "owners": context.owners,
            "change": context.change,
            "colleagues": sorted(self.colleagues),
        }
        if context.reference.known:
            meta["reference"] = context.reference.row()
        if self.outer_step:
            meta["outer_step"] = self.outer_step
        return meta


class LocalCheckpoints:
    """Writes one checkpoint at a time. A full disk does not stop training: the newest version is
    written once there is room again, also where the run is complete and none will follow."""

    def __init__(
        self,
        engines: Engines,
        stage: int,
        tasks: Tasks,
        bounds: Bounds,
        size: int,
    ) -> None:
        """``size``: bytes that a checkpoint has at least."""
        self._engines = engines
        self._stage = stage
        self._tasks = tasks
        self._bounds = bounds
        self._store = engines.store
        self._journal = engines.journal
        self._schedule = CheckpointSchedule(engines.store.settings)
        self._saving: asyncio.Task[bool] | None = None
        self._written: Version | None = None
        """Version that is being written or was written last."""
        self.newest: Version | None = None
        """The version that this peer wrote to the disk last since its start. Later versions on the
        disk belong to a history that the run gave up."""
        self._goes_on = threading.Event()
        """Cleared to give up the writing under way."""
        self._writer = ThreadPoolExecutor(1, "checkpoint", initializer=yield_to_others)
        self._metas: dict[int, dict[str, Any]] | None = None
        self._bad: list[tuple[str, str]] = []
        self._told: set[tuple[str, str]] = set()
        self._failed = ""
        self._no_room_at: float | None = None
        """Time at which the last writing found the disk full; None if it did not."""
        self._size = size

    def settled(self, epoch: int) -> bool:
        """The version of ``epoch`` is settled. Return True if it is to be written: by the schedule,
        or because the last one found no room and now there is room."""
        if not self.writes:
            return False
        scheduled = self._schedule.settled(epoch, self._now())
        return not self._busy and (scheduled or self._has_room_again)

    def overdue(self) -> bool:
        """Return True if the newest settled version is to be written in the middle of an epoch, or
        after the last one: because it would come too late afterwards, or because the last writing
        found no room and now there is room."""
        if not self.writes or self._busy:
            return False
        now = self._now()
        if self._schedule.overdue(now):
            return True
        waited = self._no_room_at is not None and now - self._no_room_at >= AGAIN_S
        return waited and self._has_room_again

    @property
    def _has_room_again(self) -> bool:
        """True if the last writing found the disk full, and it no longer is."""
        return self._no_room_at is not None and self._lacks() == ""

    @property
    def _busy(self) -> bool:
        """True while a checkpoint is being written."""
        return self._saving is not None and not self._saving.done()

    def _now(self) -> float:
        return self._engines.pipeline.clock.now()

    def troubles(self) -> list[str]:
        """Sentences for the operator: why nothing is written, which checkpoints cannot be used.
        Looks at the disk's free space."""
        lacks = self._lacks() if self.writes else ""
        found: list[str] = []
        if self._failed:
            found.append(self._failed)
        elif lacks:
            found.append(lacks)
        if self._bad:
            more = f" and {len(self._bad) - TOLD} more" if len(self._bad) > TOLD else ""
            named = "; ".join(f"{name}: {why}" for name, why in self._bad[:TOLD])
            found.append(f"checkpoints that cannot be used stay where they are: {named}{more}")
        return found

    def _lacks(self) -> str:
        """A sentence if the disk has no room for the next checkpoint, by the size of the last one;
        "" otherwise."""
        try:
            free = self._store.free()
        except OSError as e:
            return f"the disk of {self._store.root} does not answer: {e.strerror or e}"
        if free > self._size:
            return ""
        return (
            f"the disk is full: a checkpoint has {self._size:,} bytes, and {free:,} are free "
            f"under {self._store.root}"
        )

    @property
    def writes(self) -> bool:
        """True if checkpoints are written at all."""
        return self._store.settings.writes

    @property
    def stride(self) -> int:
        """Epochs between two checkpoints by time, a power of two."""
        return self._schedule.stride

    def versions(self) -> tuple[Version, ...]:
        """Versions on the disk, oldest first. A checkpoint that was written without a lineage has
        an empty one."""
        said = sorted(self._said().items(), key=lambda item: item[0])
        return tuple(Version(e, line) for e, meta in said if (line := _lineage(meta)) is not None)

    def recall(self, version: Version) -> PlanContext | None:
        """The context in the checkpoint of ``version``: cursor of the sampler, owners and tokens;
        None without one."""
        meta = self._said().get(version.epoch, {})
        if _lineage(meta) != version.lineage:
            return None
        try:
            cursor = parse_cursor(meta["cursor"])
            owners = meta["owners"]
            return PlanContext(
                cursor,
                {str(k): PeerId(v) for k, v in owners.items()},
                self.tokens(version.epoch, meta),
                str(meta.get("change", "")),
                reference=Losses.parse(meta.get("reference", UNKNOWN.row())),
            )
        except (KeyError, TypeError, ValueError, IndexError, AttributeError):
            return None

    def tokens(self, epoch: int, meta: Mapping[str, Any]) -> int:
        """Tokens counted in the history of a checkpoint; 0 if it does not say. Never more than that
        history can have: others would take that for a fault of this peer."""
        value = meta.get("tokens")
        if type(value) is int and value >= 0:
            return self._bounds.counted(epoch, value)
        return 0

    async def load(self, version: Version, shapes: Mapping[str, tuple[int, ...]]) -> Checkpoint:
        """The checkpoint of ``version``, verified. Raises Refused if there is none, or if it is of
        another model or history, or of a run that averaged by push-sum."""
        try:
            found = await self._engines.aside(self._store.load, self._stage, version.epoch)
            copies_of(found.meta)
            if "books" in found.meta:  # of the mass that its cell had
                raise Refused(
                    f"the checkpoint of epoch {version.epoch} is of a run by push-sum, which was "
                    "removed",
                    f"begin another run, and for outer.strategy {REMOVED['push-sum']}",
                )
            if {name: tuple(t.shape) for name, t in found.parameters.items()} != dict(shapes) or {
                name.partition("#")[0] for name in found.optimizer
            } - shapes.keys():
                raise Refused(
                    f"the checkpoint of epoch {version.epoch} is of another model",
                    "use another directory",
                )
        except Refused as e:
            # From now on nobody is told that this peer could go back to it.
            self._store.distrust(self._stage, version.epoch, e.what)
            self._metas = None
            raise
        if _lineage(found.meta) != version.lineage:
            raise Refused(
                f"the checkpoint of epoch {version.epoch} is of another history",
                "use another epoch",
            )
        return found

    def save(self, snapshot: StageSnapshot) -> None:
        """Write a checkpoint beside training, unless one is being written."""
        if self._busy:
            epoch = snapshot.version.epoch
            text = f"epoch {epoch}: the one before is still being written"
            self._journal.emit("checkpoint", "checkpoint-skipped", text, "warning")
            return
        self._saving = self._tasks.spawn(self._write(snapshot, self._schedule.newest), "checkpoint")

    async def keep(self, snapshots: Sequence[StageSnapshot], limit_s: float) -> bool:
        """Write these versions in this order before the process ends, except versions that the disk
        has. Return False if that failed or was not done after ``limit_s`` seconds.

        A writing under way of another version is given up.
        """
        settled_at = self._schedule.newest
        kept = True
        known = set(self.versions())
        try:
            async with asyncio.timeout(limit_s):
                if self._saving is not None and self._busy:
                    if self._written not in [s.version for s in snapshots]:
                        self._goes_on.clear()
                    await asyncio.wait([self._saving])
                    known = set(self.versions())
                for snapshot in snapshots:
                    if snapshot.version in known:
                        self.newest = snapshot.version
                        continue
                    beside = [s.version.epoch for s in snapshots]
                    writing = self._write(snapshot, settled_at, beside=beside, hurried=True)
                    self._saving = self._tasks.spawn(writing, "checkpoint")
                    await asyncio.wait([self._saving])
                    kept = self._is_written(self._saving, snapshot.version.epoch) and kept
        except TimeoutError:
            self._goes_on.clear()
            text = f"the checkpoint was not on disk after {limit_s:.0f} s and is given up"
            self._journal.emit("checkpoint", "checkpoint-late", text, "error")
            return False
        return kept

    def _is_written(self, writing: asyncio.Task[bool], epoch: int) -> bool:
        """Return True if this writing, which is over, put its version on disk. A process that ends
        because its device is lost cannot read the device either."""
        error = asyncio.CancelledError() if writing.cancelled() else writing.exception()
        if error is None:
            return writing.result()
        text = f"epoch {epoch} could not be written: {type(error).__name__}: {error}"
        self._journal.emit("checkpoint", "checkpoint-failed", text, "error", epoch=epoch)
        return False

    async def _write(
        self,
        snapshot: StageSnapshot,
        settled_at: float,
        *,
        beside: Collection[int] = (),
        hurried: bool = False,
    ) -> bool:
        """Write one checkpoint, on a thread of low priority unless ``hurried``. Return False if it
        is not on disk."""
        version = snapshot.version
        epoch = version.epoch
        nbytes = snapshot.nbytes
        stride = self._schedule.stride
        began = self._now()
        self._size = max(self._size, nbytes)
        self._written = version
        goes_on = threading.Event()
        goes_on.set()
        self._goes_on = goes_on
        # The device needs its memory for the next epochs, so this coroutine must not hold tensors
        # there.
        taken = [snapshot]
        del snapshot

        def write() -> tuple[str, dict[int, dict[str, Any]], list[tuple[str, str]]]:
            here = taken.pop().on_cpu()
            path = self._store.save(
                self._stage,
                epoch,
                here.parameters,
                here.state,
                here.meta(),
                stride=stride,
                beside=beside,
                goes_on=goes_on.is_set,
            )
            return str(path), self._store.metas(self._stage), self._store.problems(self._stage)

        try:
            if hurried:
                path, self._metas, bad = await asyncio.to_thread(write)
            else:
                loop = asyncio.get_running_loop()
                path, self._metas, bad = await loop.run_in_executor(self._writer, write)
        except Interrupted:
            text = f"epoch {epoch} is not written to its end"
            self._journal.emit("checkpoint", "checkpoint-given-up", text, "debug", epoch=epoch)
            return False
        except LocalFault as error:
            # Under a quota the disk itself still has room. Then the next write waits for its usual
            # turn.
            self._schedule.failed(settled_at)
            self._failed = error.what
            self._no_room_at = None
            if isinstance(error, OutOfResources) and self._lacks():
                self._no_room_at = self._now()
            text = f"{error}; {error.next_step}"
            self._journal.emit("checkpoint", "checkpoint-failed", text, "error", epoch=epoch)
            return False
        self.newest = version
        seconds = self._now() - began
        self._schedule.written(settled_at, seconds)
        self._found(bad)
        text = f"epoch {epoch} is on disk"
        if self._failed:
            again = f"checkpoints are written again: {text}"
            self._journal.emit("checkpoint", "checkpoint-again", again, epoch=epoch)
        self._failed = ""
        self._no_room_at = None
        self._journal.emit(
            "checkpoint",
            "checkpoint-written",
            text,
            "debug",
            epoch=epoch,
            path=path,
            bytes=nbytes,
            seconds=round(seconds, 3),
        )
        return True

    async def saved(self) -> None:
        """Wait for the checkpoint that is being written, if any. If the wait is cancelled, the
        writing goes on."""
        if self._saving is not None:
            await asyncio.wait([self._saving])

    def close(self) -> None:
        """End the thread that writes, once its writing is done or given up."""
        self._writer.shutdown(wait=False)

    def _said(self) -> dict[int, dict[str, Any]]:
        """The checkpoints' own metadata by epoch; read again only after one was written."""
        if self._metas is None:
            try:
                self._metas = self._store.metas(self._stage)
                self._found(self._store.problems(self._stage))
            except LocalFault as error:
                self._metas = {}
                self._found([(f"stage-{self._stage}", f"{error}; {error.next_step}")])
        return self._metas

    def _found(self, bad: list[tuple[str, str]]) -> None:
        """Report checkpoints that cannot be used, each once. Checkpoints that were set aside are
        not listed as troubles: they are in nobody's way."""
        self._bad = [(name, why) for name, why in bad if ".aside-" not in name]
        for name, why in bad:
            if (name, why) not in self._told:
                self._told.add((name, why))
                self._journal.emit(
                    "checkpoint",
                    "checkpoint-ignored",
                    f"{name} of stage {self._stage} is not used and stays where it is: {why}",
                    "warning",
                    name=name,
                )


def outer_step_of(meta: Mapping[str, Any]) -> int:
    """The server's step at which the anchor of a checkpoint was made; 0 if it does not say."""
    said = meta.get("outer_step")
    if type(said) is int and said >= 0:
        return said
    return 0


def colleagues_of(meta: Mapping[str, Any]) -> tuple[PeerId, ...]:
    """Colleagues of the peer that wrote a checkpoint; empty if it does not say."""
    said = meta.get("colleagues")
    if not isinstance(said, list):
        return ()
    return tuple(PeerId(p) for p in said if isinstance(p, str))


def copies_of(meta: Mapping[str, Any]) -> dict[str, Version]:
    """Parts with a copy of another owner's state in a checkpoint, each with its version. Raises
    Refused."""
    try:
        return {
            name: Version(int(epoch), lineage(line))
            for name, (epoch, line) in meta.get("copies", {}).items()
        }
    except (AttributeError, TypeError, ValueError) as e:
        raise Refused(
            "the checkpoint does not say whose optimizer state it has", "use another epoch"
        ) from e


def _lineage(meta: Mapping[str, Any]) -> str | None:
    try:
        return lineage(meta.get("lineage", ""))
    except ValueError:
        return None
