"""Sketches of tensors: a few numbers by which peers compare tensors that they do not send again.
Pure. Enters: the numbers that :mod:`node.wire.sketcher` computes, or the bytes of another peer.
Leaves: bytes, and how alike two tensors are. Never: a tensor.
"""

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from node.core.errors import WireError

NUMBERS = 64
"""Projections of a tensor. The cosine of two tensors is estimated with a standard deviation of
``(1 - cosine²) / √NUMBERS``."""
MOST = 127
"""Largest absolute value of a projection on the wire."""
STEPS = 256
"""Steps of a size on the wire for each unit of the natural logarithm."""
SMALLEST = -127.0
"""Logarithm of the size of a tensor of zeros."""
MOST_ALIKE = 4.0
"""Largest likeness: a cosine of 0.9993. Rounding on the wire hides smaller differences."""
_LAYOUT = struct.Struct(f"<h{NUMBERS}b")
_NUMPY = np.dtype([("size", "<i2"), ("numbers", "i1", NUMBERS)])
BYTES = _LAYOUT.size
"""Bytes of a sketch."""


@dataclass(frozen=True, slots=True)
class Sketch:
    """A sketch of one tensor. ``size``: natural logarithm of the usual size of its numbers, as
    :mod:`node.wire.sketcher` has it; ``numbers``: its projections, up to a factor; all 0 for a
    tensor of zeros."""

    size: float
    numbers: tuple[int, ...]

    @classmethod
    def of(cls, size: float, projections: Sequence[float]) -> "Sketch":
        """The sketch of a tensor whose numbers have this size, and with these projections."""
        largest = max(map(abs, projections), default=0.0)
        if not (math.isfinite(largest) and math.isfinite(size)) or not largest or size <= 0:
            return NOTHING
        logarithm = min(max(math.log(size), SMALLEST), -SMALLEST)
        return cls(logarithm, tuple(round(p * MOST / largest) for p in projections))

    def encoded(self) -> bytes:
        """The sketch as it travels."""
        return _LAYOUT.pack(round(self.size * STEPS), *self.numbers)

    @classmethod
    def parse(cls, raw: bytes) -> "Sketch":
        """The inverse of :meth:`encoded`, up to the rounding of the size. Raises WireError for
        anything else."""
        if len(raw) != BYTES:
            raise WireError(f"a sketch has {BYTES} bytes, not {len(raw)}")
        size, *numbers = _LAYOUT.unpack(raw)
        return cls(size / STEPS, tuple(numbers))


NOTHING = Sketch(SMALLEST, (0,) * NUMBERS)
"""The sketch of a tensor of zeros."""


def encode_all(sketches: Sequence[Sketch]) -> bytes:
    """Several sketches as they travel."""
    return b"".join(sketch.encoded() for sketch in sketches)


class SketchTable:
    """Encoded sketches of many rows, ``columns`` each. Raises WireError for bytes that are none."""

    def __init__(self, rows: Sequence[bytes], columns: int) -> None:
        if any(len(row) != columns * BYTES for row in rows):
            raise WireError(f"{columns} sketches have {columns * BYTES} bytes")
        found = np.frombuffer(b"".join(rows), _NUMPY).reshape(-1, columns)
        self._sizes = found["size"] / STEPS
        self._numbers = found["numbers"].astype(np.int32)

    def compare(
        self, one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]
    ) -> tuple[list[float], list[float]]:
        """Compare sketches pair by pair; each is named by its row and column. Returns how alike the
        tensors are, and the difference of their sizes, the other's less the one's.

        The likeness is the inverse hyperbolic tangent of the cosine, whose deviation hardly depends
        on the cosine; at most :data:`MOST_ALIKE` either way, and NaN if a tensor is zero.
        """
        if not one:
            return [], []
        a = tuple(np.array(one).T)
        b = tuple(np.array(other).T)
        # Products of whole numbers are exact, so all machines find the same.
        product = (self._numbers[a] * self._numbers[b]).sum(1)
        lengths = np.sqrt(
            (self._numbers[a] ** 2).sum(1) * (self._numbers[b] ** 2).sum(1, dtype=float)
        )
        likeness = [
            _likeness(p, n) for p, n in zip(product.tolist(), lengths.tolist(), strict=True)
        ]
        return likeness, (self._sizes[b] - self._sizes[a]).tolist()


def _likeness(product: float, lengths: float) -> float:
    if not lengths:
        return math.nan
    most = math.tanh(MOST_ALIKE)
    return math.atanh(min(max(product / lengths, -most), most))
