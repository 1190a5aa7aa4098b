"""The part of a stage in rounds between cells, as the stage's runtime sees it. The package
:mod:`node.outer` implements it; the stage knows no other cell."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from node.averaging.strategies.outer import OuterSettings
from node.checkpoint.state import StateKind
from node.core.ids import PeerId
from node.core.journey import Plan, Version
from node.core.tasks import Tasks
from node.epoch import events as ev
from node.stage.engines import Engines
from node.stage.inner_round import Rounds
from node.stage.state import StageState
from node.stage.state_export import StateExport

SAVED = "#outer"
"""Suffix of a part's name, under which a checkpoint keeps its anchor, outer momentum and error
feedback."""


@dataclass
class WindowNews:
    """Report on the last window with a mean in place at the reporting peer: its number, the number
    of cells, peers of this stage, tensor bytes, seconds. ``apart``: median distance of the partners
    from the own contribution, relative to its length; 0 if unknown."""

    number: int = 0
    cells: int = 0
    peers: int = 0
    nbytes: int = 0
    seconds: float = 0.0
    apart: float = 0.0


class AnchorPort(Protocol):
    """The anchor of a stage: :class:`node.outer.anchor.Anchor`."""

    @property
    def name(self) -> str:
        """Digest of the anchor, empty for none."""
        ...

    def follow(self, settings: OuterSettings) -> None:
        """Use these settings from now on."""
        ...

    def begin(self) -> None:
        """The parameters in place are the ones that the run begins from."""
        ...

    def settled(self) -> None:
        """The version in place is final."""
        ...

    def rolled_back(self) -> None:
        """The last version was undone."""
        ...

    def saved(self, version: Version) -> dict[str, dict[str, Tensor]]:
        """The part of a checkpoint of ``version``: tensors by part."""
        ...

    def step_at(self, version: Version) -> int:
        """The server's step at ``version``."""
        ...

    def restored(self, found: Mapping[str, Mapping[str, Tensor]], step: int) -> None:
        """Take the anchor and the server's ``step`` from a checkpoint."""
        ...

    def describe(
        self, epoch: int | None, history: str, /
    ) -> tuple[Version, Mapping[str, Tensor]] | None:
        """The anchor for other peers, None if the version is not here."""
        ...


class WindowPort(Protocol):
    """The windows of a stage: :class:`node.outer.window.WindowRound`."""

    news: WindowNews

    @property
    def mean(self) -> tuple[int, str]:
        """The newest window for which the mean is here, with the mean's digest."""
        ...

    def begin(self, plan: Plan, settings: OuterSettings, listener: bool) -> None:
        """A plan is in force, under these settings."""
        ...

    def forget(self) -> None:
        """The parameters in place came from elsewhere: no anchor and no window belongs to them."""
        ...

    async def attempt(
        self, plan: Plan, r: ev.RoundArrived, listener: bool
    ) -> tuple[ev.RoundEnded, dict[str, Tensor]]:
        """Make one attempt of an outer round. Returns its outcome and the next parameters."""
        ...

    async def takes(self) -> None:
        """The parameters of the attempt are put in place."""
        ...

    async def copied(
        self, plan: Plan, donors: Sequence[PeerId], version: Version, nbytes: int
    ) -> None:
        """The parameters of ``version`` came from ``donors``."""
        ...

    def describe(
        self, kind: StateKind, window: int | None
    ) -> tuple[Version, Mapping[str, Tensor]] | None:
        """The contribution to a window, or its mean, for other peers; None if it is not here."""
        ...


@dataclass(frozen=True)
class StageParts:
    """The parts of a stage's runtime that rounds between cells work with."""

    stage: StageState
    engines: Engines
    state_export: StateExport
    rounds: Rounds
    tasks: Tasks
    me: PeerId


Outer = Callable[[StageParts], tuple[AnchorPort, WindowPort]]
"""Makes the anchor and the windows of a stage."""
