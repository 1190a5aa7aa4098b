"""What choosing a stage, changing it and posting a record need of the peer they are done for: a
daemon or a simulated peer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from node.core.clock import Clock
from node.core.ids import CellId
from node.core.tasks import Tasks
from node.core.version import Protocols
from node.dht.record import PeerBody
from node.identity.keys import Signer
from node.manifest import Manifest
from node.reach.standing import Standing
from node.telemetry.events import Journal
from node.training.presence import Presence
from node.training.service import Training
from node.training.stage_runtime import StageRuntime
from node.training.state.meter import PipelineMeter
from node.training.state.stage import StageState


class Wanted(Protocol):
    """What the operator says: a stage, and which others would do (see
    :class:`~node.dht.record.PeerBody`)."""

    @property
    def stage(self) -> int | None: ...
    @property
    def open_to(self) -> str: ...


class Hosted(Protocol):
    """The stage that is hosted now."""

    @property
    def stage(self) -> StageState: ...
    @property
    def training(self) -> Training: ...
    @property
    def work(self) -> StageRuntime: ...
    @property
    def meter(self) -> PipelineMeter: ...


class Place(Wanted, Protocol):
    """Where this peer is or will be, and where else it would go: as the operator said, until the
    choice or a move changes it."""

    @property
    def settled(self) -> bool: ...


class Reaching(Protocol):
    """Whether others can dial this peer."""

    @property
    def standing(self) -> Standing: ...


class Reached(Protocol):
    """A transport, as far as a choice depends on it."""

    @property
    def reachable(self) -> Reaching: ...


class Moves(Protocol):
    """A change of stage, or of the cell: to which one, if any, and whether an image for it
    follows; :meth:`asked` says why not, or begins it, :meth:`joins` begins the other."""

    @property
    def target(self) -> int | None: ...
    @property
    def cell(self) -> CellId | None: ...
    @property
    def going(self) -> bool: ...
    @property
    def done(self) -> bool: ...
    def asked(self, stage: int) -> str: ...
    def joins(self, cell: CellId) -> None: ...


@dataclass(frozen=True, slots=True)
class Reachability:
    """How a peer is reached: as in its record."""

    maddrs: Sequence[str] = ()
    standing: str = "unknown"
    relays: tuple[str, ...] = ()
    room: int = 0
    rate: float = 0.0


class PeerPort(Protocol):
    """The peer: a daemon, or a simulated one."""

    draining: bool

    @property
    def role(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def config(self) -> Wanted: ...
    @property
    def identity(self) -> Signer: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def journal(self) -> Journal: ...
    @property
    def tasks(self) -> Tasks: ...
    @property
    def transport(self) -> Reached: ...
    @property
    def manifest(self) -> Manifest | None: ...
    @property
    def presence(self) -> Presence | None: ...
    @property
    def assembled(self) -> Hosted | None: ...
    @property
    def placing(self) -> Place: ...
    @property
    def mover(self) -> Moves: ...
    @property
    def ending(self) -> bool: ...
    @property
    def started_at(self) -> float:
        """Unix time."""
        ...

    def protocols(self) -> Protocols: ...
    def reach(self) -> Reachability: ...
    def body(self) -> PeerBody: ...
    def stop(self, why: str) -> None: ...
