"""A simulated peer's disk: its checkpoints, and what else a daemon keeps. Writing takes time, and
what a process that dies was writing is not there afterwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from node.checkpoint.settings import CheckpointSettings
from node.checkpoint.store import Checkpoint, CheckpointStore
from node.core.errors import Refused
from node.training.state.ledger import VoteLedger
from node.wire.tensors import digest


@dataclass
class SimDisk:
    """Survives its peer's process. ``seconds``: to write a checkpoint."""

    seconds: float
    places: dict[tuple[int, int], Checkpoint] = field(default_factory=dict)
    change: str = ""
    """The owner's newest change to how cells average that was known."""
    cell: str = ""
    """The cell that it belongs to."""
    votes: VoteLedger = field(default_factory=VoteLedger)
    writing: tuple[float, dict[tuple[int, int], Checkpoint]] = (0.0, {})
    """Until when something is being written, and what is there if that is cut short."""

    def change_cell(self, cell: str) -> None:
        """The next process begins in that cell, with nothing of what was written in this one."""
        self.cell, self.places, self.writing = cell, {}, (0.0, {})

    def died(self, now: float) -> None:
        """The process is gone: what it was writing never got its name."""
        until, before = self.writing
        if now < until:
            self.places = before
        self.writing = (0.0, {})


class DiskStore(CheckpointStore):
    """The checkpoints on a :class:`SimDisk`; ``read`` is told of every one that is loaded."""

    def __init__(
        self,
        disk: SimDisk,
        settings: CheckpointSettings,
        run_id: str,
        now: Callable[[], float],
        read: Callable[[Checkpoint], None],
    ) -> None:
        super().__init__(Path("/simulated"), settings, run_id)
        self._on, self._now, self._read_back = disk, now, read
        self._blocked = 0.0

    def blocked(self) -> float:
        """Seconds that the last call would have taken a thread; asked once."""
        seconds, self._blocked = self._blocked, 0.0
        return seconds

    def save(
        self,
        stage: int,
        epoch: int,
        parameters: Mapping[str, Tensor],
        optimizer: Mapping[str, Mapping[str, Tensor]],
        meta: Mapping[str, Any],
    ) -> Path:
        state = {n: dict(s) for n, s in optimizer.items()}
        made = Checkpoint(stage, epoch, dict(parameters), state, dict(meta), digest(parameters))
        before = self._on.places
        self._on.places = {**before, (stage, epoch): made}
        others = [e for e in self.epochs(stage)[::-1] if e != epoch]
        for old in others[self.settings.keep - 1 :]:
            del self._on.places[stage, old]
        self._blocked = self._on.seconds
        self._on.writing = self._now() + self._blocked, before
        return self.path(stage, epoch)

    def epochs(self, stage: int) -> list[int]:
        return sorted(e for s, e in self._on.places if s == stage)

    def metas(self, stage: int) -> dict[int, dict[str, Any]]:
        return {e: dict(c.meta) for (s, e), c in sorted(self._on.places.items()) if s == stage}

    def problems(self, stage: int) -> list[tuple[str, str]]:
        return []

    def distrust(self, stage: int, epoch: int, why: str) -> None:
        self._on.places.pop((stage, epoch), None)

    def load(self, stage: int, epoch: int) -> Checkpoint:
        found = self._on.places.get((stage, epoch))
        if found is None:
            raise Refused(f"no checkpoint of stage {stage} at epoch {epoch}", "use another epoch")
        self._read_back(found)
        return found

    def free(self) -> int:
        return 1 << 50
