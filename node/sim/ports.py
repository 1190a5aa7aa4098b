"""What watches, lies, invariants and strangers know of the swarm and its peers: the types of
:mod:`node.sim.swarm` and :mod:`node.sim.process` without their modules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from node.app.moving import Mover
from node.core.ids import PeerId
from node.manifest import Manifest
from node.sim.setup import Setup
from node.sim.world.directory import SimDht
from node.sim.world.loop import VirtualTime
from node.sim.world.network import SimNet
from node.telemetry.metrics import Metrics
from node.training.member import Member
from node.training.protocol.facts import RunFacts
from node.training.protocol.rules import Rules
from node.training.service import Training
from node.training.stage_runtime import StageRuntime


class SimPeerPort(Protocol):
    """A peer of the swarm."""

    name: PeerId
    lie: str

    @property
    def swarm(self) -> SimSwarmPort: ...
    @property
    def stage(self) -> int: ...
    @property
    def ready(self) -> bool: ...
    @property
    def work(self) -> StageRuntime: ...
    @property
    def training(self) -> Training: ...
    @property
    def member(self) -> Member: ...
    @property
    def digest(self) -> str: ...
    def in_place(self) -> str: ...


class SimSwarmPort(Protocol):
    """The swarm that a peer is part of."""

    seed: int
    setup: Setup
    world: VirtualTime
    net: SimNet
    record_store: SimDht
    manifest: Manifest
    metrics: Metrics
    make: Any
    watch: Any

    @property
    def peers(self) -> Mapping[PeerId, SimPeerPort]: ...
    @property
    def stash_bytes(self) -> int: ...
    def honest(self, peer: PeerId) -> bool: ...
    def calm(self) -> bool: ...
    def live(self, stage: int | None = None) -> Sequence[SimPeerPort]: ...
    def read(self, change: str) -> Rules: ...
    def facts(self, facts: RunFacts) -> RunFacts: ...
    def left(self, peer: Any, mover: Mover) -> None: ...
