"""Reads the tensors that other peers send."""

import asyncio
from collections.abc import Callable
from typing import Any

from node.core.ids import PeerId
from node.pipeline.frames import FrameReader, FrameShape, read_chunks
from node.pipeline.visit_buffers import StageMath
from node.transport.port import TransportPort
from protos import pipeline_pb2 as pb


class FrameIntake:
    """Reads the content of a frame after its head, into memory from which ``math`` computes."""

    def __init__(self, transport: TransportPort, shape: FrameShape, math: StageMath) -> None:
        self._transport = transport
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
        if reader.blockwise:
            await asyncio.to_thread(reader.rms)
        self._transport.count(caller, received=reader.nbytes, plane="pipeline")
        return reader
