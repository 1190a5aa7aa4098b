"""Putting one peer's engines together: model, data, pipeline, round, optimizer, state, for the
stage it hosts."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from node.app.capacity import (
    AMPLE,
    NOTHING_TAKEN,
    MainMemory,
    check_memory,
    logits_at_once,
    main_memory,
    parts_of_stages,
    room_on,
    share_places,
    shared_row,
    shares,
    stash_limit,
    text_limit,
    text_row,
)
from node.app.change import read, under
from node.app.run_files import ModelFiles, RunFiles
from node.app.tuning import precision_of
from node.averaging.exchange.machine import RoundMachine
from node.averaging.exchange.service import CellRound
from node.averaging.strategies.group_forming import TIMES
from node.checkpoint.archive.address import Address
from node.checkpoint.archive.aside import Aside
from node.checkpoint.archive.keeper import ArchiveKeeper, ArchivePorts
from node.checkpoint.archive.machine import OnDisk
from node.checkpoint.archive.place import Archive
from node.checkpoint.archive.restore import restore
from node.checkpoint.errors import NoDonor
from node.checkpoint.files import yield_to_others
from node.checkpoint.service import StateService
from node.checkpoint.store import CheckpointStore
from node.config import NodeConfig
from node.consensus.election import Colleagues
from node.consensus.rules import Read
from node.control.pledges import Pledges
from node.coordinator.credit.book import RECEIPTS, Book, FileBook
from node.coordinator.kit import Callbacks, Kit
from node.coordinator.leading import PeerMachines
from node.coordinator.led_cell import LedCell
from node.coordinator.ledger import VoteLedger
from node.coordinator.presence import Presence
from node.coordinator.recording.file import RecordingFile
from node.coordinator.recording.recorder import Recorder
from node.coordinator.service import Training
from node.core.clock import Clock
from node.core.errors import DeviceLost, LocalFault, UsageFault, refuse
from node.core.home import expanded
from node.core.ids import ENDS, PeerId, short, stage_name
from node.core.memory import LARGEST, SCARCE, keep_freed
from node.core.tasks import Tasks
from node.data.order import SampleOrder
from node.data.sources import open_source
from node.data.streamed.stream import Stream
from node.data.tokenizer import GET_TOKENIZER, Tokenizer
from node.data.tokenizer_files import TokenizerFiles
from node.epoch.facts import (
    EvaluationFacts,
    GlobalBatch,
    PlanFunctions,
    RunFacts,
    Waits,
    WorkSizes,
)
from node.epoch.pace import PROBE_WAYS_S
from node.fine_tuning import advice
from node.identity.keys import Signer
from node.manifest import Manifest
from node.model.cost import Verdict, flops_per_token
from node.model.device import CONTEXT, Device, device_lost, free_on, set_threads, usable_gpus
from node.model.lanes import lanes_of
from node.model.precision import Precision
from node.model.pretrained import Weights
from node.model.shapes import layers_said
from node.model.stages import Ends, base_of, build, repeat_keys
from node.optim.owner import Owner
from node.optim.ownership import assign
from node.optim.parts import ParameterPart
from node.outer.board import WindowBoard
from node.outer.census import CellRecord
from node.outer.forming import GroupFinder
from node.outer.register import CellRegister
from node.outer.service import USUAL_S, CellMeetings
from node.outer.window import outer_of
from node.pipeline.device import DeviceThread
from node.pipeline.gradients import GradientSum
from node.pipeline.machine import PipelineMachine
from node.pipeline.service import Pipeline
from node.pipeline.settings import PipelineLimits
from node.pipeline.visit_buffers import Autocast, StageMath
from node.scheduler.router import Router
from node.stage.engines import Engines, PipelineMeter
from node.stage.runtime import StageRuntime
from node.stage.state import StageState
from node.stage.text import Samples, StreamedText, Text
from node.telemetry import resources
from node.telemetry.events import Journal
from node.telemetry.metrics import Metrics
from node.transport.port import TransportPort

if TYPE_CHECKING:
    from node.local.stage import LocalStage


@dataclass(frozen=True)
class Services:
    """Services of the peer that holds ``stage``, connected but not started: ``training.start``
    starts them, and ``meetings.start`` the meetings of the cells. ``meetings`` is None where the
    run's cells never average with each other; ``donor`` gives others the state that is here."""

    stage: StageState
    meter: PipelineMeter
    pipeline: Pipeline
    cell: CellRound
    work: StageRuntime
    training: Training
    meetings: CellMeetings | None
    donor: StateService


FILES_S = 20.0
FILES_AGAIN_S = 1.0
"""Seconds in which files of the run must come from other peers, and between two attempts. A peer
that begins sees others only after a while."""
DONORS = 16
"""Peers that are asked for a file of the run, one after the other."""
AT_ONCE = 16
"""Texts that an ends peer generates at once; others wait."""
EACH = 8
"""Texts that a peer without ends asks of others at once, and questions of one peer at an ends
peer."""


@dataclass(frozen=True)
class Assembled(Services):
    """One stage of the run of ``manifest``, ready to take part."""

    manifest: Manifest
    ends: Ends | None
    tokenizer: Tokenizer | None
    device: Device
    precision: Precision
    """The number format of forward and backward."""
    device_said: str
    memory: Verdict
    memory_limit: int
    main_memory: int
    """Bytes beside the device's own; 0 where they are the same."""
    layers: str
    parameter_bytes: int
    """Bytes of the parameters, and of weights beside adapters, that are in memory."""
    thread: DeviceThread
    local: LocalStage | None
    """The devices the stage is cut over; None for one."""
    files: Callable[[], Awaitable[TokenizerFiles]]
    """Reads the files of the model and its tokenizer; files that are missing here are fetched."""
    texts: asyncio.Semaphore
    """Places of the texts that are generated at once."""
    recording: RecordingFile | None
    """The recording of the machines; None if nobody asked for one."""
    archive: ArchiveKeeper | None
    """The copies of this peer's checkpoints; None if its operator names no place for them."""


async def assemble(
    config: NodeConfig,
    manifest: Manifest,
    stage: int,
    identity: Signer,
    transport: TransportPort,
    presence: Presence,
    clock: Clock,
    journal: Journal,
    metrics: Metrics,
    on_error: Callable[[str, BaseException], None],
    learn: Callable[[PeerId, Sequence[str]], None] = lambda peer, addresses: None,
    facts: Callable[[RunFacts], RunFacts] = lambda facts: facts,
    on_step: Callable[[str], None] = lambda step: None,
    pledges: Pledges | None = None,
    own: MainMemory = NOTHING_TAKEN,
) -> Assembled:
    """Build everything for ``stage``. ``on_step`` gets the name of each step before it begins, for
    people. ``pledges``: of the daemons of this machine, among which this one's is made; ``own``:
    main memory that this daemon takes without its stage.

    Raises OutOfResources when it does not fit, UsageFault for data that cannot be read and
    for local devices the model cannot be cut over."""
    m = manifest.model
    p = manifest.pipeline
    t = manifest.training
    on_step(f"builds {stage_name(stage)}")
    parameters = manifest.optimizer.parameters
    devices, threads = await asyncio.to_thread(_devices, config, manifest)
    set_threads(threads)
    device = await asyncio.to_thread(Device.pick, devices[0])
    # Processes on the CPU share its memory.
    together = [device]
    if device.is_cuda:
        together = [device, *[await asyncio.to_thread(Device.pick, d) for d in devices[1:]]]
    plan = partial(_plan_memory, config, manifest, stage, together, pledges=pledges)
    verdict, limit, main = await asyncio.to_thread(plan, own=own)
    if len(devices) == 1:
        device.keep_within(limit)
    # Main memory is taken in holes too, where there is room for them.
    kept = SCARCE
    if device.is_cuda or verdict.available > 2 * verdict.needed:
        kept = LARGEST
    keep_freed(kept)
    module = await asyncio.to_thread(build, m, p.stages, stage, parameters)
    given = await asyncio.to_thread(_begin, config, manifest, stage, module, journal)
    if len(devices) == 1:
        module.to(device.device)
        if device.older:
            repeat_keys(module)
    text = None
    tokenizer = None
    if stage == ENDS:
        await _files_for_text(RunFiles(config, manifest, None), transport, presence, clock, on_step)
        on_step("opens the text, and turns it into tokens where that was not done before")
        text, tokenizer = await _opened_text(config, manifest, clock)
    local = None
    placed = None
    if len(devices) > 1:
        from node.local.stage import open_stage

        local = await open_stage(
            devices,
            device,
            threads,
            module,
            m,
            p.stages,
            stage,
            config.home / "devices",
            on_error,
            optimizer=manifest.optimizer,
            epochs=t.epochs,
        )
        placed = local.place
    frozen = None
    if m.adapter:
        frozen = base_of(module)
    state = StageState(
        module,
        stage,
        placed=placed,
        empty=bool(m.weights) and given is None,
        frozen=frozen,
        copies=module.keep_copies(),
    )
    if local is not None and given is not None:
        # Each rank has made a module of its own, without the weights.
        await asyncio.to_thread(local.place, state.parameters())
    # Each rank of several local devices has its device's usual format.
    precision = Precision(device, parameters)
    if local is None and verdict.casts:
        precision = await asyncio.to_thread(precision_of, manifest, device)
    thread = device_thread(config, device, local is not None, on_error, pledges)
    meter = PipelineMeter(journal, metrics)
    meter.steps.product_s = await asyncio.to_thread(device.tera_s)
    store = CheckpointStore(
        config.checkpoint_dir(manifest.run_id),
        config.checkpoint,
        manifest.run_id,
        tell=lambda why: journal.emit("checkpoint", "checkpoint-ignored", why, "warning"),
    )
    if manifest.swarm.continues:
        await asyncio.to_thread(inherit, config, manifest, stage, store, journal)
    to = _archive(config.checkpoint.to, manifest, identity.peer_id)
    source = _archive(config.node.restore, manifest, identity.peer_id)
    if source is not None:
        on_step(f"takes its stage back from {source.address.shown}")
        scratch = config.restoring_dir(manifest.run_id, stage)
        await Aside(clock).call(
            lambda work: restore(
                source, store, stage, scratch, journal, work.goes_on, epochs=t.epochs
            )
        )
    if isinstance(module, Ends):
        at_once = logits_at_once(config, manifest, stage, verdict, device.is_cuda)
        module.logits_at_once = at_once
    text_bytes = text_limit(config, manifest, stage, verdict, device.is_cuda)
    run_files = RunFiles(config, manifest, tokenizer)
    recording = _recording(config, journal)
    recorder = None
    machines = Machines()
    if recording is not None:
        recorder = recording.recorder
        machines = Machines(member=recorder.member, leader=recorder.leader)
    math = partial(StageMath, recompute=verdict.recompute, gradients=precision.gradients)
    gradients = None
    steps = None
    if local:
        math = local.math
        gradients = local.gradients
        steps = local.steps
    services = compose(
        manifest,
        Ports(
            identity,
            transport,
            presence,
            clock,
            journal,
            metrics,
            on_error,
            thread,
            ThreadPoolExecutor(1, "heavy"),
            meter,
            store,
            Owner(manifest.optimizer, t.epochs, steps=steps),
            parts_of_stages(manifest),
            replace(
                config.limits,
                stash_bytes=stash_limit(config, manifest, stage, verdict, device.is_cuda),
                text_bytes=text_bytes,
            ),
            text,
            precision.autocast,
            math,
            gradients,
            facts=facts,
            ledger=VoteLedger(config.swarm_dir(manifest.run_id) / "votes"),
            book=FileBook(config.swarm_dir(manifest.run_id) / RECEIPTS),
            learn=learn,
            weights=given,
            files=run_files.read,
            places=share_places(config, manifest, stage, verdict, device.is_cuda),
            machines=machines,
            recorder=recorder,
        ),
        state,
    )
    # Copies of others' state are not counted: a member alone keeps no copies, and must be able to
    # own all of the state.
    services.work.room = verdict.spare
    device_said = device.describe()
    if local is not None:
        device_said = f"{len(devices)} x {device_said}"
    # Memory of weights that are still to come is taken when they are written there.
    parameter_bytes = 0
    if not state.empty:
        parameter_bytes = sum(t.nbytes for t in base_of(module).values())
    archive = None
    if to is not None:
        here = services.work.local_checkpoints
        archive = ArchiveKeeper(
            to,
            stage,
            config.checkpoint,
            ArchivePorts(
                store,
                lambda: OnDisk(here.versions(), here.newest, here.stride),
                clock,
                journal,
                yield_to_others,
            ),
        )
    return Assembled(
        **vars(services),
        manifest=manifest,
        ends=module if isinstance(module, Ends) else None,
        tokenizer=tokenizer,
        device=device,
        precision=precision,
        device_said=device_said,
        memory=replace(verdict, table=(*verdict.table, text_row(text_bytes), shared_row(config))),
        memory_limit=limit,
        main_memory=main,
        layers=layers_said(m, p.stages, stage),
        parameter_bytes=parameter_bytes,
        thread=thread,
        local=local,
        files=ModelFiles(lambda: run_files.fetched(transport, [*presence.view.ends])),
        texts=asyncio.Semaphore(AT_ONCE if isinstance(module, Ends) else EACH),
        recording=recording,
        archive=archive,
    )


def _archive(place: str, manifest: Manifest, me: PeerId) -> Archive | None:
    """The archive of checkpoints at a place that the operator names; None for no name. Raises
    UsageFault."""
    if not place:
        return None
    address = Address(place)
    address.check()
    return Archive(address, manifest.run_id, me)


def _recording(config: NodeConfig, journal: Journal) -> RecordingFile | None:
    """The file in which this peer records its machines; None if it does not. Raises LocalFault if
    it cannot be made."""
    if not config.node.record:
        return None
    loop = asyncio.get_running_loop()

    def ended(why: str) -> None:
        text = f"the recording of the machines ends: {why}"
        with suppress(RuntimeError):  # the loop is closed: the daemon has ended
            loop.call_soon_threadsafe(journal.emit, "daemon", "recording-ended", text, "warning")

    recording = RecordingFile(expanded(config.node.record), ended)
    journal.emit("daemon", "recording", f"records its machines in {recording.path}")
    return recording


def _plan_memory(
    config: NodeConfig,
    manifest: Manifest,
    stage: int,
    devices: Sequence[Device],
    *,
    pledges: Pledges | None,
    own: MainMemory,
) -> tuple[Verdict, int, int]:
    """(the plan of a stage's memory; bytes that it may take of the devices; bytes of main memory
    beside a GPU, 0 without one). Pledges the memory, before another daemon counts it. Raises
    OutOfResources."""
    gpu = devices[0].is_cuda
    with pledges.alone() if pledges else nullcontext():
        others = 0
        if pledges:
            others = pledges.others()
        limit, said = room_on(config, devices, taken=replace(own, others=others))
        main = 0
        if gpu:
            main = max(1, resources.memory_total() - others - own.process)
        verdict = check_memory(config, manifest, stage, limit, main, said, older=devices[0].older)
        verdict.require()
        if pledges:
            takes = main_memory(manifest, stage, verdict, gpu)
            pledges.pledge(own.process - own.libraries + takes)
    return verdict, limit, main


def split_between(
    config: NodeConfig, manifest: Manifest, taken: MainMemory = NOTHING_TAKEN
) -> dict[int, dict[str, str]]:
    """Settings of the daemon of each stage, if one machine hosts them all: its GPU, where the
    operator leaves the choice among several, and its part of a memory that it shares. ``taken`` as
    for :func:`room_on`."""
    node = config.node
    if node.local_devices == 1 and node.device.strip().lower() in ("auto", "cuda"):
        cards = [card for card in usable_gpus() if free_on(card) > CONTEXT]
        if len(cards) > 1:
            return _dealt(config, manifest, cards)
    names, _ = _devices(config, manifest)
    devices = [Device.pick(name) for name in names]
    gpu = devices[0].is_cuda
    together = devices
    if not gpu:
        together = devices[:1]  # processes on the CPU share its memory
    limit, _ = room_on(config, together, processes=manifest.pipeline.stages + 1, taken=taken)
    found = shares(config, manifest, limit, gpu=gpu, older=devices[0].older)
    return {stage: {"memory": f"{size // len(together)}B"} for stage, size in found.items()}


def _dealt(
    config: NodeConfig, manifest: Manifest, cards: Sequence[int]
) -> dict[int, dict[str, str]]:
    """Settings of the daemons of all stages, to which GPUs are dealt. The fullest GPUs are left out
    until every stage has room on its own; if none is enough, all of them are dealt."""
    most = min(len(cards), manifest.pipeline.stages + 1)
    for count in range(most, 0, -1):
        found, fit = _dealt_to(config, manifest, cards[:count])
        if fit:
            return found
    found, _ = _dealt_to(config, manifest, cards[:most])
    return found


def _dealt_to(
    config: NodeConfig, manifest: Manifest, cards: Sequence[int]
) -> tuple[dict[int, dict[str, str]], bool]:
    """(settings of the daemons of all stages, to which GPUs are dealt in turns; whether every stage
    fits into its part). There are no more GPUs than stages. The first GPU is this process's, which
    has a context on it."""
    found: dict[int, dict[str, str]] = {}
    fit = True
    for at, card in enumerate(cards):
        held = range(at, manifest.pipeline.stages + 1, len(cards))
        device = Device.numbered(card)
        processes = len(held)
        if at:
            processes += 1
        limit, _ = room_on(config, [device], processes=processes)
        older = device.older
        for stage, size in shares(config, manifest, limit, held, gpu=True, older=older).items():
            found[stage] = {"device": str(device.device)}
            if len(held) > 1:
                found[stage]["memory"] = f"{size}B"
            if not check_memory(config, manifest, stage, size, AMPLE, older=older).ok:
                fit = False
    return found, fit


def device_thread(
    config: NodeConfig,
    device: Device,
    cut: bool,
    on_error: Callable[[str, BaseException], None],
    pledges: Pledges | None,
) -> DeviceThread:
    """The thread that computes on ``device``; ``cut``: the stage is cut over further ones."""
    return DeviceThread(
        by_arrival=config.limits.job_order == "arrival",
        failed=tells_of_lost(device, on_error),
        # Ranks of several local devices are at the same place of a program.
        lanes=None if cut else lanes_of(device.device),
        begin=device.make_current,
        text_share=1.0 if device.is_cuda else config.limits.text_share,
        daemons=pledges.lately if pledges else lambda: 1,
    )


def tells_of_lost(
    device: Device, on_error: Callable[[str, BaseException], None]
) -> Callable[[BaseException], None]:
    """A function for the device thread: if a job's error says that the GPU is lost, call
    ``on_error`` on this loop with a DeviceLost."""
    loop = asyncio.get_running_loop()

    def failed(error: BaseException) -> None:
        if not device_lost(error):
            return
        said = (str(error).splitlines() or [type(error).__name__])[0]
        fault = DeviceLost(
            f"{device.device} can no longer be used by this process: {said}",
            "start again; if it comes back, look at nvidia-smi and the kernel's log",
        )
        with suppress(RuntimeError):  # the loop is closed: the daemon has ended
            loop.call_soon_threadsafe(on_error, "device", fault)

    return failed


@dataclass(frozen=True)
class Machines(PeerMachines):
    """State machines of a peer's services, and its leader's search for paths. The defaults are the
    product's; a simulation replaces them to watch them."""

    pipeline: Callable[[PeerId, int, bool, int], PipelineMachine] = PipelineMachine
    round: Callable[[], RoundMachine] = RoundMachine


@dataclass(frozen=True)
class Ports:
    """Surroundings of one peer's services: a daemon gives network, disk and devices, a simulation
    its own. ``thread`` runs the device's work, ``heavy`` runs work that must not hold up the loop;
    ``parts``: the parts of every stage that can have an owner; ``text`` at the ends only. ``read``
    reads the owner's changes (None: as the manifest's owner signs them), ``facts`` makes the facts
    that leaders plan with from the manifest; ``ledger`` keeps votes, None for memory;
    ``book`` keeps receipts of work, None keeps none; ``weights`` reads any stage of the model that
    the run begins from, None where it is not here; ``files`` reads a file of the run by its sha256.
    ``places``: of the pipeline, 0 for its own number. ``recorder`` records the machines that it has
    made; None records nothing."""

    identity: Signer
    transport: TransportPort
    presence: Presence
    clock: Clock
    journal: Journal
    metrics: Metrics
    on_error: Callable[[str, BaseException], None]
    thread: DeviceThread
    heavy: Executor
    meter: PipelineMeter
    store: CheckpointStore
    owner: Owner
    parts: Mapping[int, tuple[ParameterPart, ...]]
    limits: PipelineLimits
    text: Samples | None = None
    autocast: Autocast = nullcontext
    math: Callable[[nn.Module, str, Autocast], StageMath] = StageMath
    gradients: GradientSum | None = None
    machines: Machines = Machines()
    read: Read | None = None
    facts: Callable[[RunFacts], RunFacts] = lambda facts: facts
    colleagues: Colleagues | None = None
    ledger: VoteLedger | None = None
    book: Book | None = None
    learn: Callable[[PeerId, Sequence[str]], None] = lambda peer, addresses: None
    weights: Given | None = None
    files: Callable[[str], bytes | None] | None = None
    places: int = 0
    recorder: Recorder | None = None


def compose(manifest: Manifest, ports: Ports, state: StageState) -> Services:
    """Make the services of the peer that holds ``state`` and connect them. Before the transport
    starts: they add themselves to its server."""
    o = ports
    m = manifest.model
    p = manifest.pipeline
    t = manifest.training
    pipeline = Pipeline(
        o.transport,
        state.module,
        o.thread,
        p,
        o.limits,
        stage=state.stage,
        model=m,
        telemetry=o.meter,
        clock=o.clock,
        autocast=o.autocast,
        math=o.math,
        gradients=o.gradients,
        usual_s=t.epoch_timeout_s,
        document_mask=manifest.data.document_mask,
        loss_mask=manifest.data.rows == "chat",
        planned=manifest.scheduler.paths == "planned",
        places=o.places,
        machine=o.machines.pipeline,
    )

    cell = CellRound(
        o.transport,
        manifest.averaging,
        executor=o.thread,
        journal=o.journal,
        clock=o.clock,
        on_error=o.on_error,
        machine=o.machines.round(),
        shapes=state.shapes,
    )
    engines = Engines(
        o.transport,
        pipeline,
        cell,
        o.owner,
        o.store,
        o.heavy,
        o.journal,
        o.metrics,
        o.meter,
        o.text,
    )
    work = StageRuntime(
        state,
        engines,
        t,
        manifest.optimizer,
        m.seq_len,
        o.transport.peer_id,
        o.on_error,
        outer_of(manifest.outer),
        o.read or reader(manifest),
        o.parts[state.stage],
        o.colleagues,
        manifest.scheduler,
    )
    donor = StateService(
        o.transport,
        work,
        o.store.settings,
        clock=o.clock,
        on_served=work.state_export.served,
        weights=o.weights,
        files=o.files,
        parameters=sum(part.bytes for part in o.parts[state.stage]),
        established=lambda peer: training.peers.is_established(peer),
    )
    facts = o.facts(run_facts(manifest, work, o.parts))
    if o.recorder is not None:
        o.recorder.begin(o.transport.peer_id, facts, manifest.scheduler, o.parts)
        make = replace(facts.make, read=o.recorder.reads(facts.make.read))
        facts = replace(facts, make=make)
    callbacks = Callbacks(on_lead=o.presence.changed, on_cell=o.presence.enter)
    kit = Kit(
        o.transport.peer_id,
        state.stage,
        facts,
        work,
        o.transport,
        o.clock,
        o.journal,
        o.presence.sightings.vitals,
        Tasks("training", o.on_error),
        callbacks,
        o.on_error,
    )
    training = Training(kit, o.identity, lambda: o.presence.view, o.machines, o.ledger, o.book)
    o.meter.accuse = training.accuse
    o.meter.timer = o.thread.now
    o.transport.on_lost(training.lost)
    o.transport.on_lost(cell.gone)
    training.candidacy.cell = o.presence.cell
    meetings = None
    if manifest.outer.windows:
        meetings = _meetings(manifest, o, training)
    o.presence.pace.seeks = lambda: training.seeks
    return Services(state, o.meter, pipeline, cell, work, training, meetings, donor)


def _meetings(manifest: Manifest, o: Ports, training: Training) -> CellMeetings:
    """Meetings of this cell with others, while this peer leads it."""
    pace = min(1.0, manifest.outer.window_s / USUAL_S)
    board = WindowBoard(o.presence.directory, o.clock, o.journal, TIMES.scaled(pace))
    finder = GroupFinder(o.identity, manifest.run_id, o.transport, board, o.learn, o.on_error)

    led = LedCell(training)

    def record() -> CellRecord | None:
        plan = led.plan
        if plan is None:
            return None
        count = Counter([training.kit.stage, *o.presence.view.stages()])
        replicas = tuple(count[stage] for stage in range(manifest.pipeline.stages + 1))
        return CellRecord(training.cell, plan.base, replicas, training.works, o.meter.tokens_per_s)

    register = CellRegister(
        o.transport.peer_id,
        o.presence.directory,
        o.clock,
        record,
        lambda: training.cell,
        pace,
    )

    meetings = CellMeetings(
        finder,
        led,
        o.clock,
        o.journal,
        register=register,
        addresses=o.presence.addresses,
        learn=o.learn,
        on_error=o.on_error,
    )
    training.kit.callbacks.on_partners = meetings.meet_hosts
    return meetings


def _devices(config: NodeConfig, manifest: Manifest) -> tuple[list[str], int]:
    """Names of the devices that hold the stage, and the CPU threads of each (0: all cores)."""
    if config.node.local_devices == 1:
        return [config.node.device], config.node.threads
    several = f"{config.node.local_devices} local devices"
    step = "take one:  --local-devices 1"
    refuse(
        (manifest.model.adapter, f"{several} in a run that trains adapters", step),
        (manifest.optimizer.masters, f"{several} in a run with bf16 parameters", step),
    )
    # One device needs nothing of torch's distributed half, which takes a second to load.
    from node.local.split import check_devices
    from node.local.stage import device_names, threads_each

    check_devices(manifest.model, config.node.local_devices)
    names = device_names(config.node.device, config.node.local_devices)
    return names, threads_each(config.node.threads, names)


def check_room(config: NodeConfig, manifest: Manifest, a: Assembled, journal: Journal) -> None:
    """Report when the stage hosted here no longer fits into memory under the owner's newest change.
    The change is followed all the same; without this line the first sign would be the kernel
    killing the process."""
    rules = a.training.admission.changes.known
    verdict = check_memory(
        config,
        under(manifest, rules),
        a.stage.stage,
        a.memory_limit,
        a.main_memory,
        older=a.memory.older,
    )
    text = ""
    if not verdict.ok:
        text = f"under change {rules.revision} of the owner {verdict.text}; {verdict.next_step}"
    elif a.memory.casts and not verdict.casts:
        text = (
            f"under change {rules.revision} of the owner this stage fits in fp32 alone, and it "
            "computes in 16 bits: tutti restart"
        )
    if text:
        journal.emit("daemon", "change-out-of-memory", text, "error", revision=rules.revision)


def inherit(
    config: NodeConfig, manifest: Manifest, stage: int, store: CheckpointStore, journal: Journal
) -> None:
    """Copy this peer's checkpoints of the run that this one continues, if none of this run that can
    be used is here yet, or only copies: then the later ones. A checkpoint that no peer of that run
    can have made is reported and left out. Blocks on the disk."""
    before = manifest.swarm.continues
    epochs = manifest.training.epochs
    old = CheckpointStore(config.checkpoint_dir(before), config.checkpoint, before)
    newest = store.newest_whole(stage, epochs)
    try:
        wanted = old.epochs(stage)
        copied = newest is None or store.metas(stage).get(newest) == old.metas(stage).get(newest)
    except LocalFault as e:
        if newest is None:
            raise
        journal.emit("checkpoint", "not-inherited", f"run {before[:12]}: {e}", "warning")
        return
    if newest is not None:
        # An earlier start may have ended, or met a full disk, before it had copied all.
        wanted = [epoch for epoch in wanted if newest < epoch < epochs]
        # Once this run has trained on, what the run before has beyond that is another history.
        if not wanted or not copied:
            return
    for epoch in wanted:
        try:
            found = old.load(stage, epoch)
            # The run before had fewer epochs (Manifest.check_continues).
            found.check_history(epochs - 1)
            store.save(stage, epoch, found.parameters, found.optimizer, found.meta)
        except LocalFault as e:
            journal.emit(
                "checkpoint",
                "not-inherited",
                f"epoch {epoch} of run {before[:12]}: {e}",
                "warning",
                epoch=epoch,
            )
    here = store.epochs(stage)
    text = "nothing of it is here, so the others' state is fetched"
    if here:
        text = f"epochs {', '.join(map(str, here))} of it are here"
    journal.emit(
        "checkpoint", "inherited", f"this run continues run {before[:12]}: {text}", run=before
    )


def run_facts(
    manifest: Manifest,
    work: StageRuntime,
    parts: Mapping[int, tuple[ParameterPart, ...]],
) -> RunFacts:
    """Facts that the leader plans with: the manifest's numbers and the engines' pure functions."""
    m = manifest.model
    p = manifest.pipeline
    t = manifest.training
    return RunFacts(
        stages=p.stages,
        epochs=t.epochs,
        batch=GlobalBatch(t.target_batch, p.micro_batch),
        min_replicas=t.min_replicas,
        evaluation=EvaluationFacts(
            eval_every=t.eval_every,
            reference=t.reference,
            warmup=manifest.optimizer.warmup,
            advice=advice(manifest.optimizer),
        ),
        run_id=manifest.run_id,
        scheduler=manifest.scheduler,
        prove=True,
        waits=Waits(
            t.epoch_timeout_s,
            manifest.averaging.round_timeout_s,
            probe_every_s=PROBE_WAYS_S,
            rebalance_every_s=t.rebalance_every_s,
        ),
        sizes=WorkSizes(
            parameters=tuple(sum(part.bytes for part in parts[s]) for s in range(p.stages + 1)),
            tensor=work.engines.pipeline.shape.nbytes(p.micro_batch, m.seq_len),
            operations=tuple(
                float(p.micro_batch * m.seq_len * flops_per_token(m, p.stages, s))
                for s in range(p.stages + 1)
            ),
            steps=tuple({part.name: part.cost for part in parts[s]} for s in range(p.stages + 1)),
            sequence=m.seq_len,
            wires={
                wire: work.engines.pipeline.shape.nbytes(p.micro_batch, m.seq_len, wire)
                for wire in p.wires
            },
        ),
        make=PlanFunctions(
            assign=lambda stage, cell, previous, room: assign(parts[stage], cell, previous, room),
            recall=work.local_checkpoints.recall,
            router=lambda: Router(manifest.scheduler, p.stages),
            read=work.read,
        ),
    )


def reader(manifest: Manifest) -> Read:
    """Settings of how cells average from a plan's text. The same text comes with every plan, so its
    signature is checked once."""
    return lru_cache(4)(partial(read, manifest))


Given = Callable[[int], Mapping[str, Tensor]]
"""The parameters of a stage of the model that the run begins from. Blocks on the disk."""


def _weights(config: NodeConfig, manifest: Manifest, stage: int) -> Given | None:
    """A reader of the weights in the directory where this peer keeps the model, or of the stage
    that it fetched; None where there is neither. Raises UsageFault for a directory that is named
    now and not there."""
    m = manifest.model
    places = config.places_of(manifest)
    where = Path(places.weights or config.base_dir(manifest.run_id, stage))
    if not m.weights or not (config.node.weights or where.is_dir()):
        return None
    files = Weights(where, manifest.optimizer.parameters)
    stages = manifest.pipeline.stages
    config.keep_places(manifest.run_id, places)

    def read(stage: int) -> Mapping[str, Tensor]:
        if not 0 <= stage <= stages:
            raise UsageFault(f"there is no stage {stage}", f"there are {stages}")
        return files.verified(m, stages, stage, m.weights[stage])

    return read


def _begin(
    config: NodeConfig, manifest: Manifest, stage: int, module: nn.Module, journal: Journal
) -> Given | None:
    """Put the weights that the run begins from in place if they are on the disk here, and return
    their reader; None if they are not. Raises LocalFault for a directory that the user named."""
    try:
        given = _weights(config, manifest, stage)
        found = given(stage) if given is not None else {}
    except LocalFault as e:
        if config.node.weights:
            raise
        journal.emit("checkpoint", "weights-unusable", f"{e}; they are fetched", "warning")
        return None
    base = base_of(module)
    for name, tensor in found.items():
        base[name].copy_(tensor)
    return given


async def _files_for_text(
    files: RunFiles,
    transport: TransportPort,
    presence: Presence,
    clock: Clock,
    on_step: Callable[[str], None],
) -> None:
    """Fetch the tokenizer that a peer at the ends needs, and the files beside it, where they are
    not here. Raises UsageFault where no peer gives them for :data:`FILES_S` seconds."""
    until = clock.now() + FILES_S
    while missing := await asyncio.to_thread(files.missing_for_text):
        on_step(f"fetches {', '.join(missing)} from other peers")
        ends = presence.view.replicas(ENDS)
        donors = [*ends, *sorted(presence.view.hosting - {*ends})][:DONORS]
        try:
            await files.fetch_for_text(transport, donors)
        except NoDonor as e:
            if clock.now() >= until:
                said = "; ".join(f"{short(p)}: {why}" for p, why in e.reasons.items())
                raise UsageFault(
                    f"not here, and given by no peer: {', '.join(missing)} of the run's model "
                    f"({said or 'nobody to ask'})",
                    GET_TOKENIZER,
                ) from e
            await asyncio.sleep(FILES_AGAIN_S)


async def _opened_text(
    config: NodeConfig, manifest: Manifest, clock: Clock
) -> tuple[Samples, Tokenizer]:
    """The text, opened by :func:`_text`. That may tokenise for hours, so it is done on a thread
    that no stop waits for; it does not tell how far it is, so it is never given up for standing
    still."""
    opening = Aside(clock, stall_s=inf)
    return await opening.call(lambda work: _text(config, manifest))


def _text(config: NodeConfig, manifest: Manifest) -> tuple[Samples, Tokenizer]:
    m = manifest.model
    places = config.places_of(manifest)
    size = manifest.pipeline.micro_batch
    files = RunFiles(config, manifest, None)
    found, tokenizer = open_source(
        manifest.data,
        m.seq_len,
        m.vocab,
        config.home,
        files.located(places),
        config.node.data_disk,
        files.load,
    )
    config.keep_places(manifest.run_id, places)
    if isinstance(found, Stream):
        return StreamedText(found, size), tokenizer
    return Text(found, SampleOrder(found.windows, manifest.data.seed), size), tokenizer
