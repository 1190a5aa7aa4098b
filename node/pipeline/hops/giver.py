"""Answer to a fetch: sends the output of a visit to a peer that replaces a dead replica."""

from functools import partial
from typing import Any

import grpc

from node.core.ids import PeerId
from node.pipeline.events import Asked, Claim, Direction, Key, Say
from node.pipeline.frames import FrameShape, frames
from node.pipeline.hops.driver import MachineDriver
from node.pipeline.hops.stash import Stash
from node.pipeline.hops.streams import OpenStreams
from node.transport.port import TransportPort
from protos import pipeline_pb2 as pb


class Giver:
    """The called side of a fetch."""

    def __init__(
        self,
        transport: TransportPort,
        driver: MachineDriver,
        stash: Stash,
        shape: FrameShape,
        streams: OpenStreams,
    ) -> None:
        self._transport = transport
        self._driver = driver
        self._stash = stash
        self._shape = shape
        self._streams = streams

    async def give(self, caller: PeerId, request: pb.FetchInput, context: Any) -> None:
        """Send the requested input to ``caller``, or end the call with a status: ALREADY_EXISTS if
        its gradient is here, DEADLINE_EXCEEDED if it is not read in time, NOT_FOUND otherwise."""
        asked = Asked(
            request.epoch,
            request.plan_hash,
            request.index,
            caller,
            request.position,
            tuple(request.skipped[: self._shape.stages]),
        )
        answer = self._driver.handle(asked)
        key = asked.key
        if answer.say is Say.SETTLED:
            await context.abort(grpc.StatusCode.ALREADY_EXISTS, answer.reason)
        late = given = False
        try:
            given = answer.say is Say.TAKE and await self._send(key, request, caller, context)
        except TimeoutError:
            late = True
        # Not inside the handler: the exception keeps the sent tensor alive, and the call ends only
        # when its peer has read it or is gone.
        if late:
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "not read in time")
        elif not given:
            await context.abort(grpc.StatusCode.NOT_FOUND, answer.reason or "freed")

    async def _send(self, key: Key, request: pb.FetchInput, caller: PeerId, context: Any) -> bool:
        """Send the output of a visit. Returns False if the output was freed. Raises TimeoutError if
        the peer does not read it within a hop's time."""
        work = self._stash.get(key)
        output = None if work is None else work.output  # may be freed while it is sent
        if work is None or output is None:
            return False
        claim = Claim(
            key.epoch,
            request.plan_hash,
            key.index,
            tuple(self._driver.machine.visits[key].journey),
            request.position,
        )
        messages = frames(
            claim,
            pb.TRAIN,
            1.0,
            work.shape,
            output,
            self._shape,
            work.document_ends,
            untrained=work.untrained,
            wire=work.wires.get(Direction.FORWARD, ""),
            leave=partial(self._transport.leave, caller),
        )
        async with self._streams.newest((key, caller)):
            for frame in messages:
                await context.write(frame)
        self._transport.count(caller, sent=len(output), plane="pipeline")
        return True
