"""Restoring of checkpoints from an archive to the disk of a peer. Enters: an archive, the store of
a peer. Leaves: checkpoints in that store, every hash compared. Blocks: run it outside the event
loop."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from node.checkpoint.archive.line import current
from node.checkpoint.archive.place import Archive, GoesOn, Whole
from node.checkpoint.files import Interrupted
from node.checkpoint.store import Checkpoint, CheckpointStore
from node.core.errors import LocalFault, OutOfResources, Refused, UsageFault
from node.core.numbers import human
from node.telemetry.events import Journal

RESTORED = 3
"""Number of newest epochs that are put back: all stages have to go on from one epoch, and the
stages may have different ones."""
GATHERED = 64
"""Copies of one epoch that are read for their optimizer state."""


def restore(
    archive: Archive,
    store: CheckpointStore,
    stage: int,
    scratch: Path,
    journal: Journal,
    goes_on: GoesOn = lambda: True,
    *,
    epochs: int,
) -> list[int]:
    """Put the newest checkpoints of a stage back into ``store``, unless it has newer ones. Returns
    the epochs. ``scratch``: a directory for files under way, which is made and removed;
    ``goes_on``: asked between two blocks; ``epochs``: of the run, beyond which none is believed.

    Each peer's copy has the optimizer state of the parts that this peer owned, so the copies of one
    epoch and history are put together. Epochs that the run gave up when it went back are left out
    (:mod:`node.checkpoint.archive.line`), and count as absent on the disk. Where there is not room
    for all, older ones make way or newer ones are left out. Raises UsageFault if the archive has
    nothing of this run, LocalFault if it cannot be read, OutOfResources if this disk has no room
    for any of it, Interrupted if ``goes_on`` returned False. A copy that is damaged, or
    that no peer of this run can have made, is reported and left out.
    """
    scene = _Scene(archive, store, scratch, journal, goes_on, epochs)
    copies = archive.copies(stage)
    found = current(filter(scene.is_plausible, copies), archive.me)
    shown = archive.address.shown
    if not copies:
        stages = sorted({whole.stage for whole in archive.copies()})
        if not stages:
            raise UsageFault(
                f"{shown} has no whole checkpoint of this run",
                "name the address that checkpoint.to has, and the swarm.toml of that run",
            )
        text = f"{shown} has nothing of stage {stage}, only of {', '.join(map(str, stages))}"
        journal.emit("checkpoint", "nothing-to-restore", text, "warning")
        return []
    here = scene.newest_here(stage, copies, found)
    newer = sorted({whole.epoch for whole in found if whole.epoch > here}, reverse=True)
    done: list[int] = []
    while newer and not done:
        # The store keeps the newest that it has written.
        for epoch in sorted(newer[:RESTORED]):
            one = scene.gathered([whole for whole in found if whole.epoch == epoch])
            if one is not None and scene.try_put(one, done):
                done.append(epoch)
        newer = newer[RESTORED:]
    there = store.epochs(stage)
    done = [epoch for epoch in done if epoch in there]
    if scene.full and not done:
        raise scene.full[0]
    if done:
        text = f"epochs {', '.join(map(str, sorted(done)))} are back from {shown}"
        journal.emit("checkpoint", "restored-from-archive", text, epochs=sorted(done))
    elif here >= 0:
        text = f"nothing is taken from {shown}: epoch {here} on this disk is as new"
        journal.emit("checkpoint", "nothing-to-restore", text)
    return sorted(done)


@dataclass(frozen=True, slots=True)
class _Scene:
    """Objects that one restoring uses."""

    archive: Archive
    store: CheckpointStore
    scratch: Path
    journal: Journal
    goes_on: GoesOn
    epochs: int
    full: list[OutOfResources] = field(default_factory=list)
    """Faults of copies for which this disk has no room."""

    def is_plausible(self, whole: Whole) -> bool:
        """Return False, with a line in the journal, for a page that no peer of this run can have
        written. Older software wrote pages without a lineage; only for this peer's own copies is
        it then taken from the manifest, since the lineage tells histories apart."""
        if whole.epoch > self.epochs:
            self._leave_out(whole, f"it is of epoch {whole.epoch}, and the run has {self.epochs}")
            return False
        if whole.epoch and not whole.lineage and whole.peer != self.archive.me:
            self._leave_out(whole, "its page does not name its history")
            return False
        return True

    def newest_here(self, stage: int, copies: list[Whole], found: list[Whole]) -> int:
        """The epoch of the newest intact checkpoint on this disk, -1 without any. Left out are
        checkpoints that the run has given up, by the order on the disk or by this peer's
        ``copies``. ``found``: the copies that the run has not given up."""
        metas = self.store.metas(stage)
        here = {(e, str(metas[e].get("lineage"))) for e in self.store.current(stage)}
        goes_on = {(whole.epoch, whole.lineage) for whole in found}
        own = {(whole.epoch, whole.lineage) for whole in copies if whole.peer == self.archive.me}
        given_up = here & (own - goes_on)
        most = self.epochs
        if given_up:
            replaced = {epoch for epoch, _ in goes_on}
            given_up |= {version for version in here - goes_on if version[0] in replaced}
            most = min(most, min(given_up)[0] - 1)
        newest = self.store.newest_whole(stage, most, self.goes_on)
        if newest is None:
            return -1
        return newest

    def try_put(self, one: Checkpoint, beside: list[int]) -> bool:
        """Write a checkpoint to the disk. Checkpoints of the epochs ``beside`` stay if there is
        room. Return False, with a line in the journal, if there is no room for it alone."""
        try:
            try:
                self._put(one, beside)
            except OutOfResources:
                if not beside:
                    raise
                self._put(one, [])
        except OutOfResources as e:
            self.full.append(e)
            text = f"epoch {one.epoch} is not put back: {e}"
            self.journal.emit("checkpoint", "copy-unusable", text, "warning", epoch=one.epoch)
            return False
        return True

    def _put(self, one: Checkpoint, beside: list[int]) -> None:
        self.store.save(
            one.stage,
            one.epoch,
            one.parameters,
            one.optimizer,
            one.meta,
            beside=beside,
            goes_on=self.goes_on,
        )

    def gathered(self, wholes: list[Whole]) -> Checkpoint | None:
        """The checkpoint of one epoch: the first copy that can be read, with the optimizer state of
        :data:`GATHERED` copies at most of the same history. None if none can be read."""
        first: Checkpoint | None = None
        for whole in wholes[:GATHERED]:
            one = self._read(whole)
            if one is None:
                continue
            if first is None:
                first = one
            elif _is_same(first, one):
                first = _with_state_of(first, one)
        return first

    def _read(self, whole: Whole) -> Checkpoint | None:
        """One copy; None, with a line in the journal, if it cannot be read."""
        shutil.rmtree(self.scratch, ignore_errors=True)
        place = CheckpointStore(self.scratch, self.store.settings, self.store.run_id)
        try:
            if whole.nbytes > (free := place.free()):
                # Its page may say anything, also that this disk is too small for it.
                raise OutOfResources(
                    f"it has {human(whole.nbytes)}, and {human(free)} are free on this disk",
                    "make room, or restore from another place",
                )
            self.archive.fetch(whole, str(place.path(whole.stage, whole.epoch)), self.goes_on)
            found = place.load(whole.stage, whole.epoch, self.goes_on)
            if found.check_history(self.epochs) != whole.lineage and whole.lineage:
                raise Refused("its manifest names another history than its page")
            return found
        except Interrupted:
            raise
        except LocalFault as e:
            if isinstance(e, OutOfResources):
                self.full.append(e)
            self._leave_out(whole, str(e))
            return None
        finally:
            shutil.rmtree(self.scratch, ignore_errors=True)

    def _leave_out(self, whole: Whole, why: str) -> None:
        text = f"the copy of epoch {whole.epoch} by {whole.peer[-6:]} is not used: {why}"
        self.journal.emit("checkpoint", "copy-unusable", text, "warning", epoch=whole.epoch)


def _is_same(one: Checkpoint, other: Checkpoint) -> bool:
    """Return True for checkpoints of one version."""
    return (one.digest, one.meta.get("lineage")) == (other.digest, other.meta.get("lineage"))


def _with_state_of(one: Checkpoint, other: Checkpoint) -> Checkpoint:
    """The checkpoint with the optimizer state of another owner of the same version too. State of
    that version replaces copies of an older one."""
    mine = _copies(one.meta)
    theirs = _copies(other.meta)
    state = dict(one.optimizer)
    copies = dict(mine)
    for name, tensors in other.optimizer.items():
        if name in theirs and name in state:
            continue
        if name in state and name not in mine:
            continue
        state[name] = tensors
        copies.pop(name, None)
        if name in theirs:
            copies[name] = theirs[name]
    return replace(one, optimizer=state, meta=one.meta | {"copies": copies})


def _copies(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Parts whose state is a copy of another owner's, as the checkpoint says."""
    found = meta.get("copies", {})
    if not isinstance(found, dict):
        return {}
    return found
