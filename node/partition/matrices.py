"""Matrices to plan, and the cost of a step of each: the units they are stepped as, the
floating-point operations of their method, corrected by measured rates.

A unit is stepped whole by one peer: a matrix, or one of the sub-matrices it is split into (q, k and
v, gate and up, heads). Cost is time; bytes are another key with functions of their own, and the two
are never compared. All figures are of the whole matrix (or sub-matrix), because its owner computes
it whole, however the tensor-parallel ranks have sharded it.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Literal

from node.core.errors import UsageFault, refuse

Method = Literal["muon", "shampoo", "soap", "adamw"]
METHODS: tuple[Method, ...] = ("muon", "shampoo", "soap", "adamw")
NS_STEPS = 5
PRECONDITION_EVERY = 10
"""Steps between two eigendecompositions of Shampoo and SOAP."""
MAX_SIDE = 10_000
"""Longest side Shampoo and SOAP keep a preconditioner of, the default of SOAP (arXiv
2409.11321)."""
FP32 = 4


@dataclass(frozen=True, slots=True)
class Matrix:
    """A parameter of ``rows`` × ``cols``. ``splits``: (label, rows) of the blocks of rows it is
    stepped as; empty: whole.

    Raises UsageFault for splits that do not make up the rows or share a label.
    """

    name: str
    rows: int
    cols: int
    splits: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        labels = {label for label, _ in self.splits}
        rows = [rows for _, rows in self.splits]
        refuse(
            (
                rows and sum(rows) != self.rows,
                f"the splits of {self.name} are {'+'.join(map(str, rows))}, it has {self.rows} "
                "rows",
                "list rows that add up to all of them",
            ),
            (
                len(labels) != len(rows),
                f"two splits of {self.name} have one label",
                "label each split differently",
            ),
        )

    @property
    def shapes(self) -> tuple[tuple[str, int, int], ...]:
        """(name, rows, cols) of each unit; a split of ``w`` with label ``q`` is named ``w[q]``."""
        if len(self.splits) < 2:
            return ((self.name, self.rows, self.cols),)
        return tuple((f"{self.name}[{label}]", rows, self.cols) for label, rows in self.splits)


@dataclass(frozen=True, slots=True)
class Unit:
    """``cost``: of one step, an integer so that sums are exact; ``bytes``: of the optimizer state,
    which moves with its owner."""

    name: str
    rows: int
    cols: int
    cost: int
    bytes: int

    @property
    def numel(self) -> int:
        """Number of its elements."""
        return self.rows * self.cols


def equal_splits(matrix: str, rows: int, count: int) -> tuple[tuple[str, int], ...]:
    """``count`` equal blocks of rows, labelled 0, 1, …. Raises UsageFault if they do not divide the
    rows."""
    refuse(
        (
            rows % count,
            f"{matrix} has {rows} rows, which {count} equal splits do not divide",
            "list the rows of each split",
        )
    )
    return tuple((str(i), rows // count) for i in range(count))


def in_order(units: Iterable[Unit]) -> list[Unit]:
    """Largest cost first, then most bytes, then by name: the order every rule here works in.

    Raises UsageFault for a name given twice.
    """
    ordered = sorted(units, key=lambda u: (-u.cost, -u.bytes, u.name))
    twice = [name for name, n in sorted(Counter(u.name for u in ordered).items()) if n > 1]
    if twice:
        raise UsageFault(f"{twice[0]} is there twice", "name every matrix once")
    return ordered


def muon_flops(rows: int, cols: int, steps: int = NS_STEPS) -> int:
    """Newton-Schulz on m × n, m <= n: ``steps`` (4 n m² + 2 m³): X Xᵀ, A A and B X in each step
    (Jordan et al. 2024)."""
    m = min(rows, cols)
    n = max(rows, cols)
    return steps * (4 * n * m * m + 2 * m**3)


def soap_flops(rows: int, cols: int, every: int = PRECONDITION_EVERY, side: int = MAX_SIDE) -> int:
    """Mean of a SOAP step: each side a <= ``side`` beside b: 8 a² b for the Gram update and the
    projections to and from the eigenbasis, and (6 + 4/3) a³ for QR in one of ``every`` steps (arXiv
    2409.11321)."""
    total = sum(
        8 * a * a * b + Fraction(22, 3 * every) * a**3
        for a, b in ((rows, cols), (cols, rows))
        if a <= side
    )
    return max(int(total), rows * cols)


def shampoo_flops(
    rows: int, cols: int, every: int = PRECONDITION_EVERY, side: int = MAX_SIDE
) -> int:
    """Mean of a Shampoo step: each side a <= ``side`` beside b: 2 a² b for the statistics, 2 a² b
    for applying the root (arXiv 1802.09568), and in one of ``every`` steps 9 a³ for the
    eigendecomposition and 2 a³ for the root from it."""
    total = sum(
        4 * a * a * b + 11 * a**3 // every for a, b in ((rows, cols), (cols, rows)) if a <= side
    )
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
    moments, and two for each side (statistics, basis). ``masters`` adds 2 bytes a number, the lower
    half of fp32 numbers whose upper half all peers have."""
    numel = rows * cols
    kept = numel
    if method in ("adamw", "soap"):
        kept += numel
    if method in ("shampoo", "soap"):
        kept += sum(2 * a * a for a in (rows, cols) if a <= MAX_SIDE)
    return FP32 * kept + 2 * numel * masters


class Rates:
    """Corrects counted operations by measured rates; without measurements the count stands. A
    measurement is (rows, cols, Gflop/s) of a step, by the method's own count of operations.

    A shape has the rate of the nearest measured one: least ratio of the shorter sides, then of the
    longer ones, then the smaller shape. The correction is relative to the best rate measured, so
    that costs stay in operations at full rate.
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
        m = min(rows, cols)
        n = max(rows, cols)
        nearest = min(self._measured, key=lambda r: (_ratio(r[0], m), _ratio(r[1], n), r))
        return max(1, int(Fraction(count) * Fraction(self._best) / Fraction(nearest[2])))


COUNTED = Rates()
"""Rates without a measurement."""


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
