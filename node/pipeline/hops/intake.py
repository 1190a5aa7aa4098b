"""Reads the tensors that other peers send, and takes them to the device."""

from collections.abc import Callable
from functools import partial
from typing import Any

from node.core.ids import PeerId
from node.pipeline.frames import FrameReader, FrameShape, read_chunks
from node.pipeline.hops.ports import Host
from node.pipeline.visit_buffers import StageMath
from protos import pipeline_pb2 as pb

SHORT = 1 << 20
"""Bytes of bf16, fp16 or fp32 whose norm is taken on the event loop: 0.05 to 0.15 ms, about as much
as the way to another thread and back."""


class FrameIntake:
    """Reads the content of a frame after its head, into memory from which ``math`` computes. When
    it is there, its size is known and its numbers are on the device."""

    def __init__(self, host: Host, shape: FrameShape, math: StageMath) -> None:
        self._host = host
        self._shape = shape
        self._math = math

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
        locked = self._math.on_gpu
        reader = FrameReader(
            head, shape, wire or self._shape.wire, masked, loss_mask, locked=locked
        )
        await read_chunks(read, reader)
        if self._math.lanes.beside or reader.blockwise or reader.nbytes > SHORT:
            await self._host.device.beside(partial(self._math.receive, reader))
        self._host.transport.count(caller, received=reader.nbytes, plane="pipeline")
        return reader
