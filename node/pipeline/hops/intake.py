"""Intake of tensors that other peers send: reads them and copies them to the device."""

from collections.abc import Callable
from functools import partial
from typing import Any

from node.core.ids import PeerId
from node.pipeline.frames import FrameReader, FrameShape, read_chunks
from node.pipeline.hops.ports import PipelineHost
from node.pipeline.visit_buffers import StageMath
from protos import pipeline_pb2 as pb

SHORT = 1 << 20
"""Size limit in bytes of tensors in bf16, fp16 or fp32 whose norm the event loop computes itself.
It takes 0.05 to 0.15 ms, about as long as handing the tensor to another thread."""


class FrameIntake:
    """Reads the content of a frame after its head, into memory from which ``math`` computes. When
    :meth:`read` returns a long tensor, its norm is known. With concurrent lanes its numbers are on
    the device, if the device has memory for them."""

    def __init__(self, host: PipelineHost, shape: FrameShape, math: StageMath) -> None:
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
        shared: bool = False,
    ) -> FrameReader:
        """Read the content of a frame of ``caller``: a tensor of ``shape``, with ``masked`` also
        the ends of the documents in it, with ``loss_mask`` also the number of tokens that are not
        trained on. ``read`` returns the next message. ``wire``: the number format that the frame
        must have; the run's format if empty. ``shared``: the identity of ``caller`` is proven, so
        that content may lie in memory that it shares. Raises WireError for any other content."""
        locked = self._math.on_gpu
        reader = FrameReader(
            head, shape, wire or self._shape.wire, masked, loss_mask, locked=locked
        )
        fetch = None
        if shared:
            fetch = partial(self._host.transport.fetch, caller)
        await read_chunks(read, reader, fetch)
        if self._math.lanes.beside or reader.blockwise or reader.nbytes > SHORT:
            await self._host.device.beside(partial(self._math.receive, reader))
        self._host.transport.count(caller, received=reader.nbytes, plane="pipeline")
        return reader
