"""The state that the parts of the pipeline service (sender, receiver, origin, forward requests)
share."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from node.core.clock import Clock
from node.core.ids import PeerId
from node.core.journey import Path
from node.core.tasks import Tasks
from node.pipeline.device import DeviceThread
from node.pipeline.events import Action, Answer, Direction, Event, Expired, Key, Say, TensorReceived
from node.pipeline.frames import FrameReader, FrameShape, read_chunks
from node.pipeline.guard import Guard
from node.pipeline.hops.ports import Telemetry
from node.pipeline.hops.stash import Stash
from node.pipeline.machine import PipelineMachine
from node.pipeline.rounding import SentRounding
from node.pipeline.route import wire_of
from node.pipeline.settings import STASH, TEXTS, PipelineLimits, PipelineSettings
from node.pipeline.texts import TextTable
from node.pipeline.timing import Timing
from node.pipeline.visit_buffers import StageMath, VisitBuffers
from node.transport.port import TransportPort
from protos import pipeline_pb2 as pb

Waiter = asyncio.Future[tuple[bool, str]]


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
        plan_wait_s: float,
        shape: FrameShape,
        machine: PipelineMachine,
        stage: int,
        math: StageMath,
    ) -> None:
        self.me = transport.peer_id
        self.transport = transport
        self.device = device
        self.settings = settings
        self.limits = limits
        self.telemetry = telemetry
        self.clock = clock
        self.plan_wait_s = plan_wait_s
        self.shape = shape
        self.machine = machine
        self.stage = stage
        self.math = math
        self.texts = TextTable(limits.text_bytes or TEXTS, math.text_bytes)
        """Texts with their keys and values kept here."""
        self.guard = Guard(transport, telemetry.emit, settings.watch)
        self.stash = Stash(limits.stash_bytes or STASH, self.look_again)
        self.tasks = Tasks("pipeline", self._on_error)
        self.timing = Timing()
        """Measured times of device work and of connections."""
        self.rounding = SentRounding()
        """Measured errors of the tensors that were sent, by peer."""
        self.changed = asyncio.Event()
        """Set, and a new one in its place, when there is another plan or more room."""
        self._handled = asyncio.Event()
        self._plan_until = 0.0
        self._stretch = 1.0
        self._sweeping: asyncio.TimerHandle | None = None
        self._waiters: dict[tuple[Key, Direction], list[Waiter]] = {}

    @abstractmethod
    def _carry_out(self, action: Action) -> None:
        """Do what the machine decided."""

    @property
    def hop_s(self) -> float:
        """Seconds that a hop has to answer DONE: the manifest's time, stretched as the plan
        stretches the epoch, plus the seconds by which this process runs late."""
        return self._stretch * self.settings.forward_timeout_s + self.transport.patience.slack(
            self.clock.now()
        )

    def handle(self, event: Event) -> Answer:
        """Give the machine an event, carry out its actions, and return its answer; where the event
        has none, a refusal."""
        actions = self.machine.handle(event, self.clock.now())
        self._handled.set()
        self.carry_out(action for action in actions if not isinstance(action, Answer))
        return next(
            (action for action in actions if isinstance(action, Answer)),
            Answer(Say.REFUSED, "no answer"),
        )

    def hold(
        self, event: TensorReceived, reader: FrameReader, deadline_s: float
    ) -> tuple[Answer, list[Action]]:
        """Put a whole tensor into the stash. Returns the answer, and the actions to carry out after
        the answer was sent."""
        answer, *rest = self.machine.handle(event, self.clock.now())
        if not isinstance(answer, Answer):
            answer = Answer(Say.REFUSED, "no answer")
        key = event.claim.key
        if answer.say is Say.TAKE:
            work = self.stash.get(key)
            if work is None:
                work = VisitBuffers(
                    self.clock.now() + min(deadline_s, self._longest(key.index)),
                    self.shape_of(key.index),
                    origin=event.claim.journey[0].peer,
                    wires=self.wires_of(key),
                )
                self.stash.put(key, work, self.cost(key.index, graph=not self.at_origin(key)))
                self._sweep_later()
            if event.way is Direction.BACKWARD:
                work.gradient = reader
                self.stash.recharge(key, work.nbytes + reader.nbytes)
            else:
                work.input = reader
                if self.at_origin(key):  # the loss needs the targets of where it began
                    start = self.stash.get(Key(key.epoch, key.index, 0))
                    work.targets = None if start is None else start.targets
        return answer, rest

    def carry_out(self, actions: Iterable[Action]) -> None:
        """Carry out the machine's decisions, except for answers, which :meth:`hold` leaves to its
        caller."""
        for action in actions:
            self._carry_out(action)

    def outcome(self, key: Key, way: Direction) -> Waiter:
        """A future of (DONE or not, reason) for the peer that sent this tensor."""
        waiter: Waiter = asyncio.get_running_loop().create_future()
        if self.machine.told(key, way):
            waiter.set_result((True, ""))
        elif key not in self.machine.visits:
            waiter.set_result((False, "freed"))
        else:
            self._waiters.setdefault((key, way), []).append(waiter)
        return waiter

    def shape_of(self, index: int) -> tuple[int, ...]:
        """(B, T, D) of a planned micro-batch."""
        path = self.machine.paths.get(index)
        return (len(path.samples) if path else 0, self.shape.length, self.shape.width)

    def cost(self, index: int, *, graph: bool = True) -> int:
        """Bytes one micro-batch keeps here: its input, its output, and its autograd graph once its
        size is known. Without ``graph``: for a micro-batch back at its origin, because its graph is
        counted where it began."""
        shape = self.shape_of(index)
        kept = self.math.graph_bytes.get(shape, 0) if graph else 0
        return self.shape.kept(shape[0], shape[1]) + kept

    def wire_of(self, index: int, position: int, way: Direction) -> str:
        """Number format in which the hop at ``position`` sends its tensor of ``way``: the same for
        its sender and its receiver, whoever has taken a hop's place."""
        path = self.machine.paths.get(index)
        plan = self.machine.plan
        if plan is None or path is None:
            return self.shape.wire
        return wire_of(plan, path, position, way) or self.shape.wire

    def wires_of(self, key: Key) -> dict[Direction, str]:
        """Number formats of the tensors that a visit sends."""
        return {way: self.wire_of(key.index, key.position, way) for way in Direction}

    def at_origin(self, key: Key) -> bool:
        path = self.machine.paths.get(key.index)
        return path is not None and path.origin == self.me

    def make_room(self, nbytes: int, origin: PeerId | None = None) -> bool:
        """Return True if the stash takes ``nbytes`` more of ``origin``; work past its deadline
        makes way."""
        if self.stash.room(nbytes, origin):
            return True
        for key in self.stash.expired(self.clock.now()):
            self.handle(Expired(key))
        return self.stash.room(nbytes, origin)

    def _longest(self, index: int) -> float:
        """Seconds for which a micro-batch may be of use here, whatever its sender says: the time
        that the plan gives its origin, and a hop's time more for differences between the clocks and
        for the note that names its share."""
        path = self.machine.paths.get(index)
        if path is None:
            return self.hop_s
        return self.hop_s + max(0.0, self.time_left(path))

    def _sweep_later(self) -> None:
        if self._sweeping is None and (first := self.stash.first_deadline()) is not None:
            wait_s = self.hop_s + max(0.0, first - self.clock.now())
            self._sweeping = asyncio.get_running_loop().call_later(wait_s, self._sweep)

    def _sweep(self) -> None:
        """Give up what nobody has asked for a hop's time after its deadline."""
        self._sweeping = None
        for key in self.stash.expired(self.clock.now() - self.hop_s):
            self.handle(Expired(key))
        self._sweep_later()

    async def read(
        self,
        caller: PeerId,
        head: pb.FrameHead,
        shape: tuple[int, ...],
        masked: bool,
        read: Callable[[], Any],
        *,
        loss_mask: bool = False,
        wire: str = "",
    ) -> FrameReader:
        """The content of a frame of ``caller``: a tensor of ``shape``, ``masked`` with the ends of
        documents in it, ``loss_mask`` with the number of tokens that are not trained on. ``read``
        gives the next message. ``wire``: the format that must come, the run's by default. Raises
        WireError."""
        locked = self.math.on_gpu
        reader = FrameReader(head, shape, wire or self.shape.wire, masked, loss_mask, locked=locked)
        await read_chunks(read, reader)
        if reader.blockwise:
            await asyncio.to_thread(reader.rms)
        self.transport.count(caller, received=reader.nbytes, plane="pipeline")
        return reader

    def look_again(self) -> None:
        """Wake the frames that wait for a plan or for room."""
        self.changed.set()
        self.changed = asyncio.Event()

    def time_left(self, path: Path) -> float:
        """Seconds a micro-batch that starts now may take."""
        return min(self.hop_s * (len(path.hops) + 1), self._plan_until - self.clock.now())

    def _on_error(self, name: str, error: BaseException) -> None:
        self.telemetry.emit("task-died", f"{name}: {error!r}", "error")
