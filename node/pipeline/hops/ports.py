"""The ports through which the parts of a pipeline reach the process around them."""

from dataclasses import dataclass
from typing import Any, Protocol

from node.core.clock import Clock
from node.core.ids import PeerId
from node.core.tasks import Tasks
from node.pipeline.device import DeviceThread
from node.transport.port import TransportPort


class Telemetry(Protocol):
    """Port for the reports of the pipeline; the daemon implements it. Its methods never block and
    never raise."""

    def spent(self, kind: str, seconds: float) -> None:
        """Count seconds of ``compute`` (device busy), ``wire`` (first byte to ACCEPTED) or ``wait``
        (device idle inside an epoch)."""

    def emit(self, kind: str, text: str, level: str = "info", **fields: Any) -> None:
        """Record an event."""


@dataclass(frozen=True, slots=True)
class PipelineHost:
    """The process around a pipeline: other peers, the device, the time, tasks and the record."""

    transport: TransportPort
    device: DeviceThread
    clock: Clock
    tasks: Tasks
    telemetry: Telemetry

    @property
    def me(self) -> PeerId:
        """PeerId of this peer."""
        return self.transport.peer_id
