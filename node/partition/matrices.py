"""What is planned: matrices, and the units they are stepped as.

A unit is what one peer steps whole: a matrix, or one of the sub-matrices it is split into (q, k and
v, gate and up, heads).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from node.core.errors import UsageFault, refuse


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
        labels, rows = {label for label, _ in self.splits}, [rows for _, rows in self.splits]
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
    what moves with its owner."""

    name: str
    rows: int
    cols: int
    cost: int
    bytes: int

    @property
    def numel(self) -> int:
        """How many numbers it has."""
        return self.rows * self.cols


def equal_splits(matrix: str, rows: int, count: int) -> tuple[tuple[str, int], ...]:
    """``count`` equal blocks of rows, labelled 0, 1, …. Raises UsageFault if they do not divide the
    rows."""
    if rows % count:
        raise UsageFault(
            f"{matrix} has {rows} rows, which {count} equal splits do not divide",
            "list the rows of each split",
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
