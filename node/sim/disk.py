"""A simulated peer's disk: checkpoints that are written piece by piece beside their place and moved
there when whole.

What a crash leaves is what had been written; only what was moved into place is ever offered again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from node.core.ids import PeerId
from node.core.journey import Unit, Version
from node.sim.values import Moment, Value

if TYPE_CHECKING:
    from node.sim.world import Host


@dataclass
class Checkpoint:
    """``expected`` parts of ``version``; it is whole when all are in ``values`` and ``sealed``."""

    version: Version
    stage: int
    expected: int
    tokens: int
    cursor: tuple[int, tuple[int, ...]]
    owners: dict[str, PeerId]
    values: dict[str, Value] = field(default_factory=dict)
    moments: dict[str, Moment] = field(default_factory=dict)
    sealed: bool = False
    cell: int = 0
    worked: dict[Unit, int] = field(default_factory=dict)
    mass: dict[Unit, int] = field(default_factory=dict)
    change: str = ""
    since: int = 0

    @property
    def whole(self) -> bool:
        return self.sealed and len(self.values) == self.expected


class Disk:
    """Survives its peer's process. ``keep`` newest checkpoints stay."""

    def __init__(self, keep: int, seconds: float) -> None:
        self.keep, self._seconds = keep, seconds
        self.places: dict[tuple[int, int], Checkpoint] = {}
        self._writing: Checkpoint | None = None
        self.colleagues: frozenset[PeerId] = frozenset()
        """With whom the peer had worked; read back with a checkpoint."""
        self.change = ""
        """The owner's newest change to how cells average that was known."""

    def boot(self) -> None:
        """The process is new: what was being written is abandoned where it is."""
        self._writing = None

    def save(
        self,
        host: Host,
        blank: Checkpoint,
        values: Mapping[str, Value],
        moments: Mapping[str, Moment],
        done: Callable[[], None],
    ) -> bool:
        """Write in the background; False when one is being written already."""
        if self._writing is not None:
            return False
        self._writing = blank
        pieces = sorted(values)
        each = self._seconds / (len(pieces) + 1)

        def piece(i: int) -> None:
            if self._writing is not blank:
                return
            if i < len(pieces):
                blank.values[pieces[i]] = values[pieces[i]]
                if pieces[i] in moments:
                    blank.moments[pieces[i]] = moments[pieces[i]]
                host.after(each, piece, i + 1)
                return
            self._writing, blank.sealed = None, True
            self.place(blank)
            done()

        host.after(each, piece, 0)
        return True

    def place(self, checkpoint: Checkpoint) -> None:
        """Move it where it is found; the oldest beyond ``keep`` go."""
        self.places[checkpoint.stage, checkpoint.version.epoch] = checkpoint
        mine = sorted(e for s, e in self.places if s == checkpoint.stage)
        for epoch in mine[: -self.keep]:
            del self.places[checkpoint.stage, epoch]

    def versions(self, stage: int, cell: int = -1) -> tuple[Version, ...]:
        """What is found on the disk for a stage, of one cell unless that is -1, oldest first."""
        return tuple(
            c.version
            for (s, _), c in sorted(self.places.items())
            if s == stage and cell in (-1, c.cell)
        )

    def find(self, stage: int, version: Version) -> Checkpoint | None:
        """The checkpoint of exactly this version."""
        found = self.places.get((stage, version.epoch))
        return found if found is not None and found.version == version else None
