"""What every part of one peer's coordinator works with."""

from collections.abc import Callable
from dataclasses import dataclass

from node.coordinator.vitals import Vitals
from node.core.clock import Clock
from node.core.ids import CellId, PeerId
from node.core.journey import Plan
from node.core.tasks import Tasks
from node.epoch.facts import RunFacts
from node.stage.runtime import StageRuntime
from node.telemetry.events import Journal
from node.transport.port import TransportPort


@dataclass
class Callbacks:
    """Callbacks of the program around a coordinator, which sets them."""

    on_plan: Callable[[Plan], None] = lambda plan: None
    """A plan is in force here."""
    on_partners: Callable[[Plan], None] = lambda plan: None
    """A plan names partners of the cell, with the addresses of their hosts."""
    on_lead: Callable[[], None] = lambda: None
    """This peer leads or follows another leader from now on."""
    on_cell: Callable[[CellId], None] = lambda cell: None
    """This peer belongs to another cell from now on."""
    on_move: Callable[[int], str] = lambda stage: "this peer does not change its stage"
    """Asks this peer to host another stage; returns "" if it will, else the reason against."""
    on_change: Callable[[str], None] = lambda change: None
    """A newer change of the owner is known: keep it."""


@dataclass(frozen=True)
class Kit:
    """Surroundings of the coordinator: the network, clock and journal of the peer ``me``, the facts
    of its run, and the stage that it works on. ``tasks``: tasks that last as long as the
    coordinator; ``on_error``: told of a task that raised."""

    me: PeerId
    stage: int
    facts: RunFacts
    work: StageRuntime
    transport: TransportPort
    clock: Clock
    journal: Journal
    vitals: Vitals
    tasks: Tasks
    callbacks: Callbacks
    on_error: Callable[[str, BaseException], None] | None = None
