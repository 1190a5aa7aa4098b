"""The state that the parts of the pipeline service (sender, receiver, origin, forward requests)
share."""

from abc import ABC, abstractmethod

from node.core.clock import Clock
from node.core.tasks import Tasks
from node.pipeline.device import DeviceThread
from node.pipeline.events import Action
from node.pipeline.frames import FrameShape
from node.pipeline.guard import Guard
from node.pipeline.hops.calls import PeerCalls
from node.pipeline.hops.changes import Changes
from node.pipeline.hops.deadlines import Deadlines
from node.pipeline.hops.driver import MachineDriver
from node.pipeline.hops.intake import FrameIntake
from node.pipeline.hops.keeper import StashKeeper
from node.pipeline.hops.planned import PlannedWork
from node.pipeline.hops.ports import Host, Telemetry
from node.pipeline.hops.stash import Stash
from node.pipeline.machine import PipelineMachine
from node.pipeline.rounding import SentRounding
from node.pipeline.settings import STASH, PipelineLimits, PipelineSettings
from node.pipeline.timing import Timing
from node.pipeline.visit_buffers import StageMath
from node.transport.port import TransportPort


class PipelineBase(ABC):
    """The shared part of :class:`node.pipeline.service.Pipeline`."""

    def __init__(
        self,
        transport: TransportPort,
        device: DeviceThread,
        settings: PipelineSettings,
        limits: PipelineLimits,
        telemetry: Telemetry,
        clock: Clock,
        shape: FrameShape,
        machine: PipelineMachine,
        stage: int,
        math: StageMath,
        usual_s: float,
    ) -> None:
        self.me = transport.peer_id
        self.transport = transport
        self.device = device
        self.settings = settings
        self.limits = limits
        self.telemetry = telemetry
        self.clock = clock
        self.shape = shape
        self.machine = machine
        self.stage = stage
        self.math = math
        self.guard = Guard(transport, telemetry.emit, settings.watch)
        self.changes = Changes()
        self.stash = Stash(limits.stash_bytes or STASH, self.changes.notify)
        self.tasks = Tasks("pipeline", self._on_error)
        self.timing = Timing()
        """Measured times of device work and of connections."""
        self.rounding = SentRounding()
        """Measured errors of the tensors that were sent, by peer."""
        self.driver = MachineDriver(machine, clock, self._carry_out)
        self.planned = PlannedWork(self.me, machine, shape, math)
        self.deadlines = Deadlines(clock, transport.patience, settings.forward_timeout_s, usual_s)
        self.keeper = StashKeeper(
            self.stash, self.driver, self.planned, self.deadlines, self.guard, clock=clock
        )
        self.intake = FrameIntake(transport, shape, math)
        self.host = Host(transport, device, clock, self.tasks, telemetry)
        self.calls = PeerCalls(self.host, self.deadlines)

    @abstractmethod
    def _carry_out(self, action: Action) -> None:
        """Do what the machine decided."""

    def _on_error(self, name: str, error: BaseException) -> None:
        self.telemetry.emit("task-died", f"{name}: {error!r}", "error")
