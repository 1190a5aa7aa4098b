"""One peer's share of the pipeline: carries out what the machine decides, on the event loop, with
one device thread.

The loop only moves bytes and messages. Tensors are made, used and encoded on the device thread. A
job ends with its result encoded, so that a frame crosses between the threads once each way.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial

from torch import Tensor, nn

from node.core.clock import Clock, SystemClock
from node.core.ids import ENDS, PeerId, short
from node.core.journey import Hop, Plan
from node.core.memory import let_go
from node.core.tasks import Tasks
from node.model.documents import ends_of
from node.model.settings import ModelSettings
from node.pipeline import events as ev
from node.pipeline.device import DeviceThread
from node.pipeline.events import Direction, Key
from node.pipeline.forward_only import assembly as forward_only
from node.pipeline.forward_only.jobs import ForwardJobs
from node.pipeline.frames import FrameShape
from node.pipeline.gradients import GradientSum
from node.pipeline.hops.admission import ROOM_WAIT
from node.pipeline.hops.assembly import called_side, connect
from node.pipeline.hops.ports import PipelineHost, Telemetry
from node.pipeline.hops.stash import Stash
from node.pipeline.jobs import DeviceJobs
from node.pipeline.machine import BLOCK_JOBS, ENDS_JOBS, PipelineMachine
from node.pipeline.origin import Origin
from node.pipeline.rounding import SentRounding
from node.pipeline.route import fewest_hops
from node.pipeline.settings import TEXTS, PipelineLimits, PipelineSettings
from node.pipeline.shares import CountedShares
from node.pipeline.texts import TextTable
from node.pipeline.timing import Timing
from node.pipeline.visit_buffers import Autocast, StageMath
from node.transport.port import TransportPort
from node.wire.sketch import encode_all
from protos import pipeline_pb2 as pb
from protos.pipeline_pb2_grpc import add_PipelineServicer_to_server

RECEIPTS_S = 1.0
"""Shortest limit for the wait for notes at the end of an epoch, in seconds. It is longer if notes
were measured to take longer, or this process runs late."""


class Pipeline:
    """The pipeline as ``training`` sees it. Make it before the transport starts: it adds its
    service to the server.

    ``module`` is ``Ends`` for stage 0, else ``Blocks``; its device is where it computes.
    ``autocast`` makes the context every forward runs in. Gradients and losses are sums over tokens;
    the round divides. The parameters must not change between :meth:`set_plan` and :meth:`reset`.
    ``math`` and ``gradients``: replace the arithmetic and the gradient sum where the stage is not
    on one device. ``usual_s``: seconds, as in :class:`~node.pipeline.hops.deadlines.Deadlines`.
    ``document_mask``: targets say where documents end, and blocks keep documents apart.
    ``loss_mask``: targets say which tokens are not trained on. ``planned``: paths are planned by
    measured costs. ``places``: largest number of shares of others' micro-batches that wait here for
    their origin's note; 0: twice the window.
    """

    def __init__(
        self,
        transport: TransportPort,
        module: nn.Module,
        device: DeviceThread,
        settings: PipelineSettings,
        limits: PipelineLimits,
        *,
        stage: int,
        model: ModelSettings,
        telemetry: Telemetry,
        clock: Clock | None = None,
        autocast: Autocast = nullcontext,
        plan_wait_s: float = 5.0,
        math: Callable[[nn.Module, str, Autocast], StageMath] = StageMath,
        gradients: GradientSum | None = None,
        usual_s: float = 0.0,
        document_mask: bool = False,
        loss_mask: bool = False,
        planned: bool = False,
        places: int = 0,
        machine: Callable[[PeerId, int, bool, int], PipelineMachine] = PipelineMachine,
    ) -> None:
        self.settings = settings
        tasks = Tasks("pipeline", self._on_error)
        self.host = PipelineHost(transport, device, clock or SystemClock(), tasks, telemetry)
        shape = FrameShape(
            settings.micro_batch,
            model.seq_len,
            model.d_model,
            settings.wire,
            settings.stages,
            masked=document_mask,
            loss_mask=loss_mask,
            context=max(model.seq_len, model.positions),
        )
        decisions = machine(
            transport.peer_id,
            fewest_hops(settings.stages, settings.may_skip),
            planned,
            places or 2 * limits.in_flight,
        )
        self.math = math(module, settings.wire, autocast)
        self.math.pausing(device.breathe)
        self.math.use(device.lanes)
        self.hops = connect(
            self.host,
            decisions,
            shape,
            self.math,
            settings,
            stash_bytes=limits.stash_bytes,
            usual_s=usual_s,
            act=self._carry_out,
        )
        hops = self.hops
        parts = (self.host, hops.driver, hops.stash, hops.planned)
        self.origin = Origin(*parts, hops.deadlines, in_flight=limits.in_flight)
        """Takes the ends' own micro-batches through the swarm."""
        self.jobs = DeviceJobs(*parts, self.math, timing=hops.sender.timing)
        self.shares = CountedShares(self.host, hops.stash, self.origin, gradients or GradientSum())
        self._window = limits.in_flight if stage == ENDS else None
        """Number of micro-batches that an ends peer has under way at once; None at a block
        stage."""
        texts = TextTable(limits.text_bytes or TEXTS, self.math.text_bytes)
        self.forward_jobs = ForwardJobs(self.host, self.math, shape, texts)
        self.forward_requests = forward_only.connect(self.host, hops, self.forward_jobs, stage)
        inbound = called_side(self.host, hops, self.forward_requests, plan_wait_s=plan_wait_s)
        add_PipelineServicer_to_server(inbound, transport.server)

    # Readings
    # ------------------------------------------------------------

    @property
    def me(self) -> PeerId:
        """PeerId of this peer."""
        return self.host.me

    @property
    def clock(self) -> Clock:
        """The clock of this pipeline."""
        return self.host.clock

    @property
    def machine(self) -> PipelineMachine:
        """The decisions about micro-batches."""
        return self.hops.driver.machine

    @property
    def shape(self) -> FrameShape:
        """Sizes of the run's tensors."""
        return self.hops.planned.shape

    @property
    def stash(self) -> Stash:
        """Activations kept for backward."""
        return self.hops.stash

    @property
    def timing(self) -> Timing:
        """Measured times of device work and of connections."""
        return self.hops.sender.timing

    @property
    def rounding(self) -> SentRounding:
        """Measured errors of the tensors that were sent, by peer."""
        return self.hops.sender.rounding

    @property
    def texts(self) -> TextTable:
        """Texts with their keys and values kept here."""
        return self.forward_jobs.texts

    # Calls by training
    # ------------------------------------------------------------

    def set_plan(self, plan: Plan | None) -> None:
        """Put a plan in force, and let waiting frames in. Work and gradients of any other plan are
        forgotten. Does nothing for the plan that is in force already."""
        known = self.machine.plan
        if plan is not None and known is not None and plan.hash == known.hash:
            return
        hops = self.hops
        hops.driver.handle(ev.AdoptPlan(plan))
        self.origin.forget()
        self.shares.reset()
        if plan is not None:
            hops.guard.begin(plan.epoch)
            self.math.sketch_as(plan.hash if self._inspects(plan) else "")
            hops.stash.divide(Counter(path.origin for path in plan.paths))
        hops.deadlines.begin(plan)
        self.jobs.begin()
        hops.planned.begin()
        hops.notes.forget()
        hops.changes.notify()

    def _inspects(self, plan: Plan) -> bool:
        """True if sketches can show a lie: a block stage has replicas, which are compared."""
        replicas = Counter(m.stage for m in plan.members if m.stage != ENDS)
        return self.settings.inspect and max(replicas.values(), default=0) > 1

    def reset(self, epoch: int) -> None:
        """Forget everything of ``epoch``: its plan, stash and gradients. Does nothing if another
        epoch is in force."""
        if self.machine.plan is not None and self.machine.plan.epoch == epoch:
            self.set_plan(None)

    def slots(self) -> int:
        """Number of micro-batches that this peer holds at once: the window of an ends peer, the
        room in the stash of a block stage; 0 while the size of a micro-batch is not known."""
        if self._window is not None:
            return self._window
        return self.hops.keeper.slots()

    def gone(self, peer: PeerId) -> None:
        """Stop waiting for a member of the plan in force: the leader reports that it is dead."""
        self.hops.driver.handle(ev.PeerDied(peer))
        self.hops.fetcher.gone(peer)

    async def receipts(self, epoch: int, dropped: Collection[int] = ()) -> None:
        """Wait for the notes that say which shares of this peer count. Call it before
        :meth:`take_gradients`.

        The leader may learn that a micro-batch is finished, and tell this peer that the epoch is,
        before the origin's note arrives. A share that no note has named when the wait ends is lost.
        ``dropped`` micro-batches are not waited for, nor is an origin that named no share in the
        epoch before.
        """
        machine = self.machine
        patience = self.host.transport.patience
        longest = patience.within("named", RECEIPTS_S, self.clock.now())
        with suppress(TimeoutError):
            async with asyncio.timeout(longest):
                while (plan := machine.plan) and plan.epoch == epoch and machine.unsure(dropped):
                    await self.hops.driver.handled()
        plan = machine.plan
        if plan is None or plan.epoch != epoch:
            return
        for origin, count in machine.unnamed(dropped).items():
            self.host.telemetry.emit(
                "shares-unnamed",
                f"{count} shares of {short(origin)} do not count: it did not name this peer",
                "warning",
                epoch=epoch,
                peer=origin,
            )

    @property
    def micro_batches(self) -> int:
        """Micro-batches of this epoch with a share that counts here."""
        return self.shares.micro_batches

    @property
    def computed(self) -> float:
        """Number of micro-batches that the work done here under the plan in force would be enough
        for, counted or not."""
        jobs = BLOCK_JOBS if self._window is None else ENDS_JOBS
        return self.machine.computed / jobs

    def worked(self) -> list[ev.Neighbours]:
        """Neighbours of each micro-batch that counts here by the plan in force, in the order of
        their numbers."""
        neighbours = self.machine.neighbours
        return [
            ev.Neighbours(index, tokens, *neighbours[index])
            for index, tokens in sorted(self.shares.tokens.items())
            if index in neighbours
        ]

    def sketched(self) -> list[ev.VisitSketches]:
        """Sketches of each micro-batch that counts here by the plan in force and of which this peer
        has all sketches, in the order of their numbers."""
        neighbours = self.machine.neighbours
        return [
            ev.VisitSketches(index, *neighbours[index], encode_all([found[c] for c in ev.Crossing]))
            for index, found in sorted(self.shares.sketches.items())
            if index in neighbours and len(found) == len(ev.Crossing)
        ]

    async def take_gradients(self, epoch: int) -> tuple[Mapping[str, Tensor], int]:
        """Return (parameter gradient sums of this stage by name, number of tokens in them); ({}, 0)
        for another epoch. The sums are read off the event loop.

        Closes the epoch: micro-batches still under way count nowhere any more, and
        :meth:`Origin.run` reports its own as not counted. May be called again until :meth:`reset`.
        Raises OutOfResources if there is no memory for the sums.
        """
        if self.machine.plan is None or self.machine.plan.epoch != epoch:
            return {}, 0
        self.hops.driver.handle(ev.Close(epoch))
        return await self.shares.whole()

    async def evaluate(
        self, hops: Sequence[Hop], tokens: Tensor, targets: Tensor
    ) -> tuple[float, int]:
        """Return (loss sum in nats, number of tokens) of one batch [B, T] through ``hops``, without
        gradients. Raises PeerFault, and ValueError for an impossible path or batch."""
        back = await self.forward_requests.go(pb.EVALUATE, tuple(hops), tokens, ends_of(targets))
        return await self.forward_jobs.compute(partial(self.math.loss_only, back, targets))

    async def logits(self, hops: Sequence[Hop], tokens: Tensor) -> Tensor:
        """Return the logits [B, V] after the last of ``tokens`` [B, T], fp32 on the CPU. Raises as
        :meth:`evaluate`."""
        back = await self.forward_requests.go(pb.GENERATE, tuple(hops), tokens)
        return await self.forward_jobs.compute(partial(self.math.logits_only, back))

    async def text_logits(
        self, hops: Sequence[Hop], text: int, past: int, tokens: Tensor, positions: int = 1
    ) -> tuple[Tensor, bool]:
        """Continue a text by ``tokens`` [n]. Returns (logits [p, V] after each of the last
        ``positions`` tokens, fp32 on the CPU; True if every hop keeps the text). There is one
        position alone where the last hop knows no more.

        ``text``: the random number of the text; ``past``: number of its earlier tokens, which all
        ``hops`` keep; what they keep beyond is forgotten. Raises PeerFault if a hop no longer keeps
        the text, and as :meth:`evaluate`.
        """
        return await self.forward_requests.continue_text(tuple(hops), text, past, tokens, positions)

    async def close(self) -> None:
        """End everything under way. The device thread is not closed: it belongs to the caller."""
        self.set_plan(None)
        self.hops.keeper.stop()
        self.forward_requests.close()
        await self.host.tasks.close()
        self.hops.keeper.stop()  # the end of a task may have asked for another sweep

    # Carrying out
    # ------------------------------------------------------------

    def _carry_out(self, action: ev.Action) -> None:
        hops = self.hops
        match action:
            case ev.Compute(key, way, keep):
                self.host.tasks.spawn(self.jobs.compute(key, way, keep), "compute")
            case ev.Send():
                hops.sender.send(action)
            case ev.Later(key, way, seconds, full):
                if full and way is Direction.FORWARD and key.position == 0:
                    self.origin.window.turned_away(key.index)
                hops.sender.later(key, way, seconds)
            case ev.Hold(key):
                # The hop that sent the gradient must not give this hop up meanwhile.
                hops.sender.later(key, Direction.BACKWARD, ROOM_WAIT * hops.deadlines.hop_s)
            case ev.Fetch():
                self.host.tasks.spawn(hops.fetcher.fetch(action), "fetch")
            case ev.Commit(key):
                self.shares.commit(key)
            case ev.Void(key):
                if (work := hops.stash.get(key)) is not None:
                    work.share = None
                self.host.telemetry.emit(
                    "share-void",
                    "this peer's gradients of the micro-batch cannot count",
                    "debug" if self.machine.closed else "info",
                    index=key.index,
                )
            case ev.AcknowledgeVisit(key, way):
                hops.driver.resolve(key, way, True, "")
            case ev.Failed(key, way, reason):
                hops.driver.resolve(key, way, False, reason)
            case ev.TellOrigin(key, origin, reason):
                self.host.tasks.spawn(hops.notes.tell_origin(key, origin, reason), "lost")
            case ev.TellCounted(index, peers):
                hops.notes.tell_counted(index, peers)
            case ev.Skipped(key, stage):
                self.host.telemetry.emit(
                    "hop-skipped",
                    f"no replica of stage {stage} can be reached: the micro-batch leaves it out",
                    "warning",
                    index=key.index,
                    stage=stage,
                )
            case ev.FreeGraph(key):
                if (work := hops.stash.get(key)) is not None:
                    work.free_graph()
                    hops.stash.recharge(key, len(work.upstream or b""))
            case ev.FreeGradient(key):
                if (work := hops.stash.get(key)) is not None:
                    work.upstream = None
                    hops.stash.recharge(key, 0)
            case ev.Free(key):
                self._free(key)
            case ev.Finished(key):
                self.origin.finished(key)
            case ev.Dropped(index, reason):
                self.origin.dropped(index, reason)

    def _free(self, key: Key) -> None:
        held = [self.hops.stash.pop(key)]
        if held[0] is not None:
            held[0].dead = True
            let_go(held, held[0].nbytes)
        for way in Direction:
            self.hops.sender.cancel(key, way)
            self.hops.driver.resolve(key, way, False, "freed")

    def _on_error(self, name: str, error: BaseException) -> None:
        self.host.telemetry.emit("task-died", f"{name}: {error!r}", "error")
