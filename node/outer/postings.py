"""The posting of a cell for a window: compact JSON, checked field by field when it comes from
outside. The cell's leader is the writer of the record. Also the hosts of a cell, which its leader
tells to leaders that ask for them."""

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
"""Form of a PeerId. A check of a signature, or a dial, shows if a key belongs to it."""
_ANCHOR = re.compile(r"[0-9a-f]{0,64}")
_MADDR = re.compile(r"/[!-~]+")


Hosts = Mapping[int, tuple[Host, ...]]
"""The hosts of each stage in a cell."""


@dataclass(frozen=True, slots=True)
class CellFacts:
    """Facts about a cell in a window, as its leader reports them.

    ``version`` is the version that the cell offers; ``anchor`` the hash of its anchor as at most 64
    hex digits (empty where anchors do not matter); ``change`` the number of the owner's change in
    force; ``hosts`` the peers from which others can fetch each stage (at most 8 peers with 4
    addresses each are told); ``maddrs`` the addresses of the leader, at most 4 of which are told.
    """

    cell: CellId
    version: Version
    hosts: Hosts
    anchor: str = ""
    change: int = 0
    maddrs: tuple[str, ...] = ()


def pack_posting(about: CellFacts) -> bytes:
    """The posting as JSON, with at most 4 addresses of the leader, and fewer if they do not fit.
    The hosts are not in it: other cells ask the leader for them. Raises WireError if others would
    refuse the posting."""
    told = replace(about, maddrs=about.maddrs[:MAX_MADDRS])
    while len(raw := _json(told)) > MAX_BODY and told.maddrs:
        told = replace(told, maddrs=told.maddrs[:-1])
    parse_posting(raw)
    return raw


def parse_posting(raw: bytes) -> CellFacts:
    """The facts in a cell's posting, without ``hosts``. Raises WireError if the posting is not
    complete and plausible."""
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
    """The addresses that are multiaddrs."""
    return tuple(m for m in maddrs if len(m) <= MAX_MADDR and _MADDR.fullmatch(m))


def cut(hosts: Hosts, *most: tuple[int, int]) -> Iterator[Hosts]:
    """The hosts cut to each limit of ``most`` (peers of a stage, addresses of a peer) in turn.
    Stages without peers are left out."""
    for peers, maddrs in most:
        yield {
            stage: tuple(Host(h.peer, dialable(h.maddrs)[:maddrs]) for h in each[:peers])
            for stage, each in sorted(hosts.items())
            if each
        }


def checked_hosts(hosts: Hosts, most: int, maddrs: int) -> Hosts:
    """``hosts``, if each stage has 1 to ``most`` peers and each peer at most ``maddrs`` addresses.
    Raises WireError otherwise."""
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
    """The version in the posting ``body``, which errors call ``what``. Raises WireError."""
    epoch = natural(body.get("epoch"), 2**53, f"epoch in {what}")
    return Version(epoch, lineage(body.get("lineage")))


def natural(value: Any, below: int, what: str) -> int:
    """``value``, if it is a number from 0 to ``below - 1``. Raises WireError that names ``what``
    otherwise."""
    if type(value) is not int or not 0 <= value < below:
        raise WireError(f"{what} is not a number from 0 to {below - 1}")
    return value
