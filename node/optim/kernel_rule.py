"""Which way of multiplying suits a matrix: decided from its shape and the crossover points measured on a kind of device.

Enters  rows, columns, how many of that shape are stepped together, a Rule.
Leaves  a Way: number format, Gram iteration or not, symmetric products by panels or not.
Never   a clock or a tensor: calibrate.py measures, newton_schulz.py multiplies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Precision = Literal["bf16", "fp32"]


@dataclass(frozen=True, slots=True)
class Way:
    """How one matrix, or a stack of one shape, is orthogonalised."""

    precision: Precision
    gram: bool
    """Iterate on the small Gram matrix, restarted; else on the whole matrix."""
    panels: int
    """Elements of an operand from which a symmetric product is made as a lower triangle of panels; 0: never."""
    stacked: bool
    apart: bool
    """Long enough for a thread of its own, one of several."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Crossover points. ``side`` is a matrix's smaller side, ``aspect`` its longer side over that.

    Defaults: medians of interleaved runs on one core of a 2-core Xeon with AMX, torch 2.13.
    """

    units: bool
    """Whether bf16 products run on matrix units, several times as fast as fp32."""
    bf16_from: int = 192
    """Side from which one matrix alone is faster in bf16. 128: 0.39 ms in fp32, 0.41 in bf16; 192: 1.1 and 0.6."""
    stack_bf16_to: int = 384
    """Side up to which a stack is faster in bf16 than one after the other. 64 of 64x64: 2.3 ms, in fp32 alone 6.8; equal at 512."""
    stack_fp32_to: int = 64
    """The same in fp32. 64 of 16x16: 0.25 ms, alone 3.2; 64 of 64x64: 5.6 and 6.8; equal at 128."""
    gram_bf16: float = 1.75
    """Aspect from which the Gram iteration is faster in bf16. 1.5: 0.93 times as fast, 2: 1.1, 3: 1.4, 4: 1.5."""
    gram_fp32: float = 1.75
    """The same in fp32. 1.5: 1.0 times as fast, 2: 1.15, 3: 1.35, 4: 1.5."""
    gram_from: int = 64
    """Side from which it is. Below, calls cost more than products, and the Gram iteration has more calls."""
    panels_bf16: int = 1 << 21
    """Elements of an operand from which panels are faster in bf16. 1024x1024: 0.95 times as fast, 1024x3072: 1.25."""
    panels_fp32: int = 1 << 18
    """The same in fp32. 256x256: 1.0 times as fast, 512x512: 1.35, 1024x3072: 1.4."""
    thread_from: int = 192
    """Side from which several matrices go to a thread each. 2 threads, bf16, two of 1024x1024: 1.9 times as fast."""


CPU = Rule(units=False)
AMX = Rule(units=True)
CUDA = Rule(
    units=True,
    bf16_from=1,
    stack_bf16_to=1024,
    stack_fp32_to=0,
    gram_from=256,
    panels_bf16=0,
    panels_fp32=0,
    thread_from=1 << 62,
)
"""Not measured. On a GPU small products are all launch time, so bf16 and stacks throughout, and no panels."""
FEW_SIDE, FEW = 128, 4
"""Below this side a stack of fewer than ``FEW`` is no faster."""
TINY = 2048
"""Elements below which a stack is faster in fp32, whatever units there are."""


def way(rows: int, cols: int, count: int, rule: Rule) -> Way:
    """How to work on ``count`` matrices of one shape that may be stacked (1: one by itself). Depends on nothing else."""
    side, long = min(rows, cols), max(rows, cols)
    enough = count >= (2 if side >= FEW_SIDE else FEW)
    low = rule.units and side * long >= TINY
    stacked = enough and side <= (rule.stack_bf16_to if low else rule.stack_fp32_to)
    bf16 = low and (stacked or side >= rule.bf16_from)
    gram = side >= rule.gram_from and long >= (rule.gram_bf16 if bf16 else rule.gram_fp32) * side
    panels = 0 if stacked else rule.panels_bf16 if bf16 else rule.panels_fp32
    return Way("bf16" if bf16 else "fp32", gram, panels, stacked, not stacked and side >= rule.thread_from)
