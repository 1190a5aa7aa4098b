"""Hosts of matrices among the ranks, and the micro-groups in which matrices are exchanged. Pure:
made once for a set of shapes, and kept."""

from collections.abc import Sequence
from dataclasses import dataclass

from node.local.split import cut_of, span
from node.partition.balance import longest_first
from node.partition.matrices import FP32, Unit, in_order, muon_flops
from node.partition.plan import bounded_groups
from node.partition.search import OwnershipProblem


@dataclass(frozen=True)
class Sharded:
    """A matrix that is cut along ``dim``; ``sizes``: how much of that side each rank holds, 0
    allowed."""

    name: str
    rows: int
    cols: int
    dim: int
    sizes: tuple[int, ...]

    @classmethod
    def as_parameter(cls, name: str, shape: tuple[int, ...], ranks: int) -> "Sharded":
        """A matrix that is cut as the parameter ``name`` of this shape is; a vector is a matrix of
        one column."""
        rows, cols = (*shape, 1)[:2]
        dim = cut_of(name) or 0
        cuts = [span(shape[dim], rank, ranks) for rank in range(ranks)]
        return cls(name, rows, cols, dim, tuple(stop - start for start, stop in cuts))

    @classmethod
    def at(cls, host: int, name: str, shape: tuple[int, ...], ranks: int) -> "Sharded":
        """A matrix that one rank holds whole."""
        rows, cols = shape
        return cls(name, rows, cols, 0, tuple(rows * (rank == host) for rank in range(ranks)))

    @property
    def numel(self) -> int:
        """Numbers of the whole."""
        return self.rows * self.cols

    def shape(self, rank: int) -> tuple[int, int]:
        """Shape of a rank's shard, (rows, cols)."""
        if self.dim == 0:
            return self.sizes[rank], self.cols
        return self.rows, self.sizes[rank]

    def part(self, rank: int) -> int:
        """Numbers of a rank's shard."""
        rows, cols = self.shape(rank)
        return rows * cols


Group = tuple[tuple[Sharded, ...], ...]
"""The matrices each rank hosts."""


def micro_groups(
    matrices: Sequence[Sharded], ranks: int, most_bytes: int, steps: int
) -> tuple[Group, ...]:
    """Micro-groups in the order they are exchanged; in none does a rank host more than
    ``most_bytes``, or one matrix if that is more.

    Hosts are chosen longest-processing-time-first by the cost of the whole matrix (Graham 1969).
    Raises UsageFault for a name given twice.
    """
    if not matrices:
        return ()
    units = in_order(
        Unit(m.name, m.rows, m.cols, muon_flops(m.rows, m.cols, steps), FP32 * m.numel)
        for m in matrices
    )
    hosts = longest_first(OwnershipProblem([u.cost for u in units], [1.0] * ranks))
    most = max(most_bytes, *(u.bytes for u in units))
    by_name = {m.name: m for m in matrices}
    groups = bounded_groups(
        units, {u.name: host for u, host in zip(units, hosts, strict=True)}, ranks, most
    )
    return tuple(tuple(tuple(by_name[u.name] for u in slot) for slot in group) for group in groups)
