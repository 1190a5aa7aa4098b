"""Speed of pairs of peers that cannot dial each other, beside a pair that can: hosts in network
namespaces, behind routers, with daemons' transports.

Part 5 of ``python -m benchmarks.device`` (root, iproute2, nftables). Direct: two hosts without a
router. Reversed: from a host behind a router to one without. Punched: both behind routers that keep
ports. Relayed: both behind routers that give every connection another port. All pairs are connected
at the same time, and each moves its bytes in turn, so that a slow moment of the machine meets all.
A pair that stays on libp2p is a row that does not hold.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import Report
from benchmarks.shared.waiting import until
from testbed.daemons.fleet import Hang
from testbed.networks.hosts import HostPeer
from testbed.networks.internet import Internet, why_not

ITEM = "5"
MOVED = 64 << 20
TIMES = 5
CONNECTED_S = 60.0
HOSTS = {
    "hub": "open",
    "open": "open",
    "home": "home",
    "house": "home",
    "moving": "symmetric",
    "roaming": "symmetric",
}


@dataclass(frozen=True)
class Pair:
    """A kind of connection: the host that fetches, the host that sends, and the least speed,
    relative to the direct pair's."""

    path: str
    here: str
    there: str
    least: float = 0.0


DIRECT = Pair("direct", "hub", "open")
PAIRS = (
    DIRECT,
    Pair("reversed", "hub", "home", 0.8),
    Pair("punched", "home", "house", 0.8),
    Pair("relayed", "moving", "roaming", 0.6),
)


def rows(report: Report, root: Path) -> None:
    """Measure and add the rows. Raises Hang for a pair that does not connect as it should."""
    if why := why_not():
        report.add(f"{ITEM} pairs behind routers", 0, "pairs", why, f"{len(PAIRS)}", holds=False)
        return
    with Internet(HOSTS) as net:
        hub = HostPeer(net, "hub", root / "hub")
        peers = {"hub": hub}
        for name in HOSTS:
            if name != "hub":
                peers[name] = HostPeer(net, name, root / name, join=[hub.door])
        for pair in PAIRS:
            took = wait_for(pair, peers)
            report.add(f"{ITEM} {pair.path}: connected as it stays", round(took, 1), "s")
        seconds = {pair: list[float]() for pair in PAIRS}
        for _ in range(TIMES):
            for pair in PAIRS:
                seconds[pair].append(moved(pair, peers))
        usual = median(seconds[DIRECT])
        for pair in PAIRS:
            _add(report, pair, seconds[pair], usual)


def _add(report: Report, pair: Pair, seconds: list[float], usual: float) -> None:
    """Add the row of a pair."""
    took = median(seconds)
    share = usual / took
    every = ", ".join(f"{s:.3f}" for s in seconds)
    target = ""
    holds = None
    if pair.least:
        target = f">= {pair.least}"
        holds = share >= pair.least
    report.add(
        f"{ITEM} {pair.path}: speed of {MOVED >> 20} MiB, of the direct speed",
        round(share, 3),
        "x",
        f"{MOVED / took / 2**20:.0f} MiB/s; seconds {every}",
        target,
        holds,
    )


def wait_for(pair: Pair, peers: dict[str, HostPeer]) -> float:
    """Seconds until the pair is connected on its path, past libp2p. Raises Hang."""
    here = peers[pair.here]
    there = peers[pair.there].peer
    way: dict[str, Any] = {}

    def connected() -> bool:
        way.clear()
        way.update(here.do(do="way", peer=there))
        return way.get("path") == pair.path and way["bypass"] == (pair is not DIRECT)

    try:
        return until(connected, CONNECTED_S, time.monotonic())
    except Hang as e:
        raise Hang(f"no {pair.path} connection past libp2p, {e}: {way}") from e


def moved(pair: Pair, peers: dict[str, HostPeer]) -> float:
    """Seconds until all bytes arrived. Raises Hang if they did not arrive, or over another
    connection."""
    got = peers[pair.here].do(do="fetch", peer=peers[pair.there].peer, bytes=MOVED)
    if got.get("bytes") != MOVED or got["path"] != pair.path:
        raise Hang(f"{pair.path}: {got}")
    return got["seconds"]
