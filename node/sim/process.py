"""One simulated peer: a process made of the product's services, which may die, stand still and come
back.

The daemon acts on a real network, disk and device; here they are simulated.
:func:`node.app.assembly.compose` chooses and connects the services for both.
"""

import asyncio
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from hashlib import blake2b
from typing import Any

from torch import Tensor

from node.app.assembly import Machines as Deciding
from node.app.assembly import Ports, Services, compose
from node.app.catchup import catch_up
from node.app.peer import Peer, keep
from node.checkpoint.settings import CheckpointSettings
from node.consensus.election import Colleagues
from node.consensus.rules import Rules
from node.coordinator.presence import Presence
from node.coordinator.service import Training
from node.core.clock import Clock
from node.core.errors import Refused, TimedOut
from node.core.ids import CellId, PeerId
from node.core.journey import Plan
from node.core.version import PROTOCOL
from node.dht.settings import DirectorySettings
from node.epoch.facts import RunFacts
from node.epoch.leader.leader import Leader
from node.epoch.member import Member
from node.epoch.pace import SEARCH_S
from node.identity.faults import FaultBook
from node.pipeline.settings import PipelineLimits
from node.reach.standing import Standing
from node.scheduler.router import SearchJob, search
from node.sim.setup import Setup
from node.sim.world.directory import SimDht, SimDirectory
from node.sim.world.loop import Inline, ProcessLoop, SimDevice, VirtualTime
from node.sim.world.network import SimLinks, SimNet, SimTransport
from node.sim.world.values import (
    DiskStore,
    SampleText,
    SimDisk,
    ValueMath,
    ValueOwner,
    Values,
    ValueSum,
)
from node.stage.engines import PipelineMeter
from node.stage.runtime import StageRuntime
from node.stage.state import StageState
from node.telemetry.events import Journal
from node.telemetry.metrics import Metrics
from node.wire.tensors import digest

RIPE_S = 5.0
"""Seconds together after which peers are colleagues; fewer than for real peers, because an epoch is
shorter here."""
MOVES = 200
"""Moves of a search for better paths."""
DRAIN_S = 60.0
SOON_S = 0.1
"""Seconds between two checks for the end of a process."""


class SimClock(Clock):
    """The clocks of one machine."""

    def __init__(self, world: VirtualTime) -> None:
        self._world = world
        self.skew = 0.0

    def now(self) -> float:
        return self._world.now

    def wall(self) -> float:
        return self._world.now + self.skew


class Swarm:
    """State shared by the simulated peers, and facts about all of them for their watches and
    strangers. All chance comes from ``seed``."""

    make: Any
    watch: Any

    def __init__(self, setup: Setup, seed: int) -> None:
        self.setup = setup
        self.seed = seed
        self.links = SimLinks(random.Random(f"links {seed}"), setup.links)
        self.world = VirtualTime(seed)
        self.net = SimNet(self.world, self.links, setup.weigh)
        self.record_store = SimDht(
            self.links, DirectorySettings(), setup.spread_s, lambda: self.world.now
        )
        self.manifest = setup.manifest(seed)
        self.metrics = Metrics()
        self.changes: dict[str, Rules] = {}
        """Changes that the owner has signed, by their text."""
        self.peers: dict[PeerId, SimPeer] = {}
        self.liars = set[PeerId]()
        self.strangers = set[PeerId]()
        self.troubles = 0
        """Faults that last and are not over."""

    def read(self, change: str) -> Rules:
        """A change as peers read it. Raises Refused for what the owner has not signed."""
        if not change:
            return Rules(self.manifest.averaging.peers, self.setup.outer)
        if change not in self.changes:
            raise Refused("not a change that the owner signed for this run", "")
        return self.changes[change]

    def facts(self, facts: RunFacts) -> RunFacts:
        """Facts that leaders plan with, with operations and sizes as large as the simulated
        work."""
        setup = self.setup
        block = setup.operations_per_s * 3 * setup.work.forward_s
        ends = setup.operations_per_s * 4 * setup.work.ends_s
        sizes = replace(
            facts.sizes, tensor=setup.activation, operations=(ends, *[block] * setup.stages)
        )
        return replace(facts, sizes=sizes)

    def honest(self, peer: PeerId) -> bool:
        return peer not in self.liars and peer not in self.strangers

    def calm(self) -> bool:
        """No fault lasts, and none is still to strike: a bit that flips with a peer's next
        parameters."""
        flips = any(p.flip for p in self.live())
        return not (self.troubles or self.links.walls or self.liars or flips)

    def live(self, stage: int | None = None) -> "list[SimPeer]":
        """Peers with a running process and a stage, in PeerId order."""
        return [
            p
            for _, p in sorted(self.peers.items())
            if p.alive and p.assembled is not None and (stage is None or p.stage == stage)
        ]


class SimPeer(Peer[Services]):
    """One machine: its disk and clock stay, its process may begin anew (:meth:`boot`). Its operator
    lets it host the stages of ``open_to``, and names its ``stage``; None: it chooses one, as others
    do. ``product_s``: seconds of 10^12 operations, as it measures them before it begins; 0 for
    unknown."""

    product_s = 0.0

    def __init__(
        self,
        swarm: Swarm,
        name: PeerId,
        stage: int | None,
        slowness: float,
        open_to: str = "auto",
    ) -> None:
        self.swarm = swarm
        self.world = swarm.world
        self.name = name
        self.slowness = slowness
        self.disk = SimDisk(swarm.setup.work.checkpoint_s)
        self.machine_clock = SimClock(swarm.world)
        self.identity = SimSigner(name)
        self.allowed = open_to
        self.named = stage
        self.alive = False
        self.lie = ""
        self.flip = False
        self._new()

    def _new(self) -> None:
        """Build the state that a process has in memory."""
        swarm = self.swarm
        self._failed = partial(swarm.watch.crashed, self)
        journal = Journal((swarm.watch,), clock=self.machine_clock, keep=1)
        super().__init__(self.allowed, self.machine_clock, journal, swarm.manifest, self._failed)
        self.loop = ProcessLoop(self.world)
        self.device = self._device()
        self.transport = SimTransport(
            swarm.net,
            self.name,
            self.loop,
            FaultBook(),
            partial(swarm.watch.banned, self),
            partial(swarm.watch.fault, self),
        )
        self.owner: ValueOwner | None = None
        self.told_to_leave = False

    def _device(self) -> SimDevice:
        """The compute device of a process that begins."""
        return SimDevice(self.loop, self.slowness)

    # ----------------------------------------------------------- life

    def boot(self) -> None:
        """A new process begins, unless one runs."""
        if not self.alive:
            self._new()
            self.alive = True
            self._later(lambda: self.tasks.spawn(self._take_part(), "start"))

    def _later(self, do: Any, *args: Any) -> None:
        """Do it in this process."""
        self.world.push(0.0, do, *args, loop=self.loop)

    async def _take_part(self) -> None:
        swarm = self.swarm
        manifest = self.swarm.manifest
        self.presence = presence = Presence(
            self.name,
            SimDirectory(swarm.record_store, self.name, self.clock),
            self.clock,
            swarm.record_store.settings.refresh_s,
            lambda peer, body: None,
            self._failed,
        )
        presence.start()
        stage = await self.take(
            presence, manifest, named=self.named, kept=self.disk.cell, company=True
        )
        a = self._assemble(stage, presence)
        self.tasks.spawn(self.watch_stage(presence), "placing", eternal=True)
        a.training.kit.callbacks.on_plan = self._planned
        a.training.kit.callbacks.on_move = self.asked
        a.training.kit.callbacks.on_change = partial(setattr, self.disk, "change")
        a.training.kit.callbacks.on_cell = partial(self._enters, presence)
        self.disk.cell = a.training.cell
        if self.disk.change:
            a.work.anchor.follow(a.training.change(self.disk.change).outer)
        presence.changed()
        await catch_up(a.work, presence, None, self.journal)
        self.start(a, presence, manifest)

    def _assemble(self, stage: int, presence: Presence) -> Services:
        swarm = self.swarm
        setup = self.swarm.setup
        device = self.device
        manifest = swarm.manifest
        watch = swarm.watch
        make = swarm.make
        self.named = stage
        meter = PipelineMeter(self.journal, swarm.metrics, self.clock)
        meter.steps.product_s = self.product_s
        store = DiskStore(
            self.disk,
            CheckpointSettings(
                setup.checkpoint_within_s, setup.checkpoint_every, setup.checkpoint_keep
            ),
            manifest.run_id,
            self.clock.now,
            partial(watch.restored, self),
        )
        self.loop.blocked = store.blocked
        self.owner = ValueOwner(
            manifest.optimizer,
            setup.epochs,
            device,
            setup.work.step_s,
            partial(watch.stepping, self),
            partial(watch.settling, self),
            partial(watch.gives, self),
        )
        state = StageState(Values(setup.names[stage]), stage, placed=self._placed)

        m = manifest.model
        # The stash holds two fp32 activations for each of ``setup.stash`` micro-batches.
        stash = setup.stash * 2 * 4 * m.d_model * m.seq_len * manifest.pipeline.micro_batch

        def math(module: Any, wire: str, autocast: Any) -> ValueMath:
            return ValueMath(module, wire, device, setup.work.forward_s, setup.work.ends_s)

        recorder = make.recorder(self)
        member = make.member
        leader = make.leader
        if recorder is not None:
            member = recorder.member
            leader = recorder.leader
        sample_text = None
        if not stage:
            sample_text = SampleText(manifest.model.seq_len, setup.micro_batch)
        ports = Ports(
            self.identity,
            self.transport,
            presence,
            self.clock,
            self.journal,
            swarm.metrics,
            self._failed,
            device,
            Inline(),
            meter,
            store,
            self.owner,
            setup.parts,
            PipelineLimits(stash, setup.in_flight),
            sample_text,
            math=math,
            gradients=ValueSum(partial(watch.gave, self)),
            machines=Deciding(
                pipeline=self._watched(make.pipeline, watch.pipeline),
                round=self._watched(make.round, watch.round),
                member=self._watched(member, watch.member),
                leader=self._watched(leader, watch.leader),
                search=self._search,
            ),
            recorder=recorder,
            read=swarm.read,
            facts=swarm.facts,
            colleagues=Colleagues(self.name, RIPE_S),
            ledger=self.disk.votes,
        )
        self.assembled = made = compose(manifest, ports, state)
        self.transport.serving = True
        watch.services(self)
        make.services(self)
        return made

    def _planned(self, plan: Plan) -> None:
        me = plan.member(self.name)
        if not plan.last:
            self.swarm.watch.began(self, plan, me is None or not me.current)

    def _enters(self, presence: Presence, cell: CellId) -> None:
        presence.enter(cell)
        self.disk.cell = cell

    def _placed(self, tensors: Mapping[str, Tensor]) -> None:
        """Flip a bit of the tensors on the way into their place, if ``flip`` asks for it. It
        changes new values only, not the old ones kept to go back to."""
        kept = None
        if self.assembled is not None and (before := self.assembled.stage._before) is not None:
            kept = before.parameters
        if self.flip and isinstance(tensors, dict) and tensors is not kept:
            self.flip = False
            name = min(tensors)
            tensors[name] = tensors[name] + 0.125

    def leave(self) -> None:
        """``tutti drain``."""
        if self.alive and not self.draining:
            self.told_to_leave = True  # at once: a process that stands still hears it later
            self._later(lambda: self.tasks.spawn(self._drain(), "drain"))

    async def _drain(self) -> None:
        try:
            await self.drain(DRAIN_S)
        except TimedOut:
            self.stop("drained in haste")

    def stop(self, why: str) -> None:
        """End the process in order; a peer that has moved begins anew at its new stage, or in its
        new cell."""
        if not self.ending:
            self.ending = True
            self._later(lambda: self.tasks.spawn(self._rest(), "rest"))

    def halt(self) -> None:
        """``tutti stop``."""
        if self.alive and not self.ending:
            self.told_to_leave = True
            self._later(self.stop, "stopped")

    def boot_when_down(self) -> None:
        """A new process begins as soon as the one that stops has ended."""
        if self.alive:
            self.world.push(SOON_S, self.boot_when_down)
        else:
            self.boot()

    async def _rest(self) -> None:
        """Last work of a daemon before its process ends."""
        a = self.assembled
        if a is not None:
            await a.training.close()
            self.transport.serving = False
            if not self.moved:
                await keep(a, self.journal)
        self._later(self._left)

    def _left(self) -> None:
        swarm = self.swarm
        self.kill()
        if not self.moved:
            swarm.record_store.withdraw(self.name, self.clock.wall())
            swarm.watch.note(f"{self.name} has left")
            return
        where = self.to_stage
        if self.to_cell is not None:
            where = f"cell {self.to_cell}"
        swarm.watch.note(f"{self.name} has moved to {where}")
        if self.to_cell is not None:
            self.disk.change_cell(self.to_cell)
        # A peer with a fixed stage keeps it in another cell too.
        if self.to_cell is None or self.allowed:
            self.named = self.to_stage
        self.boot()

    def kill(self) -> None:
        """SIGKILL: connections are reset, nothing it holds in memory is left."""
        if self.alive:
            self.alive = False
            self.loop.kill()
            self.disk.died(self.world.now)
            self.swarm.net.lost(self.name)

    # ----------------------------------------------------------- what decides, and is watched

    def _watched(self, make: Callable[..., Any], watch: "Callable[[SimPeer, Any], Any]") -> Any:
        """Makes a machine of which each decision is looked at."""
        return lambda *args, **history: watch(self, make(*args, **history))

    async def _search(self, job: SearchJob) -> Any:
        await asyncio.sleep(SEARCH_S)
        return search(job, moves=MOVES)

    # ----------------------------------------------------------- its record

    def body(self) -> Any:
        """The body of its record."""
        spoken = (PROTOCOL, PROTOCOL)
        reach = Standing.OPEN.value
        return replace(super().body(), name=self.name, protocols=spoken, reach=reach)

    # ----------------------------------------------------------- questions from outside

    @property
    def stage(self) -> int:
        """Its present or coming stage; -1 while that is open."""
        here = self.place
        if self.assembled is not None:
            here = self.assembled.stage.stage
        return next((stage for stage in (here, self.named) if stage is not None), -1)

    @property
    def ready(self) -> bool:
        """True once the peer takes part."""
        a = self.assembled
        return self.alive and a is not None and bool(a.training.tasks)

    @property
    def leaving(self) -> bool:
        return self.told_to_leave or self.draining or self.moving

    @property
    def work(self) -> StageRuntime:
        """The runtime of its stage. Only for a peer that has begun."""
        return self._begun().work

    @property
    def training(self) -> Training:
        """Its training service. Only for a peer that has begun."""
        return self._begun().training

    def _begun(self) -> Services:
        if self.assembled is None:
            raise RuntimeError(f"{self.name} has no stage yet")
        return self.assembled

    @property
    def leader(self) -> Leader | None:
        if self.assembled is None:
            return None
        return self.assembled.training.leader

    @property
    def member(self) -> Member:
        return self.training.member

    @property
    def digest(self) -> str:
        """Digest of its parameters, as the peer itself says."""
        return self.work.stage.digest

    def in_place(self) -> str:
        """The digest of the parameters that are in place."""
        return digest(self.work.stage.parameters())

    def change(self, text: str) -> None:
        """The owner asks its daemon for a change to how cells average."""
        self._later(self._change, text)

    def _change(self, text: str) -> None:
        try:
            self.training.change(text)
        except Refused as e:
            self.swarm.watch.note(f"{self.name}: {e}")


class SimSigner:
    """Signatures of one peer. Nobody in a simulation makes another peer's."""

    def __init__(self, peer: PeerId) -> None:
        self.peer_id = peer

    def sign(self, data: bytes, domain: str) -> bytes:
        return _signature(self.peer_id, data, domain)

    def verify(self, peer: PeerId, data: bytes, signature: bytes, domain: str) -> None:
        if signature != _signature(peer, data, domain):
            raise Refused(f"the signature in {domain!r} is not by {peer}")


def _signature(peer: PeerId, data: bytes, domain: str) -> bytes:
    return blake2b(data, digest_size=32, key=f"{peer} {domain}".encode()[:64]).digest()
