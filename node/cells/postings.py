"""What a cell posts for a window: compact JSON, checked field by field when it comes from outside.
Its leader is the writer of the record. Also the hosts of a cell, as its leader tells them to those
who ask it."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from node.core.errors import WireError
from node.core.ids import CellId
from node.core.journey import Host, Version, lineage
from node.core.numbers import cell_name
from node.dht.record import MAX_MADDR, json_object, parse_maddrs

MAX_BODY = 1024
"""Bytes of a packed posting."""
MAX_MADDRS = 4
"""Addresses at which the leader of a cell can be dialled."""
MAX_STAGE = 1 << 16
PEER = re.compile(r"[0-9A-Za-z-]{1,64}")
"""What a PeerId looks like; whether it is a key shows where its signature is checked, or when it is
dialled."""
_ANCHOR = re.compile(r"[0-9a-f]{0,64}")
_MADDR = re.compile(r"/[!-~]+")


Hosts = Mapping[int, tuple[Host, ...]]
"""By stage: who hosts it in a cell."""


@dataclass(frozen=True, slots=True)
class CellFacts:
    """What the leader of ``cell`` says of it in a window.

    ``version`` is what the cell gives, ``anchor`` the hash of its anchor as at most 64 hex digits
    (empty where anchors do not matter), ``change`` the number of the owner's change that is in
    force, ``hosts`` where others can fetch each stage (8 peers with 4 addresses each are told),
    ``maddrs`` where the leader can be dialled, of which 4 are told.
    """

    cell: CellId
    version: Version
    hosts: Hosts
    anchor: str = ""
    change: int = 0
    maddrs: tuple[str, ...] = ()


def pack_posting(about: CellFacts) -> bytes:
    """What is posted: JSON, with as many addresses of the leader as fit, which is asked for the
    hosts. Raises WireError when others would refuse it."""
    told = replace(about, maddrs=about.maddrs[:MAX_MADDRS])
    while len(raw := _json(told)) > MAX_BODY and told.maddrs:
        told = replace(told, maddrs=told.maddrs[:-1])
    parse_posting(raw)
    return raw


def parse_posting(raw: bytes) -> CellFacts:
    """What a cell has posted, without ``hosts``. Raises WireError for anything that is not a whole
    and plausible posting."""
    body = json_object(raw, MAX_BODY, "a cell's posting")
    version = parse_version(body, "a cell's posting")
    anchor = body.get("anchor")
    if not isinstance(anchor, str) or not _ANCHOR.fullmatch(anchor):
        raise WireError("anchor in a cell's posting is not at most 64 hex digits")
    maddrs = parse_maddrs(body.get("maddrs"), MAX_MADDRS)
    cell = cell_name(body.get("cell"))
    change = natural(body.get("change"), 2**53, "change in a cell's posting")
    return CellFacts(cell, version, {}, anchor, change, maddrs)


def _json(p: CellFacts) -> bytes:
    body = {
        "cell": p.cell,
        "epoch": p.version.epoch,
        "lineage": p.version.lineage,
        "anchor": p.anchor,
        "change": p.change,
        "maddrs": list(p.maddrs),
    }
    return json.dumps(body, separators=(",", ":")).encode("utf-8", "replace")


def dialable(maddrs: Iterable[str]) -> tuple[str, ...]:
    """Those that are multiaddrs."""
    return tuple(m for m in maddrs if len(m) <= MAX_MADDR and _MADDR.fullmatch(m))


def cut(hosts: Hosts, *most: tuple[int, int]) -> Iterator[Hosts]:
    """For each of ``most`` (peers of a stage, addresses of a peer) no more than these of every
    stage that has a peer."""
    for peers, maddrs in most:
        yield {
            stage: tuple(Host(h.peer, dialable(h.maddrs)[:maddrs]) for h in each[:peers])
            for stage, each in sorted(hosts.items())
            if each
        }


def checked_hosts(hosts: Hosts, most: int, maddrs: int) -> Hosts:
    """What others say of the hosts of a cell, with 1 to ``most`` peers of a stage and at most
    ``maddrs`` addresses each. Raises WireError."""
    held = [h for each in hosts.values() for h in each]
    fine = (
        all(0 <= stage < MAX_STAGE and 1 <= len(each) <= most for stage, each in hosts.items())
        and all(PEER.fullmatch(h.peer) and len(h.maddrs) <= maddrs for h in held)
        and all(dialable(h.maddrs) == h.maddrs for h in held)
    )
    if not fine:
        raise WireError(
            f"hosts of a cell are not 1 to {most} peers of a stage with at most {maddrs} addresses "
            "each"
        )
    return hosts


def parse_version(body: Mapping[str, Any], what: str) -> Version:
    """The version in ``what`` a cell has posted. Raises WireError."""
    epoch = natural(body.get("epoch"), 2**53, f"epoch in {what}")
    return Version(epoch, lineage(body.get("lineage")))


def natural(value: Any, below: int, what: str) -> int:
    """``value``, if it is a number from 0 to ``below - 1``. Raises WireError, which names
    ``what``."""
    if type(value) is not int or not 0 <= value < below:
        raise WireError(f"{what} is not a number from 0 to {below - 1}")
    return value
