"""How many cells there are, and which number a cell has among them, when each cell reads a few of
the others' records only. Pure. Enters: the cells of one prefix, the numbers of cells of all
prefixes. Leaves: numbers. Never: a record of a cell in another prefix.

Cells are ordered by prefix, then by id. Those of a prefix read each other's records, so each knows
its number among them; how many cells come before the prefix is a sum over the counts of others. The
first cell of each prefix, its *scribe*, posts the count of its own prefix to those of its region;
the first scribe of a region posts the counts of the region to all. Every scribe puts what all
regions say into its record, where the cells of its prefix find it. So a cell's number is the same
as if it had read every record, and no answer has more than 32 records. A scribe that lies moves
cells to other lines of the grid: it costs rounds, and no mean is wrong.
"""

from __future__ import annotations

import base64
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
    """Base 64 of a byte a prefix."""
    return base64.b64encode(bytes(min(c, MOST) for c in counts)).decode()


def parse_counts(text: object, size: int = PREFIXES) -> Counts:
    """The inverse of :func:`pack_counts`, of ``size`` counts or none. Raises WireError."""
    if not isinstance(text, str) or len(text) not in (0, -(-size // 3) * 4):
        raise WireError(f"the counts of cells are {size} bytes in base 64")
    try:
        counts = tuple(base64.b64decode(text, validate=True))
    except ValueError as e:
        raise WireError("the counts of cells are not base 64") from e
    if len(counts) not in (0, size) or max(counts, default=0) > MOST:
        raise WireError(f"a prefix has at most {MOST} cells")
    return counts
