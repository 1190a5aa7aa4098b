"""The record that a cell's leader posts for everybody, the number of cells in the run, and the
number of a cell among them, when each cell reads only a few of the others' records. Pure. Enters:
the cells of one prefix, the numbers of cells of all prefixes. Leaves: numbers. Never: a record of a
cell in another prefix.

Cells are ordered by prefix, then by id. The cells of a prefix read each other's records, so each
knows its number among them; the number of cells before the prefix is a sum over the counts of other
prefixes. The first cell of each prefix, its *scribe*, posts the count of its own prefix to the
scribes of its region; the first scribe of a region posts the counts of the region to all. Every
scribe copies the counts of all regions into its record, where the cells of its prefix find them. So
a cell gets the same number as if it had read every record, and no answer has more than 32 records.
A scribe that lies moves cells to other lines of the grid: that costs rounds, but no mean becomes
wrong.

Records and counts are compact JSON, checked field by field when they come from outside. A cell's
leader is the writer of its record.
"""

import base64
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from node.core.errors import WireError
from node.core.ids import CellId
from node.core.journey import Version
from node.core.numbers import cell_name
from node.dht.record import json_object
from node.dht.topics import MAX_POSTING, PREFIXES, REGIONS, WRITERS, prefix_of, region_of
from node.outer.postings import natural, parse_version

MOST = WRITERS["cells"]
"""Cells of a prefix that are counted; the directory keeps no more of their records."""
_EACH = PREFIXES // REGIONS
MAX_STAGES = 512
"""Stages of a cell that a record may list, the ends included."""
MAX_REPLICAS = 512
"""Bound on the replicas of a stage in a record; it lists fewer than this."""
MAX_PEERS = 2048
"""Peers of one cell that a record may report: twice the number of places under the topic of a
cell."""
Counts = tuple[int, ...]
"""Number of cells of every prefix, 0 to MOST each; empty if they are not known."""


def scribe_of(near: Collection[CellId]) -> CellId | None:
    """The cell that counts the cells of its prefix: the first in order. None without cells."""
    return min(near, default=None)


def standing(me: CellId, near: Collection[CellId], counts: Counts) -> tuple[int, int]:
    """The number of cell ``me`` among all cells, from 0, and the total number of cells.

    ``near``: the cells of its prefix that it sees, with or without ``me``; ``counts``: the counts
    that its scribe reported. Cells that read the same records get different numbers.
    """
    prefix = prefix_of(me)
    order = sorted({me, *near})
    counts = counts or (0,) * PREFIXES
    here = max(counts[prefix], 1) if any(counts) else len(order)
    total = sum(counts) - counts[prefix] + here
    return sum(counts[:prefix]) + min(order.index(me), here - 1), total


def draw(text: str, prefixes: Sequence[int], count: int) -> list[int]:
    """``count`` of the prefixes, or all if there are fewer, chosen by a hash of ``text``."""

    def drawn(prefix: int) -> bytes:
        return hashlib.sha256(f"{text}/{prefix}".encode()).digest()

    return sorted(prefixes, key=drawn)[:count]


def pack_counts(counts: Counts) -> str:
    """Base 64 of one byte for each prefix."""
    return base64.b64encode(bytes(min(c, MOST) for c in counts)).decode()


def parse_counts(text: object, size: int = PREFIXES) -> Counts:
    """The inverse of :func:`pack_counts`: ``size`` counts, or none. Raises WireError."""
    if not isinstance(text, str) or len(text) not in (0, -(-size // 3) * 4):
        raise WireError(f"the counts of cells are {size} bytes in base 64")
    try:
        counts = tuple(base64.b64decode(text, validate=True))
    except ValueError as e:
        raise WireError("the counts of cells are not base 64") from e
    if len(counts) not in (0, size) or max(counts, default=0) > MOST:
        raise WireError(f"a prefix has at most {MOST} cells")
    return counts


@dataclass(frozen=True, slots=True)
class CellRecord:
    """A cell's account of itself. ``replicas``: peers at the ends and at each block stage, those
    that are about to take part included; ``works``: epochs follow each other; ``tokens_per_s`` is
    its own claim; ``counts``: cells of all prefixes."""

    cell: CellId
    version: Version
    replicas: tuple[int, ...]
    works: bool
    tokens_per_s: float = 0.0
    counts: Counts = ()

    @property
    def stages(self) -> list[int]:
        """The stages at which its peers are: each stage appears once for every replica."""
        return [stage for stage, count in enumerate(self.replicas) for _ in range(count)]

    def pack(self) -> bytes:
        """At most ``MAX_POSTING`` bytes of JSON. Replicas beyond the number that others read are
        left out. Raises WireError if others would refuse the record."""
        body = {
            "cell": self.cell,
            "epoch": self.version.epoch,
            "lineage": self.version.lineage,
            # Whoever posts a record of a stage is counted, so strangers choose the number.
            "replicas": [min(count, MAX_REPLICAS - 1) for count in self.replicas],
            "works": self.works,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "counts": pack_counts(self.counts),
        }
        raw = json.dumps(body, separators=(",", ":")).encode()
        CellRecord.parse(raw)
        return raw

    @classmethod
    def parse(cls, raw: bytes) -> "CellRecord":
        """The inverse of :meth:`pack`. Raises WireError if the record is not complete and
        plausible."""
        body = json_object(raw, MAX_POSTING, "a cell's record")
        version = parse_version(body, "a cell's record")
        replicas = body.get("replicas")
        speed = body.get("tokens_per_s")
        if not isinstance(replicas, list) or not 2 <= len(replicas) <= MAX_STAGES:
            raise WireError("a cell's record tells the replicas of the ends and of every stage")
        counts = [natural(count, MAX_REPLICAS, "a count in a cell's record") for count in replicas]
        if sum(counts) > MAX_PEERS:
            raise WireError(f"a cell of {sum(counts)} peers, at most {MAX_PEERS} are read")
        # The comparison is false for NaN as well.
        if isinstance(speed, bool) or not isinstance(speed, int | float) or not 0 <= speed < 1e15:
            raise WireError("the tokens per second of a cell are not a plausible number")
        return cls(
            cell_name(body.get("cell")),
            version,
            tuple(counts),
            body.get("works") is True,
            float(speed),
            parse_counts(body.get("counts")),
        )


def pack_count(prefix: int, count: int) -> bytes:
    """The count that a scribe posts in its region: cells of its prefix."""
    return json.dumps({"prefix": prefix, "count": min(count, MOST)}).encode()


def region_in(region: int, postings: Sequence[bytes]) -> Counts:
    """The number of cells of each prefix of a region, from the scribes' postings. If two postings
    name the same prefix, the later one in ``postings`` counts. Postings that are no valid count are
    dropped."""
    counts = [0] * _EACH
    for raw in postings:
        with suppress(WireError):
            body = json_object(raw, MAX_POSTING, "a cell's record")
            prefix = natural(body.get("prefix"), PREFIXES, "prefix in a cell's record")
            if region_of(prefix) == region:
                counts[prefix % _EACH] = natural(
                    body.get("count"), MOST + 1, "count in a cell's record"
                )
    return tuple(counts)


def pack_region(region: int, counts: Counts) -> bytes:
    """The counts that the first scribe of a region posts: cells of each prefix of the region."""
    return json.dumps({"region": region, "counts": pack_counts(counts)}).encode()


def counts_in(postings: Sequence[bytes]) -> Counts:
    """The number of cells of every prefix, from the postings of the first scribes of the regions.
    If two postings name the same region, the later one in ``postings`` counts. Postings that are no
    valid counts are dropped."""
    found = [(0,) * _EACH] * REGIONS
    for raw in postings:
        with suppress(WireError):
            body = json_object(raw, MAX_POSTING, "a cell's record")
            region = natural(body.get("region"), REGIONS, "region in a cell's record")
            found[region] = parse_counts(body.get("counts"), _EACH) or found[region]
    return tuple(count for of in found for count in of)


def cells_in(postings: Sequence[bytes]) -> Mapping[CellId, CellRecord]:
    """The record of each cell. If two postings name the same cell, the later one in ``postings``
    counts. Postings that are no valid record are dropped."""
    found: dict[CellId, CellRecord] = {}
    for raw in postings:
        with suppress(WireError):
            record = CellRecord.parse(raw)
            found[record.cell] = record
    return found
