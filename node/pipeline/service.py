"""One peer's share of the pipeline: carries out what the machine decides, on the event loop, with
one device thread.

The loop only moves bytes and messages. Tensors are made, used and encoded on the device thread; a
job ends with its result encoded, so that a frame crosses between the threads once each way.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial

from torch import Tensor, nn

from node.core.clock import Clock, SystemClock
from node.core.errors import LocalFault, OutOfResources
from node.core.ids import ENDS, PeerId, short
from node.core.journey import Hop, Path, Plan
from node.model.device import out_of_memory
from node.model.documents import ends_of
from node.model.settings import ModelSettings
from node.pipeline import events as ev
from node.pipeline.device import DeviceThread, Priority
from node.pipeline.events import Direction, Key, MicroBatchDone
from node.pipeline.forward_requests import ForwardRequests
from node.pipeline.frames import FrameShape
from node.pipeline.gradients import GradientSum
from node.pipeline.guard import NotFinite
from node.pipeline.hops.base import PipelineBase, Telemetry
from node.pipeline.hops.inbound import ROOM_WAIT, Inbound
from node.pipeline.hops.sender import Sender
from node.pipeline.machine import PipelineMachine
from node.pipeline.route import fewest_hops
from node.pipeline.settings import PipelineLimits, PipelineSettings
from node.pipeline.visit_buffers import COMPUTE_ERRORS, Autocast, StageMath, VisitBuffers
from node.transport.port import TransportPort
from protos import pipeline_pb2 as pb
from protos.pipeline_pb2_grpc import add_PipelineServicer_to_server

RECEIPTS_S = 1.0
"""Wait for notes at the end of an epoch: a way there and back, and more where notes are measured to
take longer or this process runs late."""
STRETCH_MOST = 1000.0
"""A plan stretches the time of a hop to at most this multiple of the manifest's."""


BatchOf = Callable[[Path], Awaitable[Callable[[], tuple[Tensor, Tensor]]]]
"""Waits for the text of a path; returns a function that makes (tokens, targets) of it, on any
thread."""


class Origin:
    """The ends' own micro-batches: a window of them under way, each reported exactly once."""

    def __init__(self, pipeline: PipelineBase) -> None:
        self._pipeline = pipeline
        self._results: dict[int, asyncio.Future[MicroBatchDone]] = {}

    async def run(
        self,
        paths: Iterable[Path],
        batch_of: BatchOf,
        on_result: Callable[[MicroBatchDone], None],
    ) -> None:
        """Take every path through the swarm, ``limits.in_flight`` at a time; each is reported
        exactly once.

        ``batch_of`` waits until the text of a path is there, no longer than the path has time, and
        returns the function that makes (tokens, targets), int64 [B, T], of it on the device thread.
        ``on_result`` is called on the loop. Returns when all have ended, counted or not; if it is
        cancelled, micro-batches under way are dropped without a report.
        """
        queue = iter(paths)
        walkers = [
            self._pipeline.tasks.spawn(self._walk(queue, batch_of, on_result), f"window {i}")
            for i in range(max(1, self._pipeline.limits.in_flight))
        ]
        try:
            await asyncio.gather(*walkers)
        finally:
            for walker in walkers:
                walker.cancel()

    async def _walk(
        self,
        queue: Iterator[Path],
        batch_of: BatchOf,
        on_result: Callable[[MicroBatchDone], None],
    ) -> None:
        for path in queue:
            on_result(await self._one(path, batch_of))

    async def _one(self, path: Path, batch_of: BatchOf) -> MicroBatchDone:
        pipeline = self._pipeline
        index = path.index
        late = pipeline.time_left(path)
        try:
            if late <= 0:
                raise TimeoutError("the time of its epoch was over")
            async with asyncio.timeout(late):
                batch = await batch_of(path)
        except (TimeoutError, LocalFault) as e:
            why = str(e) or f"its text did not come in {late:.1f} s"
            pipeline.telemetry.emit("micro-batch-dropped", why, "warning", index=index)
            return MicroBatchDone(index, False)
        machine = pipeline.machine
        left = pipeline.time_left(path)
        plan = None if machine.closed else machine.plan
        if plan is None or machine.paths.get(index) != path or index in self._results:
            return MicroBatchDone(index, False)  # of a plan that is closed, or no longer in force
        result = self._results[index] = asyncio.get_running_loop().create_future()
        key = Key(plan.epoch, index, 0)
        work = VisitBuffers(
            pipeline.clock.now() + left,
            pipeline.shape_of(index),
            pipeline.me,
            batch=batch,
            wires=pipeline.wires_of(key),
        )
        pipeline.stash.put(key, work, pipeline.cost(index))
        pipeline.handle(ev.Start(index))
        try:
            await asyncio.wait((result,), timeout=max(0.0, left))
        except asyncio.CancelledError:
            # Nobody waits for it any more, so its end is not reported.
            if self._results.get(index) is result:
                del self._results[index]
            raise
        finally:
            if not result.done() and pipeline.machine.plan is plan:
                pipeline.handle(ev.Drop(index, f"not finished in {left:.1f} s"))
            if self._results.get(index) is result:
                del self._results[index]
        if result.done():
            return result.result()
        return MicroBatchDone(index, False)

    def forget(self) -> None:
        """Another plan is in force: its micro-batches may have the same numbers."""
        self._results.clear()

    def finished(self, key: Key) -> None:
        """The gradient came home."""
        head = self.at_last(key)
        if head is not None:
            self._end(MicroBatchDone(key.index, True, head.loss_sum, head.tokens))

    def dropped(self, index: int, reason: str) -> None:
        if self._end(MicroBatchDone(index, False)):
            self._pipeline.telemetry.emit("micro-batch-dropped", reason, "warning", index=index)

    def at_last(self, key: Key) -> VisitBuffers | None:
        """Buffers that this origin holds at the end of the journey of ``key``, or None."""
        path = self._pipeline.machine.paths.get(key.index)
        if path is None:
            return None
        return self._pipeline.stash.get(key._replace(position=len(path.hops) + 1))

    def _end(self, done: MicroBatchDone) -> bool:
        result = self._results.get(done.index)
        if result is None or result.done():
            return False
        result.set_result(done)
        return True


class Pipeline(PipelineBase):
    """The pipeline as ``training`` sees it. Make it before the transport starts: it adds its
    service to the server.

    ``module`` is ``Ends`` for stage 0, else ``Blocks``; its device is where it computes.
    ``autocast`` makes the context every forward runs in. Gradients and losses are sums over tokens;
    the round divides. The parameters must not change between :meth:`set_plan` and :meth:`reset`.
    ``math`` and ``gradients``: replace the arithmetic and the gradient sum where the stage is not
    on one device. ``usual_s``: the least seconds that a plan gives an epoch; where it gives more,
    hops have longer by the same factor; 0: never. ``document_mask``: targets say where documents
    end, and blocks keep them apart. ``loss_mask``: targets say which tokens are not trained on.
    ``planned``: paths are planned by measured costs. ``places``: shares of others' micro-batches
    that wait here to be named, at most; 0: twice the window.
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
        super().__init__(
            transport,
            device,
            settings,
            limits,
            telemetry,
            clock or SystemClock(),
            plan_wait_s,
            FrameShape(
                settings.micro_batch,
                model.seq_len,
                model.d_model,
                settings.wire,
                settings.stages,
                masked=document_mask,
                loss_mask=loss_mask,
                context=max(model.seq_len, model.positions),
            ),
            machine(
                transport.peer_id,
                fewest_hops(settings.stages, settings.may_skip),
                planned,
                places or 2 * limits.in_flight,
            ),
            stage,
            math(module, settings.wire, autocast),
        )
        self._usual_s = usual_s
        self.sender = Sender(self)
        self.forward_requests = ForwardRequests(self, self.sender)
        self._gradients = gradients or GradientSum()
        self.origin = Origin(self)
        """Takes the ends' own micro-batches through the swarm."""
        self._idle_seen = 0.0
        self._counted: dict[int, int] = {}
        """Tokens of each micro-batch of the plan that counts here."""
        self._sliced = 0
        self.math.pausing(device.breathe)
        requests = self.forward_requests
        self.inbound = Inbound(self, requests.receive, requests.lost)
        add_PipelineServicer_to_server(
            self.inbound,
            transport.server,
        )

    # Calls by training
    # ------------------------------------------------------------

    def set_plan(self, plan: Plan | None) -> None:
        """Put a plan in force; frames that came early are let in. Work and gradients of any other
        plan are forgotten."""
        known = self.machine.plan
        if plan is not None and known is not None and plan.hash == known.hash:
            return
        self.handle(ev.AdoptPlan(plan))
        self.origin.forget()
        self._counted.clear()
        self._gradients.reset()
        if plan is not None:
            self.guard.begin(plan.epoch)
            self.stash.divide(Counter(path.origin for path in plan.paths))
        self._plan_until = self.clock.now() + (plan.deadline_s if plan else 0.0)
        if plan is not None and plan.paths and self._usual_s:
            self._stretch = min(max(1.0, plan.deadline_s / self._usual_s), STRETCH_MOST)
        self._idle_seen = self.device.idle_s
        self.sender.forget()
        self.look_again()

    def reset(self, epoch: int) -> None:
        """Forget everything of ``epoch``: its plan, stash and gradients. Does nothing when another
        epoch is in force."""
        if self.machine.plan is not None and self.machine.plan.epoch == epoch:
            self.set_plan(None)

    def slots(self) -> int:
        """Micro-batches that this peer holds at once: an ends peer its window, a block stage what
        its stash takes; 0 when the size of one is not known yet."""
        plan = self.machine.plan
        if self.stage == ENDS:
            return self.limits.in_flight
        shape = ()
        if plan is not None and plan.paths:
            shape = self.shape_of(plan.paths[0].index)
        if plan and shape in self.math.graph_bytes:
            return max(1, self.stash.limit // self.cost(plan.paths[0].index))
        return 0

    def gone(self, peer: PeerId) -> None:
        """The leader reports that this member of the plan in force is dead: stop waiting for it."""
        self.handle(ev.PeerDied(peer))
        self.sender.gone(peer)

    async def receipts(self, epoch: int, dropped: Collection[int] = ()) -> None:
        """Before :meth:`take_gradients`: let the notes come in that say which of our shares count.

        The leader may hear that a micro-batch is finished, and we from the leader that the epoch
        is, before the origin's note is here; a share that is not named by then is lost. ``dropped``
        micro-batches are not waited for, nor is an origin that named none in the epoch before.
        """
        longest = self.transport.patience.within("named", RECEIPTS_S, self.clock.now())
        with suppress(TimeoutError):
            async with asyncio.timeout(longest):
                while (
                    (plan := self.machine.plan)
                    and plan.epoch == epoch
                    and self.machine.unsure(dropped)
                ):
                    self._handled.clear()
                    await self._handled.wait()
        plan = self.machine.plan
        if plan is None or plan.epoch != epoch:
            return
        for origin, count in self.machine.unnamed(dropped).items():
            self.telemetry.emit(
                "shares-unnamed",
                f"{count} shares of {short(origin)} do not count: it did not name this peer",
                "warning",
                epoch=epoch,
                peer=origin,
            )

    @property
    def micro_batches(self) -> int:
        """Micro-batches of this epoch with a share that counts here."""
        return self._gradients.micro_batches

    def worked(self) -> list[ev.Neighbours]:
        """Neighbours of each micro-batch that counts here by the plan in force, in the order of
        their numbers."""
        neighbours = self.machine.neighbours
        return [
            ev.Neighbours(index, tokens, *neighbours[index])
            for index, tokens in sorted(self._counted.items())
            if index in neighbours
        ]

    async def take_gradients(self, epoch: int) -> tuple[Mapping[str, Tensor], int]:
        """Parameter gradient sums of this stage by name, and the tokens behind them; ({}, 0) for
        another epoch. They are read off the event loop.

        Closes the epoch: micro-batches still under way count nowhere any more, and
        :meth:`Origin.run` reports its own as not counted. May be called again until :meth:`reset`.
        Raises OutOfResources if there is no memory for the sums.
        """
        if self.machine.plan is None or self.machine.plan.epoch != epoch:
            return {}, 0
        self.handle(ev.Close(epoch))
        try:
            return await asyncio.to_thread(self._gradients.whole)
        except (RuntimeError, MemoryError) as e:
            if not out_of_memory(e):
                raise
            raise OutOfResources(
                f"no memory for the gradients of an epoch: {e}",
                "free memory of the device, or host another stage (--stage)",
            ) from e

    async def evaluate(
        self, hops: Sequence[Hop], tokens: Tensor, targets: Tensor
    ) -> tuple[float, int]:
        """(loss sum in nats, tokens) of one batch [B, T] through ``hops``, no gradients. Raises
        PeerFault, and ValueError for an impossible path or batch."""
        back = await self.forward_requests.go(pb.EVALUATE, tuple(hops), tokens, ends_of(targets))
        return await self.forward_requests.compute(partial(self.math.loss_only, back, targets))

    async def logits(self, hops: Sequence[Hop], tokens: Tensor) -> Tensor:
        """Logits [B, V] after the last of ``tokens`` [B, T], fp32 on the CPU. Raises as
        :meth:`evaluate`."""
        back = await self.forward_requests.go(pb.GENERATE, tuple(hops), tokens)
        return await self.forward_requests.compute(partial(self.math.logits_only, back))

    async def text_logits(
        self, hops: Sequence[Hop], text: int, past: int, tokens: Tensor
    ) -> tuple[Tensor, bool]:
        """(logits [V] after the last of ``tokens`` [n], the next ones of a text, fp32 on the CPU;
        True if every hop keeps the text).

        ``text``: a number drawn for it; ``past``: its tokens before, which all ``hops`` keep.
        Raises PeerFault where one of them has it no longer, and as :meth:`evaluate`.
        """
        return await self.forward_requests.continue_text(tuple(hops), text, past, tokens)

    async def close(self) -> None:
        """End everything under way. The device thread stays its owner's."""
        self.set_plan(None)
        self._stop_sweeping()
        self.forward_requests.close()
        await self.tasks.close()
        # The end of a task may have asked for another sweep, and a timer holds this object.
        self._stop_sweeping()

    def _stop_sweeping(self) -> None:
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None

    # Carrying out
    # ------------------------------------------------------------

    def _carry_out(self, action: ev.Action) -> None:
        match action:
            case ev.Compute(key, way, keep):
                self.tasks.spawn(self._compute(key, way, keep), "compute")
            case ev.Send():
                self.sender.send(action)
            case ev.Later(key, way, seconds):
                self.sender.later(key, way, seconds)
            case ev.Hold(key):
                # The hop that sent the gradient must not give this one up meanwhile.
                self.sender.later(key, Direction.BACKWARD, ROOM_WAIT * self.hop_s)
            case ev.Fetch():
                self.tasks.spawn(self.sender.fetch(action), "fetch")
            case ev.Commit(key):
                self._commit(key)
            case ev.Void(key):
                if (work := self.stash.get(key)) is not None:
                    work.share = None
                self.telemetry.emit(
                    "share-void",
                    "this peer's gradients of the micro-batch cannot count",
                    "debug" if self.machine.closed else "info",
                    index=key.index,
                )
            case ev.AcknowledgeVisit(key, way):
                self._resolve(key, way, True, "")
            case ev.Failed(key, way, reason):
                self._resolve(key, way, False, reason)
            case ev.TellOrigin(key, origin, reason):
                self.tasks.spawn(self.sender.tell_origin(key, origin, reason), "lost")
            case ev.TellCounted(index, peers):
                self.sender.tell_counted(index, peers)
            case ev.Skipped(key, stage):
                self.telemetry.emit(
                    "hop-skipped",
                    f"no replica of stage {stage} can be reached: the micro-batch leaves it out",
                    "warning",
                    index=key.index,
                    stage=stage,
                )
            case ev.FreeGraph(key):
                if (work := self.stash.get(key)) is not None:
                    work.free_graph()
                    self.stash.recharge(key, len(work.upstream or b""))
            case ev.FreeGradient(key):
                if (work := self.stash.get(key)) is not None:
                    work.upstream = None
                    self.stash.recharge(key, 0)
            case ev.Free(key):
                self._free(key)
            case ev.Finished(key):
                self.origin.finished(key)
            case ev.Dropped(index, reason):
                self.origin.dropped(index, reason)

    async def _compute(self, key: Key, way: Direction, keep: bool) -> None:
        work = self.stash.get(key)
        if work is None:
            return
        job, priority = self._job(key, way)

        def timed() -> float:
            if work.dead:
                return 0.0
            began = self.device.now()
            job(work)
            if not keep:
                work.share = None
            return self.device.now() - began

        try:
            seconds = await self.device.run(timed, priority)
        except COMPUTE_ERRORS as e:
            lost = isinstance(e, NotFinite)
            self.telemetry.emit(
                "output-not-finite" if lost else "compute-broken",
                f"{way.value} of a micro-batch failed: {e}",
                "error",
                index=key.index,
            )
            if self.stash.get(key) is work:
                self.handle(ev.Broken(key, way, str(e)[:200], lost))
            return
        self.telemetry.spent("compute", seconds)
        idle = self.device.idle_s
        self.telemetry.spent("wait", idle - self._idle_seen)
        self._idle_seen = idle
        self._say_slices()
        if self.stash.get(key) is not work:
            return  # freed meanwhile, perhaps before it began
        measured = self.timing.work[way]
        if self.at_origin(key) and key.position:
            measured = self.timing.loss
        measured.add(seconds, self.clock.now())
        if way is Direction.FORWARD and not (self.at_origin(key) and key.position):
            self.stash.recharge(key, self.cost(key.index))
        self.handle(ev.Computed(key, way))

    def _job(self, key: Key, way: Direction) -> tuple[Callable[[VisitBuffers], None], Priority]:
        if not self.at_origin(key):
            if way is Direction.FORWARD:
                return self.math.forward, Priority.FORWARD
            return self.math.backward, Priority.BACKWARD
        if way is Direction.BACKWARD:
            return self.math.embed_backward, Priority.BACKWARD
        if key.position == 0:
            return self.math.embed, Priority.FORWARD
        return self.math.loss, Priority.LOSS

    def _say_slices(self) -> None:
        if self.math.slice != self._sliced:
            self._sliced = self.math.slice
            self.telemetry.emit(
                "memory-short",
                f"out of memory: {self._sliced} sequences of a micro-batch are computed at once "
                "from now on, and its input alone is kept",
                "warning",
                slice=self._sliced,
            )

    def _commit(self, key: Key) -> None:
        work = self.stash.get(key)
        if work is None:
            return
        # At the origin the loss, which knows the tokens, is at the end of the journey.
        last = None if key.position else self.origin.at_last(key)
        ends = (work,) if last is None else (last, work)
        shares = [w.share for w in ends if w.share is not None]
        work.share = None
        self._counted[key.index] = ends[0].tokens
        self._gradients.offer(shares, ends[0].tokens)
        adding = self.device.enqueue(Priority.COMMIT, self._gradients.drain)
        asyncio.wrap_future(adding).add_done_callback(self._added)

    def _added(self, adding: asyncio.Future[None]) -> None:
        if not adding.cancelled() and (error := adding.exception()) is not None:
            self.telemetry.emit(
                "gradients-not-added",
                f"gradients could not be added, which is tried again: {error}",
                "error",
            )

    def _free(self, key: Key) -> None:
        work = self.stash.pop(key)
        if work is not None:
            work.dead = True
        for way in Direction:
            self.sender.cancel(key, way)
            self._resolve(key, way, False, "freed")

    def _resolve(self, key: Key, way: Direction, done: bool, reason: str) -> None:
        for waiter in self._waiters.pop((key, way), ()):
            if not waiter.done():
                waiter.set_result((done, reason))
