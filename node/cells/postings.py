"""What a cell posts for a window: compact JSON, checked field by field when it comes from outside.
Its leader is the writer of the record. Where edges lead to it, it also says where what it gives
can be fetched."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from node.cells.facts import CellFacts, Hosts
from node.core.errors import WireError
from node.core.ids import CellId, PeerId
from node.core.journey import Host, Version, lineage
from node.dht.record import MAX_MADDR, json_object, parse_maddrs
from node.dht.topics import MAX_POSTING, outer_topic

MAX_BODY = 1024
"""Bytes of a packed posting without hosts; with them it has the room of any posting."""
MAX_MADDRS = 4
"""Addresses at which the leader of a cell can be dialled."""
MAX_HOSTS, HOST_MADDRS = 4, 2
"""Hosts of a stage that a posting names, and addresses of each."""
PEER = re.compile(r"[0-9A-Za-z-]{1,64}")
"""What a PeerId looks like; whether it is a key shows where its signature is checked, or when it is
dialled."""
_CELL = re.compile(r"[0-9a-f]{16}")
_ANCHOR = re.compile(r"[0-9a-f]{0,64}")
_MADDR = re.compile(r"/[!-~]+")


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
    """A cell's account of itself: fields of :class:`~node.cells.facts.CellFacts`. ``hosts`` are
    empty where who is asked for them is the leader."""

    cell: CellId
    version: Version
    anchor: str
    change: int
    maddrs: tuple[str, ...] = ()
    hosts: Hosts = field(default_factory=dict)

    @classmethod
    def of(cls, about: CellFacts) -> CellPosting:
        """What of the facts is posted where leaders talk to each other."""
        maddrs = about.maddrs[:MAX_MADDRS]
        return cls(about.cell, about.version, about.anchor, about.change, maddrs)

    @classmethod
    def hosting(cls, about: CellFacts) -> CellPosting:
        """What is posted where nobody asks the leader: with as many hosts and addresses of every
        stage as there is room for. Raises WireError where there is none for one of each."""
        bare = replace(cls.of(about), maddrs=about.maddrs[:HOST_MADDRS])
        stages = {stage: each for stage, each in sorted(about.hosts.items()) if each}
        for hosts, maddrs in ((MAX_HOSTS, HOST_MADDRS), (2, 2), (2, 1), (1, 1), (1, 0)):
            told = {
                stage: tuple(Host(h.peer, dialable(h.maddrs)[:maddrs]) for h in each[:hosts])
                for stage, each in stages.items()
            }
            if len(_json(posting := replace(bare, hosts=told))) <= MAX_POSTING:
                return posting
        raise WireError(f"a posting has no room for a host of each of {len(stages)} stages")

    def pack(self) -> bytes:
        """JSON, with as many addresses of the leader as fit. Raises WireError when others would
        refuse it."""
        told, most = self, MAX_POSTING if self.hosts else MAX_BODY
        while len(raw := _json(told)) > most and told.maddrs:
            told = replace(told, maddrs=told.maddrs[:-1])
        CellPosting.parse(raw)
        return raw

    @classmethod
    def parse(cls, raw: bytes) -> CellPosting:
        """The inverse of :meth:`pack`. Raises WireError for anything that is not a whole and
        plausible posting."""
        body = json_object(raw, MAX_POSTING, "a cell's posting")
        if "hosts" not in body and len(raw) > MAX_BODY:
            raise WireError(f"a cell's posting has at most {MAX_BODY} bytes, not {len(raw)}")
        try:
            epoch = natural(body.get("epoch"), 2**53, "epoch in a cell's posting")
            version = Version(epoch, lineage(body.get("lineage")))
        except ValueError as e:
            raise WireError(f"lineage in a cell's posting: {e}") from e
        anchor = body.get("anchor")
        if not isinstance(anchor, str) or not _ANCHOR.fullmatch(anchor):
            raise WireError("anchor in a cell's posting is not at most 64 hex digits")
        try:
            maddrs = parse_maddrs(body.get("maddrs"), MAX_MADDRS)
        except WireError as e:
            raise WireError(f"maddrs in a cell's posting: {e}") from e
        cell = parse_cell(body.get("cell"))
        change = natural(body.get("change"), 2**53, "change in a cell's posting")
        return cls(cell, version, anchor, change, maddrs, _hosts(body.get("hosts", {})))


def _json(p: CellPosting) -> bytes:
    body: dict[str, Any] = {
        "cell": p.cell,
        "epoch": p.version.epoch,
        "lineage": p.version.lineage,
        "anchor": p.anchor,
        "change": p.change,
        "maddrs": list(p.maddrs),
    }
    if p.hosts:
        body["hosts"] = {
            str(stage): [[h.peer, list(h.maddrs)] for h in each] for stage, each in p.hosts.items()
        }
    return json.dumps(body, separators=(",", ":")).encode("utf-8", "replace")


def dialable(maddrs: Iterable[str]) -> tuple[str, ...]:
    """Those that are multiaddrs."""
    return tuple(m for m in maddrs if len(m) <= MAX_MADDR and _MADDR.fullmatch(m))


def _hosts(body: Any) -> Mapping[int, tuple[Host, ...]]:
    """By stage. Raises WireError."""
    try:
        told = {
            int(stage): tuple(Host(PeerId(peer), tuple(maddrs)) for peer, maddrs in each)
            for stage, each in body.items()
        }
        held = [h for each in told.values() for h in each]
        fine = (
            all(str(stage) in body and 0 <= stage < 1 << 16 for stage in told)
            and all(1 <= len(each) <= MAX_HOSTS for each in told.values())
            and all(PEER.fullmatch(h.peer) and len(h.maddrs) <= HOST_MADDRS for h in held)
            and all(dialable(h.maddrs) == h.maddrs for h in held)
        )
    except (AttributeError, TypeError, ValueError) as e:
        raise WireError("hosts in a cell's posting are no hosts") from e
    if not fine:
        raise WireError(
            f"hosts in a cell's posting are not 1 to {MAX_HOSTS} peers of a stage with at most "
            f"{HOST_MADDRS} addresses each"
        )
    return told


def natural(value: Any, below: int, what: str) -> int:
    """``value``, if it is a number from 0 to ``below - 1``. Raises WireError, which names
    ``what``."""
    if type(value) is not int or not 0 <= value < below:
        raise WireError(f"{what} is not a number from 0 to {below - 1}")
    return value
