"""What a cell posts for a window: compact JSON, checked field by field when it comes from outside.
Its leader is the writer of the record."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Any

from node.cells.facts import CellFacts
from node.core.errors import WireError
from node.core.ids import CellId
from node.core.journey import Version, lineage
from node.dht.record import parse_maddrs
from node.dht.topics import outer_topic

MAX_BODY = 1024
"""Bytes of a packed posting."""
MAX_MADDRS = 4
"""Addresses at which the leader of a cell can be dialled."""
_CELL = re.compile(r"[0-9a-f]{16}")
_ANCHOR = re.compile(r"[0-9a-f]{0,64}")


def parse_cell(value: Any) -> CellId:
    """A cell's name as others write it. Raises WireError for anything but 16 hex digits."""
    if not isinstance(value, str) or not _CELL.fullmatch(value):
        raise WireError("the name of a cell has 16 lower-case hex digits")
    return CellId(value)


def parse_key(value: str) -> str:
    """A key that cells meet under. Raises WireError for one that nobody posts."""
    outer_topic(0, value)
    return value


@dataclass(frozen=True, slots=True)
class CellPosting:
    """A cell's account of itself: fields of :class:`~node.cells.facts.CellFacts`."""

    cell: CellId
    version: Version
    anchor: str
    change: int
    maddrs: tuple[str, ...] = ()

    @classmethod
    def of(cls, about: CellFacts) -> CellPosting:
        """What of the facts is posted."""
        maddrs = about.maddrs[:MAX_MADDRS]
        return cls(about.cell, about.version, about.anchor, about.change, maddrs)

    def pack(self) -> bytes:
        """At most ``MAX_BODY`` bytes of JSON, with as many addresses as fit. Raises WireError when
        others would refuse it."""
        body = {
            "cell": self.cell,
            "epoch": self.version.epoch,
            "lineage": self.version.lineage,
            "anchor": self.anchor,
            "change": self.change,
            "maddrs": list(self.maddrs),
        }
        while True:
            raw = json.dumps(body, separators=(",", ":")).encode("utf-8", "replace")
            if len(raw) <= MAX_BODY or not body["maddrs"]:
                break
            body["maddrs"] = body["maddrs"][:-1]
        CellPosting.parse(raw)
        return raw

    @classmethod
    def parse(cls, raw: bytes) -> CellPosting:
        """The inverse of :meth:`pack`. Raises WireError for anything that is not a whole and
        plausible posting."""
        if len(raw) > MAX_BODY:
            raise WireError(f"a cell's posting has at most {MAX_BODY} bytes, not {len(raw)}")
        try:
            body = json.loads(raw)
        except (ValueError, RecursionError) as e:
            raise WireError("a cell's posting is not JSON") from e
        if not isinstance(body, dict):
            raise WireError("a cell's posting is not an object")
        try:
            version = Version(_natural(body, "epoch"), lineage(body.get("lineage")))
        except ValueError as e:
            raise WireError(f"lineage in a cell's posting: {e}") from e
        anchor = body.get("anchor")
        if not isinstance(anchor, str) or not _ANCHOR.fullmatch(anchor):
            raise WireError("anchor in a cell's posting is not at most 64 hex digits")
        try:
            maddrs = parse_maddrs(body.get("maddrs"), MAX_MADDRS)
        except WireError as e:
            raise WireError(f"maddrs in a cell's posting: {e}") from e
        cell, change = parse_cell(body.get("cell")), _natural(body, "change")
        return cls(cell, version, anchor, change, maddrs)


def _natural(body: dict[str, Any], name: str) -> int:
    value = body.get(name)
    if type(value) is not int or not 0 <= value < 2**53:
        raise WireError(f"{name} in a cell's posting is not a number from 0 to 2^53 - 1")
    return value
