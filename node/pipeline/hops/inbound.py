"""The called side of the Pipeline service: parse, check, answer. Decisions are the machine's, work
is the service's."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from node.core.errors import WireError
from node.core.ids import PeerId
from node.pipeline.events import (
    Action,
    Answer,
    Arrived,
    Asked,
    Claim,
    Counted,
    Direction,
    Key,
    Lost,
    Say,
    TensorReceived,
)
from node.pipeline.frames import EndedEarly, FrameReader, Incoming, frames, parse_head
from node.pipeline.hops.base import PipelineBase
from node.pipeline.route import beside
from node.transport.port import EOF, printable
from protos import pipeline_pb2 as pb
from protos.pipeline_pb2_grpc import PipelineServicer

ROOM_WAIT = 0.25
"""Share of a hop's time that a patient frame may wait for room; the rest is for the tensor and the
work."""
AT_ONCE = 2
"""Streams of one tensor between two peers: a sender has one, and a former one may not have ended
here yet."""
ForwardOnly = Callable[[Direction, PeerId, Incoming, Any], Awaitable[None]]
"""Takes a frame that belongs to no micro-batch of a plan."""
TextLost = Callable[[PeerId, pb.LostNote], bool]
"""Takes a note of a hop that could not go on with a text; False where nobody waits for it."""


class Inbound(PipelineServicer):
    """Keeps nothing but the streams that are open."""

    def __init__(
        self,
        pipeline: PipelineBase,
        forward_only: ForwardOnly,
        text_lost: TextLost = lambda caller, note: False,
    ) -> None:
        self._pipeline = pipeline
        self._forward_only = forward_only
        self._text_lost = text_lost
        self._open: dict[Hashable, list[asyncio.Timeout]] = {}
        """Timeouts of the streams that carry a tensor, by tensor and peer, oldest first."""

    async def Forward(self, request_iterator: Any, context: Any) -> None:
        await self._receive(Direction.FORWARD, context)

    async def Backward(self, request_iterator: Any, context: Any) -> None:
        await self._receive(Direction.BACKWARD, context)

    async def _receive(self, way: Direction, context: Any) -> None:
        pipeline = self._pipeline
        caller = pipeline.transport.caller(context)
        try:
            async with asyncio.timeout(pipeline.deadlines.hop_s):
                first = await context.read()
            if first is EOF:
                return
            incoming = parse_head(first, pipeline.shape)
            if incoming.head.purpose == pb.TRAIN:
                await self._train(way, caller, incoming, context)
            else:
                await self._forward_only(way, caller, incoming, context)
        except WireError as e:
            if not isinstance(e, EndedEarly):
                pipeline.transport.fault(caller, str(e), 1.0)
            await say(context, pb.REFUSED, str(e))
        except TimeoutError:
            await say(context, pb.REFUSED, "the frame did not come in time")

    async def _train(
        self, way: Direction, caller: PeerId, incoming: Incoming, context: Any
    ) -> None:
        pipeline = self._pipeline
        claim = incoming.claim
        came = pipeline.clock.now()
        rest = list[Action]()
        answer, cost = await self._patient(way, caller, incoming)
        waited = pipeline.clock.now() - came
        if answer.say is Say.TAKE:
            shape = pipeline.planned.shape_of(claim.index)
            forward = way is Direction.FORWARD
            masked = pipeline.shape.masked and forward
            origin = claim.journey[0].peer
            loss_mask = pipeline.shape.loss_mask and forward
            if pipeline.planned.at_origin(claim.key):
                charge = 0
            elif claim.key in pipeline.machine.visits:  # a gradient alone, or what came twice
                charge = pipeline.shape.nbytes(shape[0], shape[1])
            else:
                charge = cost
            wire = pipeline.planned.wire_of(claim.index, _sender(way, claim), way)
            pipeline.stash.charge(charge, origin)
            try:
                async with self._newest((claim.key, way, caller)):
                    reader = await pipeline.intake.read(
                        caller,
                        incoming.head,
                        shape,
                        masked,
                        context.read,
                        loss_mask=loss_mask,
                        wire=wire,
                    )
            finally:
                pipeline.stash.charge(-charge, origin)
            answer, rest = self._look(way, caller, incoming, reader)
        match answer.say:
            case Say.TAKE | Say.AGAIN:
                outcome = pipeline.driver.outcome(claim.key, way)
                try:
                    # Sent before the work begins: the sender counts its share at ACCEPTED, and the
                    # end of this very work may be what closes the epoch.
                    await say(context, pb.ACCEPTED, waited_s=waited)
                finally:
                    pipeline.driver.carry_out(rest)
                done, reason = await outcome
                await say(context, pb.DONE if done else pb.REFUSED, reason)
            case other:
                verdict = {Say.SETTLED: pb.DONE, Say.BUSY: pb.BUSY}.get(other, pb.REFUSED)
                await say(context, verdict, answer.reason)

    @asynccontextmanager
    async def _newest(self, what: Hashable) -> AsyncIterator[None]:
        """Around the bytes of one tensor to or from one peer, within a hop's time; the oldest of
        more than ``AT_ONCE`` streams of the same ends. Raises TimeoutError."""
        async with asyncio.timeout(self._pipeline.deadlines.hop_s) as until:
            streams = self._open.setdefault(what, [])
            streams.append(until)
            if len(streams) > AT_ONCE and not streams[0].expired():
                streams[0].reschedule(0.0)
            try:
                yield
            finally:
                streams.remove(until)
                if not streams:
                    self._open.pop(what, None)

    def _look(
        self, way: Direction, caller: PeerId, incoming: Incoming, reader: FrameReader
    ) -> tuple[Answer, list[Action]]:
        """Put the tensor into the stash unless its numbers are unfit: the answer, and the actions
        to carry out after it was sent."""
        pipeline = self._pipeline
        claim = incoming.claim
        before = _sender(way, claim)
        if objection := pipeline.guard.objection(
            way, claim.journey[before].stage, caller, claim.index, reader
        ):
            return Answer(Say.REFUSED, objection), []
        return pipeline.keeper.hold(
            TensorReceived(way, claim, caller), reader, incoming.head.deadline_s
        )

    async def _patient(
        self, way: Direction, caller: PeerId, incoming: Incoming
    ) -> tuple[Answer, int]:
        """(the machine's answer to a head, bytes to reserve in the stash). For a bounded time a
        frame that is ahead of the plan waits for it, and a patient one for room."""
        pipeline = self._pipeline
        claim = incoming.claim
        answer = Answer(Say.AWAIT_PLAN)
        until = asyncio.get_running_loop().time() + ROOM_WAIT * pipeline.deadlines.hop_s
        try:
            async with asyncio.timeout(pipeline.plan_wait_s) as patience:
                while True:
                    changed = pipeline.changes.event
                    cost = pipeline.planned.cost(
                        claim.index, graph=not pipeline.planned.at_origin(claim.key)
                    )
                    room = pipeline.keeper.make_room(cost, claim.journey[0].peer)
                    answer = pipeline.driver.handle(Arrived(way, claim, caller, room))
                    if answer.say is Say.BUSY and incoming.head.patient:
                        patience.reschedule(until)
                    elif answer.say is not Say.AWAIT_PLAN:
                        return answer, cost
                    await changed.wait()
        except TimeoutError:
            plan = pipeline.machine.plan
            ahead = answer.say is Say.BUSY or plan is None or claim.epoch > plan.epoch
            return Answer(Say.BUSY if ahead else Say.REFUSED, answer.reason), 0

    async def Fetch(self, request: pb.FetchInput, context: Any) -> None:
        pipeline = self._pipeline
        caller = pipeline.transport.caller(context)
        asked = Asked(
            request.epoch,
            request.plan_hash,
            request.index,
            caller,
            request.position,
            tuple(request.skipped[: pipeline.shape.stages]),
        )
        answer = pipeline.driver.handle(asked)
        key = asked.key
        if answer.say is Say.SETTLED:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, answer.reason)
        late = given = False
        try:
            given = answer.say is Say.TAKE and await self._give(key, request, caller, context)
        except TimeoutError:
            late = True
        # Only now: the exception kept the sent tensor alive. The call ends when its peer has read
        # or is gone.
        if late:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "not read in time")
        elif not given:
            await context.abort(grpc.StatusCode.NOT_FOUND, answer.reason or "freed")

    async def _give(self, key: Key, request: pb.FetchInput, caller: PeerId, context: Any) -> bool:
        """Send the output of a visit. Returns False if it is not here any more. Raises TimeoutError
        if the peer does not read it within a hop's time."""
        pipeline = self._pipeline
        work = self._pipeline.stash.get(key)
        output = None if work is None else work.output  # may be freed while it is sent
        if work is None or output is None:
            return False
        claim = Claim(
            key.epoch,
            request.plan_hash,
            key.index,
            tuple(pipeline.machine.visits[key].journey),
            request.position,
        )
        messages = frames(
            claim,
            pb.TRAIN,
            1.0,
            work.shape,
            output,
            pipeline.shape,
            work.document_ends,
            untrained=work.untrained,
            wire=work.wires.get(Direction.FORWARD, ""),
        )
        async with self._newest((key, caller)):
            for frame in messages:
                await context.write(frame)
        pipeline.transport.count(caller, sent=len(output), plane="pipeline")
        return True

    async def Lost(self, request: pb.LostNote, context: Any) -> pb.LostReply:
        caller = self._pipeline.transport.caller(context)
        if request.purpose == pb.GENERATE:
            return pb.LostReply(accepted=self._text_lost(caller, request))
        note = Lost(
            request.epoch, request.plan_hash, request.index, caller, printable(request.reason)
        )
        return pb.LostReply(accepted=self._pipeline.driver.handle(note).say is Say.TAKE)

    async def Counted(self, request: pb.CountedNote, context: Any) -> pb.CountedReply:
        pipeline = self._pipeline
        caller = pipeline.transport.caller(context)
        plan = pipeline.machine.plan
        if len(request.indices) > len(plan.paths if plan else ()):
            return pb.CountedReply(accepted=False)
        answers = [
            pipeline.driver.handle(Counted(request.epoch, request.plan_hash, index, caller))
            for index in request.indices
        ]
        return pb.CountedReply(accepted=all(answer.say is Say.TAKE for answer in answers))


def _sender(way: Direction, claim: Claim) -> int:
    """Position of the hop that sent this tensor."""
    if way is Direction.FORWARD:
        return beside(claim.journey, claim.position, Direction.BACKWARD)
    return beside(claim.journey, claim.position, Direction.FORWARD)


async def say(context: Any, verdict: int, reason: str = "", waited_s: float = 0.0) -> None:
    """Send one receipt."""
    receipt = pb.Receipt(reason=reason, waited_s=waited_s)
    receipt.verdict = verdict  # pyright: ignore[reportAttributeAccessIssue] - an enum's int
    await context.write(receipt)
