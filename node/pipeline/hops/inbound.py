"""The called side of the Pipeline service: parses and checks a request, and hands it to the part
that answers."""

import asyncio
from typing import Any, Protocol

from node.core.errors import WireError
from node.core.ids import PeerId
from node.pipeline.events import Counted, Direction, Lost, Say
from node.pipeline.frames import EndedEarly, FrameShape, Incoming, parse_head
from node.pipeline.hops.arrivals import Arrivals
from node.pipeline.hops.deadlines import Deadlines
from node.pipeline.hops.driver import MachineDriver
from node.pipeline.hops.giver import Giver
from node.pipeline.hops.receipts import say
from node.transport.port import EOF, TransportPort, printable
from protos import pipeline_pb2 as pb
from protos.pipeline_pb2_grpc import PipelineServicer


class ForwardOnly(Protocol):
    """Receiver of frames that belong to no micro-batch of a plan."""

    async def receive(
        self, way: Direction, caller: PeerId, incoming: Incoming, context: Any
    ) -> None:
        """Handle a forward-only frame from ``caller``. Raises WireError for a malformed frame."""

    def lost(self, caller: PeerId, note: pb.LostNote) -> bool:
        """Handle a hop's note that a text cannot go on there. Returns False if nobody waits for the
        text."""
        ...


class Inbound(PipelineServicer):
    """The service that other peers call. It holds no state of a call."""

    def __init__(
        self,
        transport: TransportPort,
        driver: MachineDriver,
        deadlines: Deadlines,
        shape: FrameShape,
        arrivals: Arrivals,
        *,
        giver: Giver,
        forward_only: ForwardOnly,
    ) -> None:
        self._transport = transport
        self._driver = driver
        self._deadlines = deadlines
        self._shape = shape
        self._arrivals = arrivals
        self._giver = giver
        self._forward_only = forward_only

    async def Forward(self, request_iterator: Any, context: Any) -> None:
        await self._receive(Direction.FORWARD, context)

    async def Backward(self, request_iterator: Any, context: Any) -> None:
        await self._receive(Direction.BACKWARD, context)

    async def _receive(self, way: Direction, context: Any) -> None:
        caller = self._transport.caller(context)
        try:
            async with asyncio.timeout(self._deadlines.hop_s):
                first = await context.read()
            if first is EOF:
                return
            incoming = parse_head(first, self._shape)
            if incoming.head.purpose == pb.TRAIN:
                await self._arrivals.take(way, caller, incoming, context)
            else:
                await self._forward_only.receive(way, caller, incoming, context)
        except WireError as e:
            if not isinstance(e, EndedEarly):
                self._transport.fault(caller, str(e), 1.0)
            await say(context, pb.REFUSED, str(e))
        except TimeoutError:
            await say(context, pb.REFUSED, "the frame did not come in time")

    async def Fetch(self, request: pb.FetchInput, context: Any) -> None:
        await self._giver.give(self._transport.caller(context), request, context)

    async def Lost(self, request: pb.LostNote, context: Any) -> pb.LostReply:
        caller = self._transport.caller(context)
        if request.purpose == pb.GENERATE:
            return pb.LostReply(accepted=self._forward_only.lost(caller, request))
        note = Lost(
            request.epoch, request.plan_hash, request.index, caller, printable(request.reason)
        )
        return pb.LostReply(accepted=self._driver.handle(note).say is Say.TAKE)

    async def Counted(self, request: pb.CountedNote, context: Any) -> pb.CountedReply:
        caller = self._transport.caller(context)
        plan = self._driver.machine.plan
        if len(request.indices) > len(plan.paths if plan else ()):
            return pb.CountedReply(accepted=False)
        answers = [
            self._driver.handle(Counted(request.epoch, request.plan_hash, index, caller))
            for index in request.indices
        ]
        return pb.CountedReply(accepted=all(answer.say is Say.TAKE for answer in answers))
