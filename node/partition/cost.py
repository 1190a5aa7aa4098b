"""What a step of a matrix costs: floating-point operations of its method, corrected by measured
rates.

Cost is time; bytes are another key with functions of their own, and the two are never compared. All
figures are of the whole matrix (or sub-matrix), because that is what its owner computes, however
the tensor-parallel ranks have sharded it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import cache
from typing import Literal

from node.core.errors import refuse
from node.partition.matrices import Matrix, Unit

Method = Literal["muon", "shampoo", "soap", "adamw"]
METHODS: tuple[Method, ...] = ("muon", "shampoo", "soap", "adamw")
NS_STEPS = 5
PRECONDITION_EVERY = 10
"""Steps between two eigendecompositions of Shampoo and SOAP."""
MAX_SIDE = 10_000
"""Longest side Shampoo and SOAP keep a preconditioner of, the default of SOAP (arXiv
2409.11321)."""
FP32 = 4


def muon_flops(rows: int, cols: int, steps: int = NS_STEPS) -> int:
    """Newton-Schulz on m × n, m <= n: ``steps`` (4 n m² + 2 m³): X Xᵀ, A A and B X in each step
    (Jordan et al. 2024)."""
    m, n = min(rows, cols), max(rows, cols)
    return steps * (4 * n * m * m + 2 * m**3)


def soap_flops(rows: int, cols: int, every: int = PRECONDITION_EVERY, side: int = MAX_SIDE) -> int:
    """Mean of a SOAP step: each side a <= ``side`` beside b: 8 a² b for the Gram update and the
    projections to and from the eigenbasis, and (6 + 4/3) a³ for QR in one of ``every`` steps (arXiv
    2409.11321)."""
    total = Fraction(0)
    for a, b in ((rows, cols), (cols, rows)):
        if a <= side:
            total += 8 * a * a * b + Fraction(22, 3 * every) * a**3
    return max(int(total), rows * cols)


def shampoo_flops(
    rows: int, cols: int, every: int = PRECONDITION_EVERY, side: int = MAX_SIDE
) -> int:
    """Mean of a Shampoo step: each side a <= ``side`` beside b: 2 a² b for the statistics, 2 a² b
    for applying the root (arXiv 1802.09568), and in one of ``every`` steps 9 a³ for the
    eigendecomposition and 2 a³ for the root from it."""
    total = 0
    for a, b in ((rows, cols), (cols, rows)):
        if a <= side:
            total += 4 * a * a * b + 11 * a**3 // every
    return max(total, rows * cols)


def flops(method: Method, rows: int, cols: int) -> int:
    """Floating-point operations of one step; of AdamW 12 for each number."""
    match method:
        case "muon":
            return muon_flops(rows, cols)
        case "soap":
            return soap_flops(rows, cols)
        case "shampoo":
            return shampoo_flops(rows, cols)
        case "adamw":
            return 12 * rows * cols


def state_bytes(method: Method, rows: int, cols: int, masters: bool = False) -> int:
    """fp32 bytes of the state its owner keeps: Muon one momentum; AdamW two moments; Shampoo
    momentum, and two matrices for each side it has a preconditioner of (statistics, root); SOAP two
    moments, and two for each side (statistics, basis). With ``masters`` 2 more for each number, the
    lower half of an fp32 matrix whose upper half all peers have."""
    numel = rows * cols
    whole = 2 if method in ("adamw", "soap") else 1
    sides = sum(2 * a * a for a in (rows, cols) if a <= MAX_SIDE)
    state = FP32 * (whole * numel + (sides if method in ("shampoo", "soap") else 0))
    return state + 2 * numel * masters


class Rates:
    """Corrects counted operations by measured rates; without measurements the count stands. A
    measurement is (rows, cols, Gflop/s) of a step, by the method's own count of operations.

    The rate of a shape is that of the nearest measured one: least ratio of the shorter sides, then
    of the longer ones, then the smaller shape. The correction is relative to the best rate
    measured, so that costs stay in operations at full rate.
    """

    def __init__(self, measured: Iterable[tuple[int, int, float]] = ()) -> None:
        """Raises UsageFault for a rate that is not above 0 and finite."""
        self._measured = sorted({(min(a, b), max(a, b), rate) for a, b, rate in measured})
        refuse(
            *(
                (
                    not 0 < rate < 1e12,
                    f"{rate} is not a rate in Gflop/s of a matrix",
                    "measure again",
                )
                for _, _, rate in self._measured
            )
        )
        self._best = max((rate for _, _, rate in self._measured), default=1.0)

    def corrected(self, count: int, rows: int, cols: int) -> int:
        """Operations at the best rate that take as long as ``count`` operations on this shape."""
        if not self._measured:
            return count
        m, n = min(rows, cols), max(rows, cols)
        nearest = min(self._measured, key=lambda r: (_ratio(r[0], m), _ratio(r[1], n), r))
        return max(1, int(Fraction(count) * Fraction(self._best) / Fraction(nearest[2])))


COUNTED = Rates()
"""Where nothing was measured."""


def _ratio(a: int, b: int) -> Fraction:
    return Fraction(max(a, b), min(a, b))


def units_of(
    matrices: Sequence[Matrix],
    method: Method,
    rates: Rates = COUNTED,
    masters: bool = False,
) -> list[Unit]:
    """Every unit of every matrix, with its cost and the bytes of its state."""

    @cache
    def of(rows: int, cols: int) -> tuple[int, int]:
        cost = rates.corrected(flops(method, rows, cols), rows, cols)
        return cost, state_bytes(method, rows, cols, masters)

    return [Unit(*shape, *of(*shape[1:])) for matrix in matrices for shape in matrix.shapes]
