"""One visit of a micro-batch at a block stage, without a pipeline around it."""

from __future__ import annotations

from torch import Tensor

from node.pipeline.gradients import Share
from node.pipeline.visit_buffers import StageMath, VisitBuffers
from node.wire.tensors import TensorReader, encode, expected_head


def visit(math: StageMath, x: Tensor, dy: Tensor) -> tuple[bytes, bytes, Share]:
    """What goes out forward, what goes out backward, the gradients. ``x`` and ``dy``: fp32, of one
    shape (B, T, D)."""
    work = arrived(x)
    math.forward(work)
    return (bytes(work.output or b""), *returned(math, work, dy))


def arrived(x: Tensor) -> VisitBuffers:
    """Before its forward."""
    return VisitBuffers(float("inf"), tuple(x.shape), input=read(x))


def returned(math: StageMath, work: VisitBuffers, dy: Tensor) -> tuple[bytes, Share]:
    """Its backward."""
    work.gradient = read(dy)
    math.backward(work)
    if work.upstream is None or work.share is None:
        raise RuntimeError("a backward without gradients")
    return bytes(work.upstream), work.share


def read(tensor: Tensor) -> TensorReader:
    """The tensor as it comes from the wire."""
    head = expected_head("x", tensor.shape, "fp32")
    reader = TensorReader([head], [("x", tuple(tensor.shape))], "fp32")
    reader.feed(encode(tensor, "fp32"))
    return reader
