"""What a step of a matrix costs: floating-point operations of its method, corrected by measured
rates.

Cost is time; bytes are another key with functions of their own, and the two are never compared. All
figures are of the whole matrix (or sub-matrix), because that is what its owner computes, however
the tensor-parallel ranks have sharded it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from node.core.errors import UsageFault
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
    """Floating-point operations of one step; of AdamW 12 for each number. Raises UsageFault for an
    unknown method."""
    match method:
        case "muon":
            return muon_flops(rows, cols)
        case "soap":
            return soap_flops(rows, cols)
        case "shampoo":
            return shampoo_flops(rows, cols)
        case "adamw":
            return 12 * rows * cols
        case _:
            raise UsageFault(
                f"no method is called {str(method)[:40]!r}", f"choose one of {', '.join(METHODS)}"
            )


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


@dataclass(frozen=True, slots=True)
class KernelRate:
    """A measurement: ``gflops`` of a step of ``rows`` × ``cols``, by this method's own count of
    operations."""

    rows: int
    cols: int
    gflops: float


class Rates:
    """Corrects counted operations by measured rates; without measurements the count stands.

    The rate of a shape is that of the nearest measured one: least ratio of the shorter sides, then
    of the longer ones, then the smaller shape. The correction is relative to the best rate
    measured, so that costs stay in operations at full rate.
    """

    def __init__(self, measured: Iterable[KernelRate] = ()) -> None:
        """Raises UsageFault for a rate that is not above 0 and finite, and for a side below 1."""
        self._measured = sorted(
            {(min(r.rows, r.cols), max(r.rows, r.cols), r.gflops) for r in measured}
        )
        for m, _, rate in self._measured:
            if m < 1 or not 0 < rate < 1e12:
                raise UsageFault(f"{rate} is not a rate in Gflop/s of a matrix", "measure again")
        self._best = max((rate for _, _, rate in self._measured), default=1.0)

    def corrected(self, count: int, rows: int, cols: int) -> int:
        """Operations at the best rate that take as long as ``count`` operations on this shape."""
        if not self._measured:
            return count
        m, n = min(rows, cols), max(rows, cols)
        nearest = min(self._measured, key=lambda r: (_ratio(r[0], m), _ratio(r[1], n), r))
        return max(1, int(Fraction(count) * Fraction(self._best) / Fraction(nearest[2])))


def _ratio(a: int, b: int) -> Fraction:
    return Fraction(max(a, b), min(a, b))


def units_of(
    matrices: Sequence[Matrix],
    method: Method,
    rates: Rates | None = None,
    masters: bool = False,
) -> list[Unit]:
    """Every unit of every matrix, with its cost and the bytes of its state. Raises UsageFault for
    an unknown method."""
    table = rates or Rates()
    made: list[Unit] = []
    known: dict[tuple[int, int], tuple[int, int]] = {}
    for matrix in matrices:
        for name, rows, cols in matrix.shapes:
            if (rows, cols) not in known:
                cost = table.corrected(flops(method, rows, cols), rows, cols)
                known[rows, cols] = cost, state_bytes(method, rows, cols, masters)
            made.append(Unit(name, rows, cols, *known[rows, cols]))
    return made
