"""Assembly of the parts of a hop: the only file that knows which part needs which."""

from collections.abc import Callable
from dataclasses import dataclass

from node.pipeline.events import Action
from node.pipeline.frames import FrameShape
from node.pipeline.guard import Guard
from node.pipeline.hops.admission import FrameAdmission
from node.pipeline.hops.arrivals import Arrivals
from node.pipeline.hops.calls import PeerCalls
from node.pipeline.hops.changes import Changes
from node.pipeline.hops.deadlines import Deadlines
from node.pipeline.hops.driver import MachineDriver
from node.pipeline.hops.fetcher import Fetcher
from node.pipeline.hops.giver import Giver
from node.pipeline.hops.inbound import ForwardOnly, Inbound
from node.pipeline.hops.intake import FrameIntake
from node.pipeline.hops.keeper import StashKeeper
from node.pipeline.hops.notes import Notes
from node.pipeline.hops.planned import PlannedWork
from node.pipeline.hops.ports import PipelineHost
from node.pipeline.hops.sender import Sender
from node.pipeline.hops.stash import Stash
from node.pipeline.hops.streams import OpenStreams
from node.pipeline.machine import PipelineMachine
from node.pipeline.settings import STASH, PipelineSettings
from node.pipeline.visit_buffers import StageMath


@dataclass(frozen=True, slots=True)
class Hops:
    """The parts that carry the tensors of a plan from hop to hop."""

    driver: MachineDriver
    planned: PlannedWork
    deadlines: Deadlines
    changes: Changes
    stash: Stash
    guard: Guard
    keeper: StashKeeper
    intake: FrameIntake
    calls: PeerCalls
    sender: Sender
    fetcher: Fetcher
    notes: Notes


def connect(
    host: PipelineHost,
    machine: PipelineMachine,
    shape: FrameShape,
    math: StageMath,
    settings: PipelineSettings,
    *,
    stash_bytes: int,
    usual_s: float,
    act: Callable[[Action], None],
) -> Hops:
    """Make the parts around ``machine``. ``stash_bytes``: limit of the stash in bytes, 0 for the
    default limit. ``usual_s``: seconds, as in :class:`Deadlines`. ``act`` carries out one action of
    the machine."""
    clock = host.clock
    driver = MachineDriver(machine, clock, act)
    planned = PlannedWork(host.me, machine, shape, math)
    deadlines = Deadlines(clock, host.transport.patience, settings.forward_timeout_s, usual_s)
    changes = Changes()
    stash = Stash(stash_bytes or STASH, changes.notify)
    guard = Guard(host.transport, host.telemetry.emit, settings.watch)
    intake = FrameIntake(host, shape, math)
    calls = PeerCalls(host, deadlines)
    return Hops(
        driver=driver,
        planned=planned,
        deadlines=deadlines,
        changes=changes,
        stash=stash,
        guard=guard,
        keeper=StashKeeper(stash, driver, planned, deadlines, guard, clock=clock),
        intake=intake,
        calls=calls,
        sender=Sender(host, calls, driver, stash, shape),
        fetcher=Fetcher(host, calls, driver, stash, planned, intake=intake, guard=guard),
        notes=Notes(host, calls, machine),
    )


def called_side(
    host: PipelineHost, hops: Hops, forward_only: ForwardOnly, *, plan_wait_s: float
) -> Inbound:
    """Make the service that other peers call. ``plan_wait_s``: seconds, as in
    :class:`FrameAdmission`."""
    driver = hops.driver
    planned = hops.planned
    stash = hops.stash
    keeper = hops.keeper
    deadlines = hops.deadlines
    streams = OpenStreams(deadlines)
    admission = FrameAdmission(
        driver, planned, keeper, deadlines, hops.changes, plan_wait_s=plan_wait_s
    )
    arrivals = Arrivals(
        host.clock,
        driver,
        planned,
        admission,
        hops.intake,
        stash=stash,
        keeper=keeper,
        streams=streams,
    )
    return Inbound(
        host.transport,
        driver,
        deadlines,
        planned.shape,
        arrivals,
        giver=Giver(host.transport, driver, stash, planned.shape, streams),
        forward_only=forward_only,
    )
