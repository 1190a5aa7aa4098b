"""What every part of one peer's coordinator works with."""

from collections.abc import Callable
from dataclasses import dataclass

from node.coordinator.vitals import Vitals
from node.core.clock import Clock
from node.core.ids import PeerId
from node.core.tasks import Tasks
from node.epoch.facts import RunFacts
from node.telemetry.events import Journal
from node.transport.port import TransportPort


@dataclass(frozen=True)
class Kit:
    """Surroundings of the coordinator: the network, clock and journal of the peer ``me``, the facts
    of its run. ``tasks``: tasks that last as long as the coordinator; ``on_error``: told of a task
    that raised."""

    me: PeerId
    stage: int
    facts: RunFacts
    transport: TransportPort
    clock: Clock
    journal: Journal
    vitals: Vitals
    tasks: Tasks
    on_error: Callable[[str, BaseException], None] | None = None
