"""The service that copies this peer's checkpoints to its archive. Enters: the checkpoints on the
disk, time. Leaves: copies, sentences for the operator. Never: a wait of the training, or of the end
of the daemon, for a place that does not answer.

A copy that is given up makes no checkpoint whole any more, even if its thread wakes.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from node.checkpoint.archive.aside import Aside
from node.checkpoint.archive.machine import (
    ArchiveEvent,
    ArchiveSchedule,
    AttemptFailed,
    Copied,
    Copy,
    Every,
    OnDisk,
)
from node.checkpoint.archive.place import Archive, Whole
from node.checkpoint.files import Interrupted
from node.checkpoint.settings import CheckpointSettings
from node.checkpoint.store import CheckpointStore
from node.core.clock import Clock
from node.core.errors import LocalFault
from node.core.journey import Version
from node.core.numbers import human
from node.telemetry.events import Journal

LOOK_S = 5.0
"""Seconds between two looks at the checkpoints on the disk."""


@dataclass(frozen=True, slots=True)
class ArchivePorts:
    """The keeper's ports. ``on_disk()``: the checkpoints on the disk; ``prepare``: called first on
    the thread that works."""

    store: CheckpointStore
    on_disk: Callable[[], OnDisk]
    clock: Clock
    journal: Journal
    prepare: Callable[[], None] = lambda: None


class ArchiveKeeper:
    """Service that copies the checkpoints of one stage. Raises UsageFault if the text of the
    interval is no interval."""

    def __init__(
        self, archive: Archive, stage: int, settings: CheckpointSettings, ports: ArchivePorts
    ) -> None:
        self._archive = archive
        self._stage = stage
        self._keep = settings.to_keep
        self._ports = ports
        self._schedule = ArchiveSchedule(Every.parse(settings.to_every))
        self._aside = Aside(ports.clock, ports.prepare)
        self.shown = archive.address.shown
        self.copied: tuple[int, float] | None = None
        """Epoch of the last copy, and the Unix time at which it was whole."""
        self._untidy = ""
        """The reason why older copies were not removed, empty if they were."""

    @property
    def last(self) -> int | None:
        """The newest epoch known to be in the archive; None if none is known."""
        if self._schedule.last is None:
            return None
        return self._schedule.last.epoch

    @property
    def trouble(self) -> str:
        """A sentence for the operator while copies fail; empty otherwise."""
        why = self._schedule.trouble(self._ports.clock.now())
        if not why:
            return ""
        return f"checkpoints are not copied to {self.shown}: {why}"

    async def run(self) -> None:
        """Copy until cancelled. A copy that is under way then is given up and does not count."""
        await self._find_last()
        while True:
            await self._step(self._ports.on_disk())
            await asyncio.sleep(LOOK_S)

    async def copy_newest(self, limit_s: float) -> bool:
        """Copy the newest checkpoint on the disk, whatever the schedule says. Return False if it is
        not whole in the archive after ``limit_s`` seconds."""
        there = self._ports.on_disk()
        newest = self._schedule.lacks(there)
        if newest is None:
            return bool(there.versions)
        epoch = newest.epoch
        try:
            async with asyncio.timeout(limit_s):
                await self._aside.free.wait()
                await self._copy(epoch)
        except TimeoutError:
            text = f"epoch {epoch} was not at {self.shown} after {limit_s:.0f} s"
            self._ports.journal.emit("checkpoint", "archive-late", text, "warning", epoch=epoch)
        return self._schedule.lacks(there) is None

    async def _find_last(self) -> None:
        """Look up the newest copy in the archive, so that nothing is copied twice."""
        try:
            self._schedule.last = await self._aside.call(
                lambda work: self._archive.newest(self._stage)
            )
        except LocalFault as e:
            self._tell(AttemptFailed(e.what))

    async def _step(self, there: OnDisk) -> None:
        for action in self._feed(there):
            await self._copy(action.epoch)

    async def _copy(self, epoch: int) -> None:
        clock = self._ports.clock
        began = clock.now()
        try:
            whole = await self._aside.call(
                lambda work: self._archive.save(
                    self._ports.store, self._stage, epoch, self._keep, work.goes_on
                )
            )
        except Interrupted:
            return  # its waiter was cancelled, and hears nothing
        except LocalFault as e:
            self._tell(AttemptFailed(e.what))
            return
        self._done(whole, clock.now() - began)

    def _done(self, whole: Whole, seconds: float) -> None:
        failed = self._schedule.why
        self._feed(Copied(Version(whole.epoch, whole.lineage)))
        self.copied = whole.epoch, self._ports.clock.wall()
        text = f"epoch {whole.epoch} is at {self.shown}: {human(whole.nbytes)}, compared"
        if failed:
            text = f"checkpoints are copied again: {text}"
        self._ports.journal.emit(
            "checkpoint",
            "archived",
            text,
            epoch=whole.epoch,
            bytes=whole.nbytes,
            seconds=round(seconds, 3),
        )
        if whole.untidy and whole.untidy != self._untidy:
            text = f"older copies stay beside it: {whole.untidy}"
            self._ports.journal.emit("checkpoint", "archive-untidy", text, "warning")
        self._untidy = whole.untidy

    def _tell(self, event: AttemptFailed) -> None:
        """Report a failure, each reason once until a copy has succeeded."""
        news = event.why != self._schedule.why
        self._feed(event)
        level = "debug"
        if news:
            level = "error"
        self._ports.journal.emit("checkpoint", "archive-failed", self.trouble, level)

    def _feed(self, event: ArchiveEvent) -> list[Copy]:
        return self._schedule.handle(event, self._ports.clock.now())
