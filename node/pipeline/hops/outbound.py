"""Calls to other peers: one frame and its two receipts, an activation fetched again, a micro-batch
reported lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from node.core.clock import Clock
from node.core.errors import PeerFault, WireError
from node.core.ids import PeerId
from node.core.tasks import is_cancelled
from node.pipeline.delivery import Trouble
from node.pipeline.events import Direction, Key
from node.pipeline.received import FrameReader
from node.pipeline.telemetry import Telemetry
from node.transport.port import TransportPort, answers, printable, translate
from node.wire.tensors import TensorReader
from protos import pipeline_pb2 as pb
from protos.pipeline_pb2_grpc import PipelineStub

EOF: Any = grpc.aio.EOF  # pyright: ignore[reportAttributeAccessIssue] - missing in the stubs

WAITED = 0.5
"""Share of the time to ACCEPTED; after a longer wait at the other end much of the tensor was there
before, and the rest of the time says little about the line."""


@dataclass(frozen=True, slots=True)
class StreamOutcome:
    """How a stream ended: DONE (``trouble`` None), or not."""

    trouble: Trouble | None
    reason: str = ""


class AlreadyThere(PeerFault):
    """The peer has the gradient of the activation we asked for."""


class Outbound:
    """The calling side of the Pipeline service. Every call ends within its timeout."""

    def __init__(self, transport: TransportPort, clock: Clock, telemetry: Telemetry) -> None:
        self._transport, self._clock, self._telemetry = transport, clock, telemetry

    async def send(
        self,
        peer: PeerId,
        way: Direction,
        messages: Iterable[pb.Frame],
        nbytes: int,
        timeout: float,
        accepted: Callable[[float | None], None],
    ) -> StreamOutcome:
        """Stream one frame and wait for DONE; ``accepted`` is called at ACCEPTED with the seconds
        that the way took, None where that is not known. Never raises for the peer's failures."""
        name = "Forward" if way is Direction.FORWARD else "Backward"
        try:
            async with self._call(peer, name, messages, timeout) as call:
                return await self._receipts(peer, call, nbytes, accepted)
        except PeerFault as e:
            return StreamOutcome(Trouble.FAILED, e.reason)

    @asynccontextmanager
    async def _call(
        self, peer: PeerId, name: str, request: object, timeout: float
    ) -> AsyncIterator[Any]:
        """A call under way, that ends with the block. Raises AlreadyThere and PeerFault."""
        call: Any = None
        try:
            async with asyncio.timeout(timeout):
                stub = PipelineStub(await self._transport.channel(peer))
                call = getattr(stub, name)(request)
                yield call
        except TimeoutError as e:
            raise PeerFault(peer, f"no answer in {timeout:.1f} s") from e
        except grpc.aio.AioRpcError as e:
            if e.code() is grpc.StatusCode.UNAVAILABLE:
                self._transport.forget(peer)
            if e.code() is grpc.StatusCode.ALREADY_EXISTS:
                raise AlreadyThere(peer, "the gradient is there") from e
            raise translate(peer, e) from e
        except asyncio.CancelledError as e:
            if is_cancelled():
                raise
            raise PeerFault(peer, "its connection was closed") from e
        finally:
            if call is not None and not call.done():
                call.cancel()

    async def _receipts(
        self, peer: PeerId, call: Any, nbytes: int, accepted: Callable[[float | None], None]
    ) -> StreamOutcome:
        began, held = self._clock.now(), False
        while True:
            receipt = await call.read()
            if receipt is EOF:
                # A receiver ends its stream in good order only after DONE; that receipt may be lost
                # when both come at once.
                return StreamOutcome(None) if held else StreamOutcome(Trouble.FAILED, "no receipt")
            match receipt.verdict:
                case pb.ACCEPTED:
                    held = True
                    took = self._clock.now() - began
                    self._telemetry.spent("wire", took)
                    self._transport.count(peer, sent=nbytes, plane="pipeline")
                    waited = receipt.waited_s > WAITED * took
                    accepted(None if waited else took - max(0.0, receipt.waited_s))
                case pb.DONE:
                    return StreamOutcome(None)
                case pb.BUSY:
                    return StreamOutcome(Trouble.BUSY, printable(receipt.reason))
                case pb.REFUSED:
                    return StreamOutcome(Trouble.REFUSED, printable(receipt.reason))
                case _:
                    self._transport.fault(peer, "unknown verdict", 1.0)
                    return StreamOutcome(Trouble.REFUSED, "unknown verdict")

    async def fetch(
        self,
        peer: PeerId,
        key: Key,
        skipped: Sequence[int],
        plan_hash: str,
        reader_of: Callable[[pb.FrameHead], FrameReader],
        timeout: float,
    ) -> FrameReader:
        """The input of ``key`` from the hop before it. Raises AlreadyThere, PeerFault, or WireError
        for a bad tensor."""
        request = pb.FetchInput(
            epoch=key.epoch,
            plan_hash=plan_hash,
            index=key.index,
            position=key.position,
            skipped=skipped,
        )
        async with self._call(peer, "Fetch", request, timeout) as call:
            first = await call.read()
            if first is EOF or first.WhichOneof("part") != "head":
                raise WireError("no head")
            reader = reader_of(first.head)
            await read_chunks(call.read, reader)
            self._transport.count(peer, received=reader.nbytes, plane="pipeline")
            return reader

    async def lost(
        self, origin: PeerId, key: Key, plan_hash: str, reason: str, timeout: float
    ) -> None:
        """Tell the origin. Raises PeerFault; the origin's own time-out then does the rest."""
        note = pb.LostNote(
            epoch=key.epoch, plan_hash=plan_hash, index=key.index, reason=reason[:200]
        )
        async with answers(origin, timeout):
            channel = await self._transport.channel(origin)
            await PipelineStub(channel).Lost(note, timeout=timeout)

    async def counted(
        self, peer: PeerId, epoch: int, plan_hash: str, indices: Sequence[int], timeout: float
    ) -> None:
        """Tell a hop that its shares of these micro-batches count. Raises PeerFault."""
        note = pb.CountedNote(epoch=epoch, plan_hash=plan_hash, indices=indices)
        async with answers(peer, timeout):
            channel = await self._transport.channel(peer)
            await PipelineStub(channel).Counted(note, timeout=timeout)


async def read_chunks(read: Callable[[], Any], reader: TensorReader) -> None:
    """Feed ``reader`` until it is full. Raises WireError for a stream that is too short, too long,
    or not made of chunks."""
    while reader.remaining:
        frame = await read()
        if frame is EOF:
            raise WireError(f"the stream ended {reader.remaining} bytes early")
        if frame.WhichOneof("part") != "chunk" or not frame.chunk:
            raise WireError("expected a chunk")
        reader.feed(frame.chunk)
