"""What the leader of a cell posts of it for everybody, and what a scribe posts of its prefix:
compact JSON, checked field by field when it comes from outside. The leader is the writer of the
record."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from node.cells.census import MOST, Counts, pack_counts, parse_counts
from node.cells.postings import natural, parse_cell, parse_version
from node.core.errors import WireError
from node.core.ids import CellId
from node.core.journey import Version
from node.dht.record import json_object
from node.dht.topics import MAX_POSTING, PREFIXES, REGIONS, region_of

_EACH = PREFIXES // REGIONS
MAX_STAGES, MAX_REPLICAS = 512, 512
"""Of a cell that a record tells."""


@dataclass(frozen=True, slots=True)
class CellRecord:
    """A cell's account of itself. ``replicas``: peers at the ends and at each block stage, those
    that are about to take part included; ``works``: epochs follow each other; ``tokens_per_s`` is
    its own claim; ``counts``: cells of all prefixes, as :mod:`node.cells.census` has them."""

    cell: CellId
    version: Version
    replicas: tuple[int, ...]
    works: bool
    tokens_per_s: float = 0.0
    counts: Counts = ()

    @property
    def stages(self) -> list[int]:
        """Where its peers are: stage s as often as it has replicas."""
        return [stage for stage, count in enumerate(self.replicas) for _ in range(count)]

    def pack(self) -> bytes:
        """At most ``MAX_POSTING`` bytes of JSON. Raises WireError when others would refuse it."""
        body = {
            "cell": self.cell,
            "epoch": self.version.epoch,
            "lineage": self.version.lineage,
            "replicas": self.replicas,
            "works": self.works,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "counts": pack_counts(self.counts),
        }
        raw = json.dumps(body, separators=(",", ":")).encode()
        CellRecord.parse(raw)
        return raw

    @classmethod
    def parse(cls, raw: bytes) -> CellRecord:
        """The inverse of :meth:`pack`. Raises WireError for anything that is not a whole and
        plausible record."""
        body = json_object(raw, MAX_POSTING, "a cell's record")
        version = parse_version(body, "a cell's record")
        replicas, speed = body.get("replicas"), body.get("tokens_per_s")
        if not isinstance(replicas, list) or not 2 <= len(replicas) <= MAX_STAGES:
            raise WireError("a cell's record tells the replicas of the ends and of every stage")
        # The comparison is false for NaN as well.
        if isinstance(speed, bool) or not isinstance(speed, int | float) or not 0 <= speed < 1e15:
            raise WireError("the tokens per second of a cell are not a plausible number")
        return cls(
            parse_cell(body.get("cell")),
            version,
            tuple(natural(count, MAX_REPLICAS, "a count in a cell's record") for count in replicas),
            body.get("works") is True,
            float(speed),
            parse_counts(body.get("counts")),
        )


def pack_count(prefix: int, count: int) -> bytes:
    """What a scribe posts in its region: how many cells its prefix has."""
    return json.dumps({"prefix": prefix, "count": min(count, MOST)}).encode()


def region_in(region: int, postings: Sequence[bytes]) -> Counts:
    """Cells of the prefixes of a region, as their scribes say; of two that speak for one prefix the
    later in ``postings``. What is no count is dropped."""
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
    """What the first scribe of a region posts: cells of each of its prefixes."""
    return json.dumps({"region": region, "counts": pack_counts(counts)}).encode()


def counts_in(postings: Sequence[bytes]) -> Counts:
    """Cells of every prefix, as the first scribes of the regions say; of two that speak for one
    region the later in ``postings``. What is no region's counts is dropped."""
    found = [(0,) * _EACH] * REGIONS
    for raw in postings:
        with suppress(WireError):
            body = json_object(raw, MAX_POSTING, "a cell's record")
            region = natural(body.get("region"), REGIONS, "region in a cell's record")
            found[region] = parse_counts(body.get("counts"), _EACH) or found[region]
    return tuple(count for of in found for count in of)


def cells_in(postings: Sequence[bytes]) -> Mapping[CellId, CellRecord]:
    """By cell its record; of two of one cell the later in ``postings``. What is none is dropped."""
    found: dict[CellId, CellRecord] = {}
    for raw in postings:
        with suppress(WireError):
            record = CellRecord.parse(raw)
            found[record.cell] = record
    return found
