"""Reads the tensors of forward-only work."""

import asyncio
from typing import Any

from node.core.errors import WireError
from node.pipeline.frames import FrameReader, FrameShape, Incoming
from node.pipeline.guard import Guard
from node.pipeline.hops.deadlines import Deadlines
from node.pipeline.hops.intake import FrameIntake
from protos import pipeline_pb2 as pb


class ForwardReading:
    """Reads a tensor within a hop's time, in the format of forward-only work."""

    def __init__(
        self, intake: FrameIntake, guard: Guard, deadlines: Deadlines, shape: FrameShape
    ) -> None:
        self._intake = intake
        self._guard = guard
        self._deadlines = deadlines
        self._shape = shape

    async def read(self, incoming: Incoming, shape: tuple[int, ...], context: Any) -> FrameReader:
        """The tensor behind a head, of ``shape``. Raises WireError, also for numbers that may not
        be used, and TimeoutError."""
        masked = self._shape.masked and incoming.head.purpose == pb.EVALUATE
        caller = incoming.claim.journey[incoming.claim.position - 1].peer
        async with asyncio.timeout(self._deadlines.hop_s):
            reader = await self._intake.read(
                caller,
                incoming.head,
                shape,
                masked,
                context.read,
                wire=self._shape.forward_only,
            )
        if not self._guard.finite(reader):
            raise WireError("an activation that is not finite or absurdly large")
        return reader
