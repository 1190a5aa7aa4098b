"""What choosing a stage, changing it and posting a record need of the peer they are done for: a
daemon or a simulated peer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from node.core.clock import Clock
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


class Reaching(Protocol):
    """Whether others can dial this peer."""

    @property
    def standing(self) -> Standing: ...


class Reached(Protocol):
    """A transport, as far as a choice depends on it."""

    @property
    def reachable(self) -> Reaching: ...


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
    def ending(self) -> bool: ...
    @property
    def started_at(self) -> float:
        """Unix time."""
        ...

    def protocols(self) -> Protocols: ...
    def reach(self) -> Reachability: ...
    def body(self) -> PeerBody: ...
    def stop(self, why: str) -> None: ...
