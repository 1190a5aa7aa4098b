"""The owner's side of an exchange: carries out the machine's decisions about the streams that
others open.

Contributions to a group are buffered whole, one per peer, summed only when the machine says so, and
gone before the optimizer begins. A stream is not read while its round is not open here, or its
group is not let in: HTTP/2 flow control holds its bytes at the sender. The round is read from its
first message, and the head when the machine says so.
"""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
import grpc.aio
import torch
from google.protobuf.message import DecodeError

from node.averaging.exchange import parcel
from node.averaging.exchange.events import (
    Began,
    Ended,
    EndStream,
    Event,
    Fail,
    Forgot,
    Group,
    Kind,
    Knocked,
    Opened,
    PeerFoundDead,
    Planned,
    Read,
    ReadHead,
    ReduceAndStep,
    Serve,
    Spoiled,
    Stepped,
    Uploaded,
    Voided,
    Wait,
    contribute_until,
)
from node.averaging.exchange.machine import RoundMachine
from node.averaging.exchange.member import SERVICE
from node.averaging.exchange.request import FreshPart, RoundRequest, Step
from node.averaging.reducers.quarantine import WEIGHT
from node.averaging.reducers.reducer import Gathered, Reduced, Reducer, beyond_format, unfit
from node.averaging.settings import AveragingSettings
from node.core.clock import Clock, SystemClock
from node.core.errors import LocalFault, PeerFault, WireError
from node.core.ids import PeerId, RoundId
from node.core.memory import let_go
from node.core.tasks import Tasks
from node.telemetry.events import Journal
from node.transport.port import TransportPort
from node.wire import bounds
from node.wire.coding.codecs import Coded, Numbers, Rounded, settled
from node.wire.coding.formats import FORMATS
from node.wire.tensors import expected_head
from protos import averaging_pb2

HEAD_TIMEOUT_S = 10.0
"""Seconds after which a stream is closed if its first message has not come."""

HEAD_LIMIT = 1 << 20
"""Bytes of the largest head of any stage. A head names parts of one group with their shapes; where
the shapes of the stage are known, no head is larger than one that names all parts."""

HEAD_SLACK = 1 << 10
"""Bytes of a head beside its tensors, generously."""

AHEAD_S = 5.0
"""Seconds for which a stream that is ahead of the plan here waits for it; the delay of this
process's own timers is added. Plans reach all members of a round at about the same time."""

CHUNK = 1 << 21
"""Tensor bytes of a message. Each costs gRPC's asyncio stack some turns of the event loop: with 1
MiB, and with 4 MiB, an exchange of 64 MiB took 2 to 5 % more processor time."""

DRAIN_TIMEOUT_S = 5.0
"""Seconds that a sender has to hang up after an answer that came before the end of its upload. We
do not hang up first: when a write fails in gRPC's asyncio stack, the client loses the messages
already sent to it."""


@dataclass(frozen=True, slots=True)
class Given:
    """A contribution: its numbers as they came (none of our own, which are the request's), and the
    2-norm of each part."""

    tokens: int
    named: Mapping[str, Coded]
    norms: Mapping[str, float]


@dataclass(slots=True)
class RoundAttempt:
    """One of our own rounds. ``settled`` resolves to "" when all our parts are fresh, or to the
    text of a fault.

    ``until``: its deadline; ``gathers``: by owner, the task that takes its fresh parts. ``given``:
    contributions by group and contributor, from their arrival to their step; ``begun``: groups that
    are being stepped or were, and take no more contributions. ``failed``: owners that gave nothing,
    and why; ``refused``: peers that sent unfit gradients, and why; ``impossible``: owners with
    parts that did not pass the request's check; ``nbytes``: tensor bytes sent and received.
    """

    request: RoundRequest
    step: Step | None
    groups: tuple[Group, ...]
    until: float
    settled: asyncio.Future[str]
    gathers: dict[PeerId, asyncio.Task[None]] = field(default_factory=dict)
    given: dict[tuple[int, PeerId], Given] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    failed: dict[PeerId, str] = field(default_factory=dict)
    refused: dict[PeerId, str] = field(default_factory=dict)
    impossible: set[PeerId] = field(default_factory=set)
    nbytes: int = 0

    @property
    def mine(self) -> frozenset[str]:
        """All parts we own in it."""
        return frozenset(name for group in self.groups for name in group.names)

    def settle(self, why: str) -> None:
        """Resolve ``settled``; only the first call has an effect."""
        if not self.settled.done():
            self.settled.set_result(why)

    def drop(self) -> None:
        """Free the contributions to groups that have not begun their step: no step of this attempt
        will begin any more."""
        # In place, and over a copy of the keys: a step takes its contributions out of it on a
        # thread of its own.
        for group, peer in list(self.given):
            if group not in self.begun:
                del self.given[group, peer]


@dataclass(slots=True)
class EpochState:
    """Results of an epoch so far. ``held``: fresh parts, our own and others'; ``lost``: peers that
    the leader has found dead in it."""

    attempts: dict[RoundId, RoundAttempt] = field(default_factory=dict)
    held: dict[str, FreshPart] = field(default_factory=dict)
    quarantined: dict[PeerId, str] = field(default_factory=dict)
    lost: set[PeerId] = field(default_factory=set)

    def settle(self, why: str) -> None:
        """Resolve every attempt that is not settled."""
        for attempt in self.attempts.values():
            attempt.settle(why)


@dataclass(slots=True)
class ExchangeStream:
    """One open stream, how it began, and what the machine has ordered for it."""

    began: Began
    head: bytes
    """The first message, until it is read."""
    heads: list = field(default_factory=list)
    orders: asyncio.Queue[Read | Wait | Serve | EndStream] = field(default_factory=asyncio.Queue)
    reader: parcel.ParcelReader | None = None
    """The bytes received so far of a contribution that is still wanted, else None."""


class ExchangeServer:
    """Serves ``exchange`` and is the keeper of every fresh part of the epochs that are not
    forgotten.

    Adds the Averaging service to ``transport.server``, so make it before the transport starts.
    ``executor`` runs the step (None: a thread of the loop's own); ``on_error`` is called with the
    error that a step raised. ``shapes``: shapes of the stage's parts, if they are known: no head is
    larger than one that names them all.
    """

    def __init__(
        self,
        transport: TransportPort,
        settings: AveragingSettings,
        *,
        executor: Executor | None = None,
        journal: Journal | None = None,
        clock: Clock | None = None,
        chunk: int = CHUNK,
        on_error: Callable[[str, BaseException], None] | None = None,
        machine: RoundMachine | None = None,
        shapes: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        self._heads = HeadBounds.of(shapes)
        self._transport = transport
        self._settings = settings
        self._journal = journal
        self._executor = executor
        self._chunk = chunk
        self._clock = clock or SystemClock()
        self._tasks = Tasks("averaging", on_error)
        self._machine = machine or RoundMachine()
        self._reducer = Reducer(settings)
        self._fell_back = False
        self._lines: dict[int, ExchangeStream] = {}
        self._numbers = itertools.count()
        self._epochs: dict[int, EpochState] = {}
        self._stepping = asyncio.Lock()
        # bytes: a message of a parcel is read by hand
        handler = grpc.stream_stream_rpc_method_handler(self.exchange)
        transport.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(SERVICE, {"Exchange": handler}),)
        )

    async def close(self) -> None:
        """End all tasks; a step in progress is left to its executor and its result dropped."""
        await self._tasks.close()

    # Our own rounds

    def open(
        self,
        request: RoundRequest,
        step: Step | None,
        norms: Mapping[str, float],
        started: float,
    ) -> RoundAttempt:
        """Begin an attempt. ``norms``: norms of our own gradients; if empty, our gradients are not
        used. Raises ValueError if the attempt is not newer."""
        me = self._transport.peer_id
        tokens = 0
        if norms:
            tokens = request.tokens
        groups = request.groups_of(me, self._settings.group_bytes)
        epoch = self._epochs.setdefault(request.round.epoch, EpochState())
        until = started + request.deadline_s
        ended = asyncio.get_running_loop().create_future()
        attempt = RoundAttempt(request, step, groups, until, ended)
        if epoch.attempts and request.round <= max(epoch.attempts):
            raise ValueError(f"{request.round} is not newer than {max(epoch.attempts)}")
        for older in epoch.attempts.values():
            older.drop()
        epoch.attempts[request.round] = attempt
        if tokens:
            own = Given(tokens, {}, norms)
            attempt.given |= {(group.index, me): own for group in groups}
        opened = Opened(
            round=request.round,
            me=me,
            plan_hash=request.plan_hash,
            ownership_hash=request.ownership_hash,
            members=frozenset(request.members),
            listeners=frozenset(request.listeners),
            groups=groups,
            held=attempt.mine & epoch.held.keys(),
            tokens=tokens,
            contribute_by=contribute_until(started, request.deadline_s, len(groups)),
            token_limit=request.caps.most,
            may_hold=request.hold is not None,
        )
        try:
            self._feed(opened)
        except ValueError:  # the epoch is over: keep nothing for it
            del self._epochs[request.round.epoch]
            raise
        self._settle(request.round.epoch)
        return attempt

    def planned(self, epoch: int, plan_hash: str, members: Collection[PeerId]) -> None:
        """A plan is in force: exchanges of its members may come before our own round."""
        self._feed(Planned(epoch, plan_hash, frozenset(members)))

    def gone(self, peer: PeerId) -> None:
        """This peer is dead: no round in progress waits for its contribution until the
        deadline."""
        self._feed(PeerFoundDead(peer))

    def forget(self, epoch: int) -> None:
        """Drop gradients and fresh parts of epochs up to ``epoch``; later requests for them are
        refused."""
        self._feed(Forgot(epoch))
        self._drop([n for n in self._epochs if n <= epoch], "the epoch is over")

    def _drop(self, epochs: list[int], why: str) -> None:
        for number in epochs:
            held = [self._epochs.pop(number)]
            held[0].settle(why)
            let_go(held)

    def void(self, epoch: int) -> None:
        """Drop gradients and fresh parts of ``epoch`` and later ones, which may be opened again:
        the swarm went back."""
        self._feed(Voided(epoch))
        self._reducer.void(epoch)
        self._drop([n for n in self._epochs if n >= epoch], "the swarm went back")

    # Others' streams

    async def exchange(
        self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
    ) -> None:
        """The handler of the call: serialised messages in, serialised messages out."""
        try:
            peer = self._transport.caller(context)
        except PeerFault as e:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(e))
            return
        first = await _first(requests)
        label = self._heads.label(first)
        if label is None:
            if first:
                self._transport.fault(peer, "its first message is no head of this stage", 1.0)
            await context.write(_refusal(Kind.HEADS, "the first message is the head"))
        else:
            await self._attend(peer, first, label, requests, context)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DRAIN_TIMEOUT_S):
                async for _ in requests:
                    pass

    async def _attend(
        self,
        peer: PeerId,
        first: bytes,
        label: averaging_pb2.Label,
        requests: AsyncIterator[bytes],
        context: grpc.aio.ServicerContext,
    ) -> None:
        number = next(self._numbers)
        round_id = RoundId(label.epoch, label.term, label.attempt)
        knocked = Knocked(number, peer, round_id, label.plan_hash)
        line = self._lines[number] = ExchangeStream(knocked.unread(), first)
        try:
            self._feed(knocked)
            await self._converse(line, requests, context)
            return
        except TimeoutError:
            pass
        finally:
            del self._lines[number]
            self._feed(Ended(number))
        # Everything that the stream held is free now: it may be late because nobody reads its
        # answer.
        await context.write(_refusal(Kind.LATE, "the round did not get that far in time"))

    def _read_head(self, line: ExchangeStream) -> None:
        """Read the head of a stream, and tell the machine."""
        began = line.began
        raw = line.head
        line.head = b""
        try:
            head = bounds.parse(averaging_pb2.Contribution, raw).head
        except WireError:
            self._feed(Spoiled(began.stream, Kind.HEADS, "its head does not parse"))
            return
        line.heads = list(head.tensors)
        line.began = Began(
            began.stream,
            began.peer,
            began.round,
            head.plan_hash,
            head.ownership_hash,
            head.group,
            head.group_digest,
            head.tokens,
            tuple(h.name for h in head.tensors),
        )
        self._feed(line.began)

    async def _converse(
        self,
        line: ExchangeStream,
        requests: AsyncIterator[bytes],
        context: grpc.aio.ServicerContext,
    ) -> None:
        """Do what the machine orders until the stream is answered. Raises TimeoutError when no
        order, or no byte, comes in time."""
        loop = asyncio.get_running_loop()
        longest = self._settings.round_timeout_s
        ahead_s = AHEAD_S + self._transport.patience.slack(self._clock.now())
        async with asyncio.timeout(min(ahead_s, longest)) as patience:
            while True:
                order = await line.orders.get()
                attempt = self._attempt(line.began.round)
                allowed_s = longest
                if attempt:
                    allowed_s = attempt.request.deadline_s
                patience.reschedule(loop.time() + allowed_s)
                match order:
                    case Read():
                        if not await self._receive(line, requests):
                            await context.write(_refusal(Kind.HEADS, "the stream ended early"))
                            return None
                    case Wait():
                        pass
                    case Serve(_, names):
                        return await self._answer(line, names, context)
                    case EndStream(_, kind, text, weight):
                        if weight:
                            self._transport.fault(
                                line.began.peer,
                                f"contribution refused, {kind.value}: {text}",
                                weight,
                            )
                        await context.write(_refusal(kind, text))
                        return None

    async def _receive(self, line: ExchangeStream, requests: AsyncIterator[bytes]) -> bool:
        """Read the tensors; give up quietly when the machine has a newer order for the stream.
        False: the stream ended before its bytes were here, which is nobody's fault, because a lost
        connection and a call that its member has cancelled look like that too."""
        began = line.began
        attempt = self._attempt(line.began.round)
        if attempt is None:
            return True
        expected = [(h.name, attempt.request.shapes[h.name]) for h in line.heads]
        try:
            reader = line.reader = parcel.ParcelReader(line.heads, expected, attempt.request.up)
            while reader.remaining:
                # nobody else holds the reader while we wait, so that a newer order frees its bytes
                reader = None
                message = await anext(requests, None)
                reader = line.reader
                if reader is None:
                    return True
                if message is None:
                    return False
                reader.feed(parcel.payload(message))
            line.reader = None
            self._transport.count(began.peer, received=reader.nbytes, plane="averaging")
            given, fault = await asyncio.to_thread(
                self._fit, attempt.request, expected, reader.raw(), began.tokens
            )
        except WireError as e:
            self._feed(Spoiled(began.stream, Kind.HEADS, str(e)))
            return True
        if fault:
            attempt.refused[began.peer] = fault
            self._feed(Spoiled(began.stream, Kind.VALUES, fault))
            return True
        # nothing newer was decided while the values were looked at
        if line.orders.empty() and began.group not in attempt.begun:
            attempt.given[began.group, began.peer] = given
            self._feed(Uploaded(began.stream))
        return True

    def _fit(
        self,
        request: RoundRequest,
        expected: Sequence[tuple[str, Sequence[int]]],
        parts: Sequence[torch.Tensor],
        tokens: int,
    ) -> tuple[Given, str]:
        """A contribution, and why it must not be averaged or "". Raises WireError for bytes that
        are no numbers."""
        named = {
            n: Coded(data, shape, request.up)
            for (n, shape), data in zip(expected, parts, strict=True)
        }
        norms = {n: coded.norm() for n, coded in named.items()}
        return Given(tokens, named, norms), unfit(norms, tokens, self._settings.max_gradient_norm)

    async def _answer(
        self,
        line: ExchangeStream,
        names: tuple[str, ...],
        context: grpc.aio.ServicerContext,
    ) -> None:
        epoch = line.began.round.epoch
        parts = self._epoch(epoch).held
        if not parts:  # forgotten since the machine gave the order
            await context.write(_refusal(Kind.FORGOTTEN, f"epoch {epoch} is over"))
            return
        held = [parts[name] for name in names]
        runs = itertools.groupby(held, key=lambda h: (h.tokens, h.contributors))
        head = averaging_pb2.FreshHead(
            tensors=[
                expected_head(name, h.tensor.shape, h.codec)
                for name, h in zip(names, held, strict=True)
            ],
            made=[
                averaging_pb2.Made(tensors=len(list(run)), tokens=t, contributors=by)
                for (t, by), run in runs
            ],
        )
        await context.write(averaging_pb2.Fresh(head=head).SerializeToString())
        for message in parcel.messages((h.data for h in held), self._chunk):
            await context.write(message)
        self._transport.count(
            line.began.peer, sent=sum(h.data.numel() for h in held), plane="averaging"
        )

    # The machine's hands

    def _feed(self, event: Event) -> None:
        for action in self._machine.handle(event, self._clock.now()):
            match action:
                case ReadHead():
                    if (line := self._lines.get(action.stream)) is not None:
                        self._read_head(line)
                case Read() | Wait() | Serve() | EndStream():
                    if (line := self._lines.get(action.stream)) is not None:
                        line.orders.put_nowait(action)
                        # its bytes are of no use any more: free them now, for the sender may never
                        # send another message
                        line.reader = None
                case ReduceAndStep():
                    if (attempt := self._attempt(action.round)) is not None:
                        attempt.begun.add(action.group)
                    self._tasks.spawn(
                        self._step(action),
                        f"step {action.round.epoch}.{action.round.attempt}.{action.group}",
                    )
                case Fail(number, text):
                    self._settle(number, text)

    async def _step(self, action: ReduceAndStep) -> None:
        """Reduce, step, keep. A failure reaches the machine before it reaches the parent task."""
        number = action.round.epoch
        names = frozenset(action.names)
        fault = "the step was interrupted"
        try:
            if (waiting := self._attempt(action.round)) and waiting.request.ready is not None:
                await waiting.request.ready(action.names)
            async with self._stepping:
                reduced, fresh = await asyncio.get_running_loop().run_in_executor(
                    self._executor, self._reduce_and_step, action
                )
                if fresh and self._attempt(action.round) is not None:
                    epoch = self._epochs[number]
                    epoch.held.update(fresh)
                    if reduced is not None:
                        self._learn(epoch, reduced)
            fault = ""
        except LocalFault as e:
            # Another peer may be able to step these parts: the leader repairs the round, and the
            # daemon goes on.
            fault = f"the owner's step failed: {e}"
            self._say("step-failed", f"epoch {number}: {e} {e.next_step}", level="error")
        except Exception as e:
            fault = f"the owner's step failed: {type(e).__name__}"
            raise
        finally:
            # The epoch may have begun anew meanwhile: results of an attempt before that are
            # dropped.
            if self._attempt(action.round) is not None:
                self._feed(Stepped(number, names, fault))
                self._settle(number)

    def _learn(self, epoch: EpochState, reduced: Reduced) -> None:
        """Remember the norms of a reduction, and count a fault of every peer that it quarantined,
        once an epoch and never of ourselves."""
        self._reducer.remember(reduced)
        for peer, why in reduced.quarantined.items():
            if peer not in epoch.quarantined and peer != self._transport.peer_id:
                self._transport.fault(peer, f"contribution quarantined: {why}", WEIGHT)
        epoch.quarantined = reduced.quarantined | epoch.quarantined
        if reduced.fell_back and not self._fell_back:
            self._fell_back = True
            self._say(
                "reducer-fell-back",
                f"{self._settings.reducer} needs three contributors, there are "
                f"{len(reduced.contributors)}: it is their mean until there are more",
                level="warning",
            )

    def _reduce_and_step(
        self, action: ReduceAndStep
    ) -> tuple[Reduced | None, dict[str, FreshPart]]:
        attempt = self._attempt(action.round)
        me = self._transport.peer_id
        if attempt is None:
            return None, {}
        request = attempt.request
        names = action.names
        down = attempt.request.down
        reduced: Reduced | None = None
        if not action.contributors and request.hold is not None:
            kept = request.hold(names)
            fresh: dict[str, Numbers] = {name: Coded.of(kept[name]) for name in names}
        else:
            reduced = self._reduced(attempt, action)
            fresh = dict(zip(names, reduced.numbers, strict=True))
            if attempt.step is not None:
                means = {name: each.whole() for name, each in fresh.items()}
                # Contributions are freed before the optimizer begins.
                del fresh
                reduced = replace(reduced, numbers=())
                stepped = attempt.step(means)
                fresh = {name: Coded.of(stepped[name]) for name in names}
        made = {name: settled(name, fresh[name], down) for name in names}
        tokens = 0
        by: tuple[PeerId, ...] = ()
        if reduced is not None:
            tokens = reduced.tokens
            by = reduced.contributors
        return reduced and replace(reduced, numbers=()), {
            name: FreshPart(tensor, me, tokens, by, down, data)
            for name, (tensor, data) in made.items()
        }

    def _reduced(self, attempt: RoundAttempt, action: ReduceAndStep) -> Reduced:
        request = attempt.request
        me = self._transport.peer_id
        given = {peer: attempt.given.pop((action.group, peer)) for peer in action.contributors}
        # Our own norms are those before rounding, near enough to find contributions that are far
        # too large, unless the format leaves most numbers out.
        near = request.up == "fp32" or (
            self._settings.reducer == "mean" and not FORMATS[request.up].biased
        )
        known = [peer for peer in given if peer != me or near]
        parts: dict[PeerId, list[Numbers]] = {}
        for peer, g in given.items():
            if peer == me:
                parts[peer] = _travelled(request, {n: g.norms[n] for n in action.names})
            else:
                parts[peer] = [g.named[n] for n in action.names]
        return self._reducer.reduce(
            Gathered(
                action.round.epoch,
                action.names,
                {peer: g.tokens for peer, g in given.items()},
                parts,
                request.caps.allowed,
                request.caps.total,
                {peer: [given[peer].norms[n] for n in action.names] for peer in known},
            )
        )

    def _attempt(self, round_id: RoundId) -> RoundAttempt | None:
        return self._epoch(round_id.epoch).attempts.get(round_id)

    def _epoch(self, number: int) -> EpochState:
        """State of an epoch; an empty one if it is over or has not begun."""
        return self._epochs.get(number, EpochState())

    def _settle(self, number: int, fault: str = "") -> None:
        """Settle the rounds of an epoch that have all their own parts, or will not get them."""
        epoch = self._epoch(number)
        for attempt in epoch.attempts.values():
            if fault:
                attempt.drop()
            if attempt.mine <= epoch.held.keys():
                attempt.settle("")
            elif fault:
                attempt.settle(fault)

    def _say(self, kind: str, text: str, level: str = "info", **fields: Any) -> None:
        if self._journal is not None:
            self._journal.emit("averaging", kind, text, level, **fields)


def _travelled(request: RoundRequest, norms: Mapping[str, float]) -> list[Numbers]:
    """Our own gradients with these norms, with the rounding of the wire, so that a sum does not
    depend on which peer owns the part. Sums that the format cannot hold stay as they are: nobody
    else gives any."""
    up = request.up
    parts: list[Numbers] = []
    for name, norm in norms.items():
        gradient = (request.gradients or {})[name]
        if up == "fp32" or beyond_format({name: gradient}, {name: norm}, up):
            parts.append(Coded.of(gradient))
        else:
            parts.append(Rounded(gradient, up))
    return parts


async def _first(requests: AsyncIterator[bytes]) -> bytes:
    """The first message of a stream; empty when none comes in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(HEAD_TIMEOUT_S):
            return await anext(requests, b"")
    return b""


@dataclass(frozen=True, slots=True)
class HeadBounds:
    """The most that a head of this stage can have: ``nbytes`` in all, ``tensors`` that it names."""

    nbytes: int = HEAD_LIMIT
    tensors: int = HEAD_LIMIT

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]] | None) -> "HeadBounds":
        """The bounds for a stage of these parts; None: the bounds for any stage."""
        if shapes is None:
            return cls()
        tensors = [expected_head(name, shape, "fp32") for name, shape in shapes.items()]
        named = averaging_pb2.ContributionHead(tensors=tensors).ByteSize()
        # In another format a part may announce some more bytes, which takes a digit or two.
        return cls(min(HEAD_LIMIT, named + 2 * len(tensors) + HEAD_SLACK), len(tensors))

    def label(self, first: bytes) -> averaging_pb2.Label | None:
        """The round that a first message names. None for a message that is no head, or beyond these
        bounds."""
        if len(first) > self.nbytes:
            return None
        try:
            message = averaging_pb2.LabelledContribution.FromString(first)
        except DecodeError:
            return None
        if message.WhichOneof("part") != "head" or len(message.head.tensors) > self.tensors:
            return None
        return message.head


def _refusal(kind: Kind, text: str) -> bytes:
    return averaging_pb2.Fresh(
        refusal=averaging_pb2.Refusal(kind=kind.name, text=text)
    ).SerializeToString()
