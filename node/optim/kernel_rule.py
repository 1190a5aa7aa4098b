"""Which way of multiplying suits a matrix: decided from its shape and the crossover points measured on a kind of device.

Enters  rows, columns, a Rule. Never how many of that shape there are: a matrix is worked the same way beside any others.
Leaves  a Way: number format, Gram iteration or not, symmetric products by panels or not, stacked with others of its shape or not.
Never   a clock or a tensor: newton_schulz.py multiplies.
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
    """Multiplied together with others of its shape, if there are."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Crossover points. ``side`` is a matrix's smaller side, ``aspect`` its longer side over that.

    Defaults: medians of interleaved runs on one core of a 2-core Xeon with AMX, torch 2.13.
    """

    units: bool
    """Whether bf16 products run on matrix units, several times as fast as fp32."""
    bf16_from: int = 4096
    """Elements from which a matrix is worked in bf16. 64 of 64x64: 2.3 ms, in fp32 5.6; 16 of 32x64: 0.9 and 0.7."""
    stack_bf16_to: int = 768
    """Side up to which a stack is faster in bf16 than one after the other. 16 of 64x64: 1.4 ms, alone 11.7; 4 of 768x768: 62, 80;
    of 1024x1024: 160, 142."""
    stack_fp32_to: int = 64
    """The same in fp32. 16 of 64x64: 1.8 ms, alone 3.7; equal at 128."""
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
)
"""Not measured. On a GPU small products are all launch time, so bf16 and stacks throughout, and no panels."""
STACK_FROM = 8
"""Side from which matrices are stacked: torch multiplies smaller ones by loops of its own when stacked, with other last bits."""


def way(rows: int, cols: int, rule: Rule) -> Way:
    """How to work on a matrix. Depends on nothing else."""
    side, long = min(rows, cols), max(rows, cols)
    bf16 = rule.units and side * long >= rule.bf16_from
    stacked = STACK_FROM <= side <= (rule.stack_bf16_to if bf16 else rule.stack_fp32_to)
    gram = side >= rule.gram_from and long >= (rule.gram_bf16 if bf16 else rule.gram_fp32) * side
    return Way("bf16" if bf16 else "fp32", gram, rule.panels_bf16 if bf16 else rule.panels_fp32, stacked)
