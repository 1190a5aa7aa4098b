"""How far the cells of a stage are apart, from sketches of their parameters.
Enters: a sketch of each cell. Leaves: their relative distance. Never: torch, a parameter.

A sketch is a linear map to few numbers that keeps lengths: each number adds up, with random signs,
the parameters that a hash puts there (count sketch: Charikar, Chen and Farach-Colton 2002). As a
Johnson-Lindenstrauss transform: Weinberger and others, arXiv 0902.2206; the square of a length is
kept without bias, with variance at most 2/k of its square for k numbers. It is made in
``sketch.py``."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from node.core.errors import WireError

WIDTH = 64
"""Numbers of a sketch."""
ERROR = 1 / math.sqrt(WIDTH)
"""Relative standard error of :func:`apart`: of a square sqrt(2/k), and it is the root of a quotient
of two squares."""
_PACKED = struct.Struct(f"<{WIDTH}f")

Sketch = tuple[float, ...]


def apart(cells: Sequence[Sketch]) -> float:
    """Root of the mean squared distance of the cells' parameters to their mean, over the root of
    their mean squared length: 0 for cells that are equal, 1 where the mean is nothing. Raises
    ValueError without a cell."""
    if not cells:
        raise ValueError("no cell has a spread")
    length = math.fsum(x * x for sketch in cells for x in sketch)
    means = [math.fsum(column) / len(cells) for column in zip(*cells, strict=True)]
    away = math.fsum(
        (x - mean) ** 2 for sketch in cells for x, mean in zip(sketch, means, strict=True)
    )
    # What is the same in all cells must not look different because its mean was rounded.
    same = all(sketch == cells[0] for sketch in cells)
    return 0.0 if same or not length else math.sqrt(min(1.0, away / length))


def packed(sketch: Sketch) -> bytes:
    """On the wire: fp32, little-endian; nothing for none."""
    return _PACKED.pack(*sketch) if sketch else b""


def unpacked(raw: bytes) -> Sketch:
    """The inverse. Raises WireError for another length, and for numbers that are not finite."""
    if not raw:
        return ()
    if len(raw) != _PACKED.size:
        raise WireError(f"a sketch has {_PACKED.size} bytes, not {len(raw)}")
    sketch = _PACKED.unpack(raw)
    if not all(map(math.isfinite, sketch)):
        raise WireError("a sketch of numbers that are not finite")
    return sketch
