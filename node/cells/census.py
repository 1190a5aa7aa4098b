"""How many cells there are, and which number a cell has among them, when each cell reads a few of
the others' records only. Pure. Enters: the cells of one prefix, the numbers of cells of all
prefixes. Leaves: numbers. Never: a record of a cell in another prefix.

Cells are ordered by prefix, then by id. Those of a prefix read each other's records, so each knows
its number among them; how many cells come before the prefix is a sum over 63 counts. The first cell
of each prefix, its *scribe*, posts the count of its own prefix, reads those of the others, and puts
all 64 into its record, where the cells of its prefix find them. So a cell's number is the same as
if it had read every record, and whatever is posted or read is bounded by the number of prefixes. A
scribe that lies moves cells to other lines of the grid: it costs rounds, and no mean is wrong.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence

from node.core.errors import WireError
from node.core.ids import CellId
from node.dht.topics import PREFIXES, WRITERS, prefix_of

MOST = WRITERS["cells"]
"""Cells of a prefix that are counted: no more are posted."""
Counts = tuple[int, ...]
"""Cells of every prefix, 0 to MOST each; empty where they are not known."""


def scribe_of(near: Collection[CellId]) -> CellId | None:
    """Of the cells of a prefix the one that counts them."""
    return min(near, default=None)


def standing(me: CellId, near: Collection[CellId], counts: Counts) -> tuple[int, int]:
    """The number of cell ``me`` among all, from 0, and how many there are.

    ``near``: cells of its prefix that it sees, with or without ``me``; ``counts`` as its scribe
    told them. Cells that read the same have different numbers.
    """
    prefix, order = prefix_of(me), sorted({me, *near})
    counts = counts or (0,) * PREFIXES
    here = max(counts[prefix], 1) if any(counts) else len(order)
    total = sum(counts) - counts[prefix] + here
    return sum(counts[:prefix]) + min(order.index(me), here - 1), total


def draw(text: str, prefixes: Sequence[int], count: int) -> list[int]:
    """``count`` of the prefixes, or all where there are fewer, as a hash of ``text`` says."""

    def drawn(prefix: int) -> bytes:
        return hashlib.sha256(f"{text}/{prefix}".encode()).digest()

    return sorted(prefixes, key=drawn)[:count]


def pack_counts(counts: Counts) -> str:
    """Two hex digits a prefix."""
    return bytes(min(c, MOST) for c in counts).hex()


def parse_counts(text: object) -> Counts:
    """The inverse of :func:`pack_counts`. Raises WireError."""
    if not isinstance(text, str) or len(text) not in (0, 2 * PREFIXES):
        raise WireError(f"the counts of cells are {PREFIXES} numbers of two hex digits")
    try:
        counts = tuple(bytes.fromhex(text))
    except ValueError as e:
        raise WireError("the counts of cells are not hex digits") from e
    if len(counts) not in (0, PREFIXES) or max(counts, default=0) > MOST:
        raise WireError(f"a prefix has at most {MOST} cells")
    return counts
