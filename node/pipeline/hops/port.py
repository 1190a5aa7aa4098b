"""What the parts of the pipeline (sender, receiver, origin, forward requests) need of their
service."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Protocol

from node.core.clock import Clock
from node.core.ids import PeerId
from node.core.journey import Path
from node.core.tasks import Tasks
from node.pipeline.device import DeviceThread
from node.pipeline.events import Action, Answer, Claim, Direction, Event, Key, TensorReceived
from node.pipeline.guard import Guard
from node.pipeline.hops.frames import FrameShape
from node.pipeline.machine import PipelineMachine
from node.pipeline.received import FrameReader
from node.pipeline.settings import PipelineLimits
from node.pipeline.stash import Stash
from node.pipeline.telemetry import Telemetry
from node.pipeline.timing import Timing
from node.pipeline.visit_buffers import StageMath, VisitBuffers
from node.transport.port import TransportPort

Waiter = asyncio.Future[tuple[bool, str, float]]


class PipelinePort(Protocol):
    """:class:`node.pipeline.service.Pipeline`, which says what each of them does."""

    me: PeerId
    stage: int
    transport: TransportPort
    device: DeviceThread
    limits: PipelineLimits
    telemetry: Telemetry
    clock: Clock
    plan_wait_s: float
    plan_changed: asyncio.Event
    shape: FrameShape
    math: StageMath
    guard: Guard
    machine: PipelineMachine
    stash: Stash[Key, VisitBuffers]
    tasks: Tasks

    @property
    def hop_s(self) -> float: ...
    @property
    def timing(self) -> Timing: ...
    def do(self, event: Event) -> None: ...
    def ask(self, event: Event) -> Answer: ...
    def hold(
        self, event: TensorReceived, reader: FrameReader, deadline_s: float, ticket: int
    ) -> tuple[Answer, list[Action]]: ...
    def carry_out(self, actions: Iterable[Action]) -> None: ...
    def outcome(self, key: Key, way: Direction) -> Waiter: ...
    def shape_of(self, index: int) -> tuple[int, ...]: ...
    def cost(self, index: int) -> int: ...
    def at_origin(self, key: Key) -> bool: ...
    def make_room(self, nbytes: int) -> bool: ...
    def claim_for(self, key: Key, position: int) -> Claim: ...
    def sent(self, peer: PeerId, nbytes: int) -> None: ...
    def received(self, peer: PeerId, nbytes: int) -> None: ...
    def time_left(self, path: Path) -> float: ...
