"""One visit of a micro-batch at a block stage, without a pipeline around it."""

from collections.abc import Sequence

from torch import Tensor

from node.pipeline.frames import FrameReader
from node.pipeline.gradients import Share
from node.pipeline.visit_buffers import StageMath, VisitBuffers
from node.wire.tensors import encode, expected_head
from protos import pipeline_pb2 as pb


def visit(
    math: StageMath, x: Tensor, dy: Tensor, document_ends: Sequence[int] = ()
) -> tuple[bytes, bytes, Share]:
    """Return the bytes sent forward, the bytes sent backward, and the gradients. `x` and `dy`:
    fp32, of one shape (B, T, D)."""
    work = arrived(x, document_ends, locked=math.on_gpu)
    math.forward(work)
    return (bytes(work.output or b""), *returned(math, work, dy))


def arrived(x: Tensor, document_ends: Sequence[int] = (), *, locked: bool = False) -> VisitBuffers:
    """Before its forward."""
    reader = read(x, document_ends, locked=locked)
    return VisitBuffers(float("inf"), tuple(x.shape), input=reader)


def returned(math: StageMath, work: VisitBuffers, dy: Tensor) -> tuple[bytes, Share]:
    """Its backward."""
    work.gradient = read(dy, locked=math.on_gpu)
    math.backward(work)
    if work.upstream is None or work.share is None:
        raise RuntimeError("a backward without gradients")
    return bytes(work.upstream), work.share


def read(tensor: Tensor, document_ends: Sequence[int] = (), *, locked: bool = False) -> FrameReader:
    """The tensor as it comes from the wire; ``locked``: in page-locked memory, as for a GPU."""
    head = pb.FrameHead(tensor=expected_head("", tensor.shape, "fp32"), document_ends=document_ends)
    reader = FrameReader(head, tuple(tensor.shape), "fp32", masked=True, locked=locked)
    reader.feed(encode(tensor, "fp32"))
    return reader
