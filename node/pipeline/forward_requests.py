"""Forward-only work: evaluation and generation. It uses the parameters of the moment, and keeps
nothing for backward."""

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any, TypeVar

from torch import Tensor

from node.core.errors import PeerFault, WireError
from node.core.ids import ENDS, PeerId
from node.core.journey import Hop
from node.model.text_cache import TextCache
from node.pipeline.batcher import Batcher
from node.pipeline.device import Priority
from node.pipeline.events import Claim, Direction, Trouble
from node.pipeline.frames import FrameReader, Incoming, frames, loose_shape
from node.pipeline.hops.base import PipelineBase
from node.pipeline.hops.calls import PeerCalls
from node.pipeline.hops.notes import Notes
from node.pipeline.hops.receipts import say
from node.pipeline.route import Delivery, Pause
from node.pipeline.texts import IDLE_S, TextKey
from node.pipeline.visit_buffers import COMPUTE_ERRORS, TextStep
from node.transport.port import printable
from node.wire.tensors import Buffer
from protos import pipeline_pb2 as pb

T = TypeVar("T")
SHARE = 0.5
"""Share of the stash for all forward-only work. Any peer may ask for it, but training comes first,
and then the evaluation that the leader waits for."""
GUESTS = 0.25
"""Share of the stash for the work of all peers outside the plan."""
GUEST = 0.125
"""Share of the stash for the work of one peer outside the plan."""
TOKENS_AT_ONCE = 256
"""Tokens of texts in one pass over several."""
TEXTS_AT_ONCE = 64
"""Most texts in one computation of logits."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Forward work of this peer that has yet to come home, of ``shape``, from a replica of the
    ``last`` hop. ``peers``: all its hops."""

    last: Hop
    peers: frozenset[PeerId]
    shape: tuple[int, ...]
    back: asyncio.Future[tuple[FrameReader, int]]


@dataclass(frozen=True, slots=True)
class _Turn:
    """A turn of a text that is kept here. ``priority``: on the device."""

    key: TextKey
    cache: TextCache
    past: int
    count: int
    priority: Priority


@asynccontextmanager
async def _within(seconds: float, hops: tuple[Hop, ...]) -> AsyncIterator[None]:
    """A time limit for the block; raises PeerFault of the last hop when it is over."""
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as e:
        raise PeerFault(hops[-1].peer, f"no result of the forward in {seconds:.0f} s") from e


class ForwardRequests:
    """Both sides of forward-only work. Work that is lost is an error for the peer that asked;
    nothing is resumed."""

    def __init__(self, pipeline: PipelineBase, calls: PeerCalls, notes: Notes) -> None:
        self._pipeline = pipeline
        self._calls = calls
        self._notes = notes
        self._numbers = count(1)
        self._held = self._guests = 0
        """Bytes of the stash that others' forward-only work has reserved, and the part of them that
        guests have."""
        self._of_guest: Counter[PeerId] = Counter()
        """Bytes reserved for guests, by the guest or member that brought the work."""
        self._bringing: set[tuple[int, int, PeerId]] = set()
        """Results that are being read: purpose, number and sender."""
        self._waiting: dict[tuple[int, int], _Waiting] = {}
        self._steps = Batcher[TextStep, memoryview](
            pipeline.device,
            pipeline.math.extend_texts,
            lambda step: step.count,
            TOKENS_AT_ONCE,
            self._texts_under_way,
        )
        self._heads = Batcher[FrameReader, Tensor](
            pipeline.device,
            pipeline.math.text_logits,
            lambda reader: 1,
            TEXTS_AT_ONCE,
            self._texts_under_way,
        )
        self._expiring: asyncio.TimerHandle | None = None

    async def go(
        self,
        purpose: int,
        hops: tuple[Hop, ...],
        tokens: Tensor,
        document_ends: Sequence[int] = (),
    ) -> FrameReader:
        """Send ``tokens`` [B, T] through ``hops``; returns hidden states [B, T, D], or [B, 1, D]
        for GENERATE. ``document_ends`` belong to the tokens, for EVALUATE alone.

        Raises ValueError for an impossible path or batch, PeerFault if the tokens cannot be
        embedded or no answer comes back in time.
        """
        pipeline = self._pipeline
        sequences, length = tokens.shape
        if not hops or not (
            1 <= sequences <= pipeline.shape.sequences and 1 <= length <= pipeline.shape.length
        ):
            raise ValueError(f"no forward work of {len(hops)} hops and {sequences}x{length} tokens")
        shape = (sequences, length, pipeline.shape.width)
        index = self._number(purpose)
        me = Hop(ENDS, pipeline.me)
        claim = Claim(0, "", index, (me, *hops, me), 1)
        home = (sequences, 1, shape[2]) if purpose == pb.GENERATE else shape
        timeout = pipeline.deadlines.hop_s * (len(hops) + 1)
        with self._awaiting(purpose, index, hops, home) as back:
            async with _within(timeout, hops):
                output = await self.compute(
                    partial(pipeline.math.embed_only, tokens, document_ends)
                )
                await self._pass_on(claim, purpose, timeout, shape, output, document_ends)
                return (await back)[0]

    async def continue_text(
        self, hops: tuple[Hop, ...], number: int, past: int, tokens: Tensor
    ) -> tuple[Tensor, bool]:
        """As :meth:`Pipeline.text_logits`."""
        pipeline = self._pipeline
        length = len(tokens)
        if not hops or not 1 <= length <= pipeline.shape.length:
            raise ValueError(f"no turn of {len(hops)} hops and {length} tokens")
        index = self._number(pb.GENERATE)
        me = Hop(ENDS, pipeline.me)
        claim = Claim(0, "", index, (me, *hops, me), 1)
        text = pb.TextTurn(text=number, past=past)
        key = TextKey(pipeline.me, number, pipeline.me)
        cache = self._take(key, past, length)
        if cache is None:
            raise PeerFault(pipeline.me, "there is no memory for the text")
        timeout = pipeline.deadlines.hop_s * (len(hops) + 1)
        try:
            with self._awaiting(pb.GENERATE, index, hops, (1, 1, pipeline.shape.width)) as back:
                async with _within(timeout, hops):
                    step = TextStep(cache, past, length, tokens=tokens)
                    output = await self._computed(self._steps.run(step, Priority.TOKEN))
                    shape = (1, length, pipeline.shape.width)
                    await self._pass_on(claim, pb.GENERATE, timeout, shape, output, (), text=text)
                    reader, kept = await back
                    logits = await self._computed(self._heads.run(reader, Priority.TOKEN))
        finally:
            pipeline.texts.done(key, cache, pipeline.clock.now())
        return logits, kept == len(hops)

    def lost(self, caller: PeerId, note: pb.LostNote) -> bool:
        """A hop of a text says that it cannot go on. Returns False if nobody waits for the text."""
        waiting = self._waiting.get((pb.GENERATE, note.index))
        if waiting is None or waiting.back.done() or caller not in waiting.peers:
            return False
        waiting.back.set_exception(PeerFault(caller, printable(note.reason)))
        return True

    def _number(self, purpose: int) -> int:
        """A number for forward work. Nobody can guess one for generation: a hop that loses a text
        names the number in its frame to the origin in its frame, and any peer can send a frame."""
        if purpose == pb.GENERATE:
            return secrets.randbits(63)
        return next(self._numbers)

    @contextmanager
    def _awaiting(
        self, purpose: int, index: int, hops: tuple[Hop, ...], shape: tuple[int, ...]
    ) -> Iterator[asyncio.Future[tuple[FrameReader, int]]]:
        """A future of (the result of forward work that comes home, the hops that keep its text)."""
        back: asyncio.Future[tuple[FrameReader, int]] = asyncio.get_running_loop().create_future()
        peers = frozenset(hop.peer for hop in hops)
        self._waiting[purpose, index] = _Waiting(hops[-1], peers, shape, back)
        try:
            yield back
        finally:
            del self._waiting[purpose, index]
            if not back.cancel() and not back.cancelled():
                back.exception()  # it may be the second one, which nobody looks at

    async def _computed(self, work: Awaitable[T]) -> T:
        """The result of ``work`` on the device. Raises PeerFault, of this peer, when it fails."""
        try:
            return await work
        except COMPUTE_ERRORS as e:
            raise PeerFault(self._pipeline.me, f"could not compute it: {e}") from e

    def _take(
        self, key: TextKey, past: int, count: int, *, guest: bool = False
    ) -> TextCache | None:
        pipeline = self._pipeline
        if not pipeline.math.caches_texts or past + count > pipeline.shape.context:
            return None
        if self._expiring is None:
            loop = asyncio.get_running_loop()
            self._expiring = loop.call_later(IDLE_S, self._expire)
        return pipeline.texts.take(key, past, count, pipeline.clock.now(), guest=guest)

    def _expire(self) -> None:
        """Forget idle texts, and look again later while there are others."""
        texts = self._pipeline.texts
        self._expiring = None
        texts.expire(self._pipeline.clock.now())
        if len(texts):
            self._expiring = asyncio.get_running_loop().call_later(IDLE_S, self._expire)

    def _texts_under_way(self, priority: Priority) -> int:
        guests = priority is not Priority.TOKEN
        return self._pipeline.texts.under_way(self._pipeline.clock.now(), guests=guests)

    async def compute(self, job: Callable[[], T]) -> T:
        """Run ``job`` on the device thread and return its result. Raises PeerFault, of this peer,
        when it fails."""
        return await self._computed(self._pipeline.device.run(job, Priority.FORWARD_ONLY))

    async def receive(
        self, way: Direction, caller: PeerId, incoming: Incoming, context: Any
    ) -> None:
        """Handle a forward-only frame from ``caller``. Raises WireError for a malformed frame."""
        claim = incoming.claim
        here = incoming.claim.position
        if (
            way is not Direction.FORWARD
            or here == 0
            or claim.journey[here].peer != self._pipeline.me
            or claim.journey[here - 1].peer != caller
        ):
            return await say(context, pb.REFUSED, "not from the hop before, or not for this peer")
        if here == len(claim.journey) - 1:
            return await self._come_home(caller, incoming, context)
        if claim.journey[here].stage != self._pipeline.stage:
            return await say(context, pb.REFUSED, f"this peer hosts stage {self._pipeline.stage}")
        await self._visit(caller, incoming, context)

    async def _come_home(self, caller: PeerId, incoming: Incoming, context: Any) -> None:
        waiting = self._waiting.get((incoming.head.purpose, incoming.claim.index))
        if waiting is None or waiting.back.done():
            return await say(context, pb.REFUSED, "nobody waits for this")
        last = waiting.last
        shape = waiting.shape
        back = waiting.back
        if caller != last.peer and caller not in self._pipeline.machine.replicas(last.stage):
            return await say(context, pb.REFUSED, "only a replica of the last stage may bring it")
        bringing = (incoming.head.purpose, incoming.claim.index, caller)
        if bringing in self._bringing:
            return await say(context, pb.BUSY, "this peer is bringing it already")
        self._bringing.add(bringing)
        try:
            reader = await self._read(incoming, shape, context)
        finally:
            self._bringing.discard(bringing)
        if not back.done():
            back.set_result((reader, incoming.head.text.kept))
        await say(context, pb.ACCEPTED)
        await say(context, pb.DONE)

    async def _visit(self, caller: PeerId, incoming: Incoming, context: Any) -> None:
        pipeline = self._pipeline
        shape = loose_shape(incoming, self._pipeline.shape)
        if incoming.head.HasField("text") and shape[0] != 1:
            raise WireError(f"a text of {shape[0]} sequences")
        cost = pipeline.shape.kept(shape[0], shape[1])
        limit = pipeline.stash.limit
        plan = pipeline.machine.plan
        members = {m.peer for m in plan.members} if plan is not None else set[PeerId]()
        # Each hop before this one has checked that the work came from the peer that the journey
        # names.
        guest = None if {caller, incoming.claim.journey[0].peer} <= members else caller
        if self._held + cost > max(cost, SHARE * limit) or (
            guest is not None
            and (
                self._guests + cost > max(cost, GUESTS * limit)
                or self._of_guest[guest] + cost > max(cost, GUEST * limit)
            )
        ):
            return await say(context, pb.BUSY, "forward-only work has its share of the stash")
        if not pipeline.keeper.make_room(cost):
            return await say(context, pb.BUSY, "my stash is full")
        self._charge(cost, guest)
        free = partial(self._charge, -cost, guest)
        turn = self._turn(caller, incoming, shape[1], guest=guest is not None)
        if turn is None and incoming.head.text.past:
            free()
            return await say(context, pb.REFUSED, "the text is no longer here")
        try:
            reader = await self._read(incoming, shape, context)
        except BaseException:
            free()
            if turn is not None:
                pipeline.texts.done(turn.key, turn.cache, pipeline.clock.now())
            raise
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # A task of its own: after ACCEPTED the frame is ours, also when the sender's stream ends.
        pipeline.tasks.spawn(self._work(incoming, reader, free, accepted, turn), "errand")
        await say(context, pb.ACCEPTED)
        try:
            await accepted
            await say(context, pb.DONE)
        except PeerFault as e:
            await say(context, pb.REFUSED, e.reason)

    def _turn(
        self, caller: PeerId, incoming: Incoming, length: int, *, guest: bool
    ) -> "_Turn | None":
        """The text, kept here, that a frame continues; None for other work, and for a text that is
        not kept."""
        head = incoming.head
        if not head.HasField("text"):
            return None
        key = TextKey(incoming.claim.journey[0].peer, head.text.text, caller)
        cache = self._take(key, head.text.past, length, guest=guest)
        # Tokens go before training, except the tokens of peers outside the plan.
        priority = Priority.FORWARD_ONLY if guest else Priority.TOKEN
        if cache is None:
            return None
        return _Turn(key, cache, head.text.past, length, priority)

    async def _extend(self, turn: "_Turn", reader: FrameReader, last_only: bool) -> memoryview:
        """Compute a turn, and end it: the next one may come before the output has been passed
        on."""
        texts = self._pipeline.texts
        clock = self._pipeline.clock
        step = TextStep(turn.cache, turn.past, turn.count, input=reader, last_only=last_only)
        try:
            return await self._steps.run(step, turn.priority)
        finally:
            texts.done(turn.key, turn.cache, clock.now())

    def _charge(self, cost: int, guest: PeerId | None) -> None:
        self._pipeline.stash.charge(cost)
        self._held += cost
        if guest is not None:
            self._guests += cost
            self._of_guest[guest] += cost
            if not self._of_guest[guest]:
                del self._of_guest[guest]

    async def _work(
        self,
        incoming: Incoming,
        reader: FrameReader,
        free: Callable[[], None],
        accepted: asyncio.Future[None],
        turn: "_Turn | None",
    ) -> None:
        pipeline = self._pipeline
        claim = incoming.claim
        purpose = incoming.head.purpose
        last_only = purpose == pb.GENERATE and claim.position == len(claim.journey) - 2
        onward = replace(claim, position=claim.position + 1)
        # The origin waits no longer than this, whatever deadline the sender states.
        most_s = pipeline.deadlines.hop_s * (len(claim.journey) - claim.position)
        within_s = min(incoming.head.deadline_s, most_s)
        try:
            async with asyncio.timeout(within_s):
                text = incoming.head.text if incoming.head.HasField("text") else None
                if turn is None:
                    output, shape = await pipeline.device.run(
                        partial(pipeline.math.forward_only, reader, last_only),
                        Priority.FORWARD_ONLY,
                    )
                else:
                    output = await self._extend(turn, reader, last_only)
                    shape = (1, 1 if last_only else turn.count, pipeline.shape.width)
                    incoming.head.text.kept += 1
                await self._pass_on(
                    onward,
                    purpose,
                    within_s,
                    shape,
                    output,
                    reader.document_ends,
                    accepted,
                    text=text,
                )
        except (PeerFault, TimeoutError, *COMPUTE_ERRORS) as e:
            pipeline.telemetry.emit(
                "errand-lost", f"forward-only work was lost: {e}", "warning", index=claim.index
            )
            if not accepted.done():
                accepted.set_exception(PeerFault(pipeline.me, str(e)))
                accepted.exception()  # the sender may be gone: then nobody else looks at it
            if incoming.head.HasField("text"):
                origin = claim.journey[0].peer
                await self._notes.tell_text_lost(origin, claim.index, str(e))
        finally:
            free()

    async def _read(self, incoming: Incoming, shape: tuple[int, ...], context: Any) -> FrameReader:
        pipeline = self._pipeline
        masked = pipeline.shape.masked and incoming.head.purpose == pb.EVALUATE
        caller = incoming.claim.journey[incoming.claim.position - 1].peer
        async with asyncio.timeout(pipeline.deadlines.hop_s):
            reader = await pipeline.intake.read(
                caller,
                incoming.head,
                shape,
                masked,
                context.read,
                wire=pipeline.shape.forward_only,
            )
        if not pipeline.guard.finite(reader):
            raise WireError("an activation that is not finite or absurdly large")
        return reader

    async def _pass_on(
        self,
        claim: Claim,
        purpose: int,
        deadline_s: float,
        shape: tuple[int, ...],
        buffer: Buffer,
        document_ends: Sequence[int],
        accepted: asyncio.Future[None] | None = None,
        *,
        text: pb.TextTurn | None = None,
    ) -> None:
        """Deliver to ``claim.position``, or to another replica of its stage, which has no ``text``
        however; ``accepted`` is done when one has it. Raises PeerFault when nobody takes it."""
        pipeline = self._pipeline
        delivery = Delivery(claim.index)
        target = claim.journey[claim.position]
        alone = target.stage == ENDS or text is not None
        replicas = ()
        if not alone:
            replicas = pipeline.machine.replicas(target.stage)
        until = pipeline.clock.now() + deadline_s
        while True:
            choice = delivery.choose(
                target.peer, replicas, pipeline.machine.suspects, pipeline.clock.now()
            )
            if choice is None:
                raise PeerFault(target.peer, f"no live replica of stage {target.stage}")
            if isinstance(choice, Pause):
                await asyncio.sleep(choice.seconds)
                continue
            journey = (
                *claim.journey[: claim.position],
                Hop(target.stage, choice),
                *claim.journey[claim.position + 1 :],
            )
            messages = frames(
                replace(claim, journey=journey),
                purpose,
                until - pipeline.clock.now(),
                shape,
                buffer,
                pipeline.shape,
                document_ends,
                text=text,
                wire=pipeline.shape.forward_only,
            )

            def held(seconds: float | None, peer: PeerId = choice) -> None:
                if len(buffer) == pipeline.shape.nbytes(
                    pipeline.shape.sequences, pipeline.shape.length
                ):
                    pipeline.timing.sent(peer, seconds, pipeline.clock.now())
                if accepted is not None and not accepted.done():
                    accepted.set_result(None)

            trouble, _ = await self._calls.stream(
                choice, Direction.FORWARD, messages, len(buffer), held
            )
            if trouble is None:
                return
            if trouble is Trouble.FAILED:
                pipeline.machine.suspects.add(choice, pipeline.clock.now())
            delivery.turned(choice, trouble)

    def close(self) -> None:
        """Nobody will answer any more."""
        for waiting in self._waiting.values():
            waiting.back.cancel()
        if self._expiring is not None:
            self._expiring.cancel()
