"""Forward-only work: evaluation and generation. It meets the parameters of the moment, and nothing
is kept for backward."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from typing import Any, TypeVar

from torch import Tensor

from node.core.errors import PeerFault, WireError
from node.core.ids import ENDS, PeerId
from node.core.journey import Hop
from node.pipeline.device import Priority
from node.pipeline.events import Claim, Direction, Trouble
from node.pipeline.frames import FrameReader, Incoming, frames, loose_shape
from node.pipeline.hops.base import PipelineBase
from node.pipeline.hops.inbound import say
from node.pipeline.hops.sender import Sender
from node.pipeline.route import Delivery, Pause
from node.pipeline.visit_buffers import COMPUTE_ERRORS
from node.wire.tensors import Buffer
from protos import pipeline_pb2 as pb

T = TypeVar("T")
SHARE, GUESTS, GUEST = 0.5, 0.25, 0.125
"""Shares of the stash for all forward-only work, for that of peers outside the plan, and for that
which one such peer brings: any peer may ask, but training comes first, and then the evaluation that
the leader waits for."""


class ForwardRequests:
    """Both sides of forward-only work. Work that is lost is an error for the peer that asked;
    nothing is resumed."""

    def __init__(self, pipeline: PipelineBase, sender: Sender) -> None:
        self._pipeline, self._sender = pipeline, sender
        self._numbers = count(1)
        self._held = self._guests = 0
        """Bytes of the stash that others' forward-only work has reserved, and those of guests."""
        self._of_guest: Counter[PeerId] = Counter()
        """Of these, the bytes that each guest or member brought for guests."""
        self._bringing: set[tuple[int, int, PeerId]] = set()
        """Results that are being read: purpose, number and sender."""
        self._waiting: dict[
            tuple[int, int], tuple[Hop, tuple[int, ...], asyncio.Future[FrameReader]]
        ] = {}

    async def go(
        self,
        purpose: int,
        hops: tuple[Hop, ...],
        tokens: Tensor,
        document_ends: Sequence[int] = (),
    ) -> FrameReader:
        """Send ``tokens`` [B, T] through ``hops``; returns hidden states [B, T, D], or [B, 1, D]
        for GENERATE. ``document_ends`` are those of the tokens, for EVALUATE alone.

        Raises ValueError for an impossible path or batch, PeerFault when the tokens cannot be
        embedded or no answer comes back in time.
        """
        pipeline, (sequences, length) = self._pipeline, tokens.shape
        if not hops or not (
            1 <= sequences <= pipeline.shape.sequences and 1 <= length <= pipeline.shape.length
        ):
            raise ValueError(f"no forward work of {len(hops)} hops and {sequences}x{length} tokens")
        shape = (sequences, length, pipeline.shape.width)
        index, me = next(self._numbers), Hop(ENDS, pipeline.me)
        claim = Claim(0, "", index, (me, *hops, me), 1)
        back: asyncio.Future[FrameReader] = asyncio.get_running_loop().create_future()
        self._waiting[purpose, index] = (
            hops[-1],
            ((sequences, 1, shape[2]) if purpose == pb.GENERATE else shape),
            back,
        )
        timeout = pipeline.hop_s * (len(hops) + 1)
        try:
            async with asyncio.timeout(timeout):
                output = await self.compute(
                    partial(pipeline.math.embed_only, tokens, document_ends)
                )
                await self._pass_on(claim, purpose, timeout, shape, output, document_ends)
                return await back
        except TimeoutError as e:
            raise PeerFault(hops[-1].peer, f"no result of the forward in {timeout:.0f} s") from e
        finally:
            del self._waiting[purpose, index]

    async def compute(self, job: Callable[[], T]) -> T:
        """Run ``job`` on the device thread and return its result. Raises PeerFault, of this peer,
        when it fails."""
        try:
            return await self._pipeline.device.run(job, Priority.FORWARD_ONLY)
        except COMPUTE_ERRORS as e:
            raise PeerFault(self._pipeline.me, f"could not compute it: {e}") from e

    async def receive(
        self, way: Direction, caller: PeerId, incoming: Incoming, context: Any
    ) -> None:
        """A forward-only frame from ``caller``. Raises WireError for one that is malformed."""
        claim, here = incoming.claim, incoming.claim.position
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
        if waiting is None or waiting[2].done():
            return await say(context, pb.REFUSED, "nobody waits for this")
        last, shape, back = waiting
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
            back.set_result(reader)
        await say(context, pb.ACCEPTED)
        await say(context, pb.DONE)

    async def _visit(self, caller: PeerId, incoming: Incoming, context: Any) -> None:
        pipeline, shape = self._pipeline, loose_shape(incoming, self._pipeline.shape)
        cost, limit = 2 * pipeline.shape.nbytes(shape[0], shape[1]), pipeline.stash.limit
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
        if not pipeline.make_room(cost):
            return await say(context, pb.BUSY, "my stash is full")
        self._charge(cost, guest)
        free = partial(self._charge, -cost, guest)
        try:
            reader = await self._read(incoming, shape, context)
        except BaseException:
            free()
            raise
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # A task of its own: after ACCEPTED the frame is ours, also when the sender's stream ends.
        pipeline.tasks.spawn(self._work(incoming, reader, free, accepted), "errand")
        await say(context, pb.ACCEPTED)
        try:
            await accepted
            await say(context, pb.DONE)
        except PeerFault as e:
            await say(context, pb.REFUSED, e.reason)

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
    ) -> None:
        pipeline, claim = self._pipeline, incoming.claim
        purpose = incoming.head.purpose
        last_only = purpose == pb.GENERATE and claim.position == len(claim.journey) - 2
        onward = replace(claim, position=claim.position + 1)
        # The origin waits no longer than this, whatever deadline the sender states.
        most_s = pipeline.hop_s * (len(claim.journey) - claim.position)
        within_s = min(incoming.head.deadline_s, most_s)
        try:
            async with asyncio.timeout(within_s):
                output, shape = await pipeline.device.run(
                    partial(pipeline.math.forward_only, reader, last_only), Priority.FORWARD_ONLY
                )
                await self._pass_on(
                    onward, purpose, within_s, shape, output, reader.document_ends, accepted
                )
        except (PeerFault, TimeoutError, *COMPUTE_ERRORS) as e:
            pipeline.telemetry.emit(
                "errand-lost", f"forward-only work was lost: {e}", "warning", index=claim.index
            )
            if not accepted.done():
                accepted.set_exception(PeerFault(pipeline.me, str(e)))
                accepted.exception()  # the sender may be gone: then nobody else looks at it
        finally:
            free()

    async def _read(self, incoming: Incoming, shape: tuple[int, ...], context: Any) -> FrameReader:
        pipeline = self._pipeline
        masked = pipeline.shape.masked and incoming.head.purpose == pb.EVALUATE
        caller = incoming.claim.journey[incoming.claim.position - 1].peer
        async with asyncio.timeout(pipeline.hop_s):
            reader = await pipeline.read(caller, incoming.head, shape, masked, context.read)
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
    ) -> None:
        """Deliver to ``claim.position``, or to another replica of its stage; ``accepted`` is done
        when one has it. Raises PeerFault when nobody takes it."""
        pipeline, delivery, target = (
            self._pipeline,
            Delivery(claim.index),
            claim.journey[claim.position],
        )
        replicas = () if target.stage == ENDS else pipeline.machine.replicas(target.stage)
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
            )

            def held(seconds: float | None, peer: PeerId = choice) -> None:
                if len(buffer) == pipeline.shape.nbytes(
                    pipeline.shape.sequences, pipeline.shape.length
                ):
                    pipeline.timing.sent(peer, seconds, pipeline.clock.now())
                if accepted is not None and not accepted.done():
                    accepted.set_result(None)

            trouble, _ = await self._sender.stream(
                choice, Direction.FORWARD, messages, len(buffer), held
            )
            if trouble is None:
                return
            if trouble is Trouble.FAILED:
                pipeline.machine.suspects.add(choice, pipeline.clock.now())
            delivery.turned(choice, trouble)

    def close(self) -> None:
        """Nobody will answer any more."""
        for _, _, back in self._waiting.values():
            back.cancel()
