"""Calls to the Pipeline services of other peers; each ends within a hop's time."""

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio

from node.core.errors import PeerFault
from node.core.ids import PeerId
from node.pipeline.events import Direction, Trouble
from node.pipeline.hops.deadlines import Deadlines
from node.pipeline.hops.ports import PipelineHost
from node.transport.port import EOF, answers, printable
from protos import pipeline_pb2 as pb
from protos.pipeline_pb2_grpc import PipelineStub

WAITED = 0.5
"""Fraction of the time to ACCEPTED. If the receiver waited for room or a plan longer than this
fraction, much of the tensor had arrived meanwhile, and the time says little about the
connection."""

Ended = tuple[Trouble | None, str]
"""End of a stream: (None, "") after DONE, else the trouble and its reason."""


class AlreadyThere(PeerFault):
    """The peer already has the gradient for the activation that was asked of it."""


class PeerCalls:
    """The calling side of the service. Every call ends within :attr:`Deadlines.hop_s` seconds."""

    def __init__(self, host: PipelineHost, deadlines: Deadlines) -> None:
        self._transport = host.transport
        self._clock = host.clock
        self._telemetry = host.telemetry
        self._deadlines = deadlines

    async def stream(
        self,
        peer: PeerId,
        way: Direction,
        messages: Iterable[pb.Frame],
        nbytes: int,
        accepted: Callable[[float | None], None],
    ) -> Ended:
        """Stream one frame of ``nbytes`` bytes and wait for DONE. ``accepted`` is called at
        ACCEPTED with the seconds that the transfer took, or None if they are not known. A failure
        of the peer is returned as Trouble.FAILED and never raised."""
        name = "Forward" if way is Direction.FORWARD else "Backward"
        try:
            async with self.call(peer, name, messages) as call:
                return await self._receipts(peer, call, nbytes, accepted)
        except PeerFault as e:
            return Trouble.FAILED, e.reason

    async def tell(self, peer: PeerId, name: str, note: pb.LostNote | pb.CountedNote) -> None:
        """Send a note to the method ``name`` of the peer's service. Raises PeerFault if the peer
        does not answer."""
        async with self.call(peer, name, note) as call:
            await call

    @asynccontextmanager
    async def call(self, peer: PeerId, name: str, request: object) -> AsyncIterator[Any]:
        """A context manager around one call, which ends with the block. Raises AlreadyThere if the
        peer answers so, and PeerFault for every other failure."""
        transport = self._transport
        call = None
        async with answers(peer, self._deadlines.hop_s):
            try:
                stub = PipelineStub(await transport.channel(peer))
                call = getattr(stub, name)(request)
                yield call
            except grpc.aio.AioRpcError as e:
                if e.code() is grpc.StatusCode.UNAVAILABLE:
                    transport.forget(peer)
                if e.code() is grpc.StatusCode.ALREADY_EXISTS:
                    raise AlreadyThere(peer, "the gradient is there") from e
                raise
            finally:
                if call is not None and not call.done():
                    call.cancel()

    async def _receipts(
        self, peer: PeerId, call: Any, nbytes: int, accepted: Callable[[float | None], None]
    ) -> Ended:
        clock = self._clock
        held = False
        began = clock.now()
        while True:
            receipt = await call.read()
            if receipt is EOF:
                # A receiver ends its stream in good order only after DONE; that receipt may be lost
                # when both come at once.
                return (None, "") if held else (Trouble.FAILED, "no receipt")
            match receipt.verdict:
                case pb.ACCEPTED:
                    held = True
                    took = clock.now() - began
                    self._telemetry.spent("wire", took)
                    self._transport.count(peer, sent=nbytes, plane="pipeline")
                    waited = receipt.waited_s > WAITED * took
                    accepted(None if waited else took - max(0.0, receipt.waited_s))
                case pb.DONE:
                    return None, ""
                case pb.BUSY:
                    return Trouble.BUSY, printable(receipt.reason)
                case pb.REFUSED:
                    return Trouble.REFUSED, printable(receipt.reason)
                case _:
                    self._transport.fault(peer, "unknown verdict", 1.0)
                    return Trouble.REFUSED, "unknown verdict"
