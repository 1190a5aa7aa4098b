"""3: caps on what a peer sends and receives, and the forecast of the consent sheet, by the counters
of interfaces.

Each daemon runs on a host of its own (a network namespace), so its interface counts all that it and
its p2pd send and receive.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.report import Report
from node.app.capacity import forecast
from testbed.daemons.fleet import MOVE_S, START_S, WORKING, Box, Hang, Host, Peer
from testbed.networks.hosts import HostPeer
from testbed.networks.internet import Internet, why_not

WINDOW_S = 60.0
WARM_S = 5.0
CAP = 500_000
"""Cap in bytes a second: at most a tenth of this run's traffic without one."""
MOST = 1.05
LEAST = 0.8
OFF = 0.2
MODEL = {
    "model__layers": 2,
    "model__d_model": 128,
    "model__heads": 4,
    "model__kv_heads": 2,
    "model__d_ff": 256,
    "model__seq_len": 128,
    "pipeline__micro_batch": 4,
    "training__target_batch": 64,
    "training__epochs": 100_000,
    "training__min_replicas": 1,
    "training__rebalance_every_s": 0.0,
}
"""Little work, much traffic: 16 micro-batches of 256 KiB an epoch."""


@dataclass(frozen=True)
class Case:
    """One transfer between peers without a model.

    `gives`, `fetches`: settings of the two peers, and kinds of their hosts; `narrow`: the peer
    whose interface is watched; `way`: the direction; `path`: the path on which they must reach each
    other, past libp2p if it is not direct.
    """

    path: str
    narrow: str
    way: str
    gives: Mapping[str, Any] = field(default_factory=dict)
    fetches: Mapping[str, Any] = field(default_factory=dict)
    relays: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "open"


WITHOUT_A_MODEL = {
    "max_up, direct": Case("direct", "gives", "sent", gives={"max_up": CAP}),
    "max_down, direct": Case("direct", "fetches", "received", fetches={"max_down": CAP}),
    "max_up, called back": Case(
        "tunnel", "gives", "sent", gives={"max_up": CAP, "force_tunnel": True}
    ),
    "max_down, called back": Case(
        "tunnel", "fetches", "received", gives={"force_tunnel": True}, fetches={"max_down": CAP}
    ),
    "max_up, relaying for others": Case(
        "relayed", "hub", "sent", relays={"max_up": CAP}, kind="home"
    ),
    "max_up, relayed": Case("relayed", "gives", "sent", gives={"max_up": CAP}, kind="home"),
}


@dataclass(frozen=True)
class Seen:
    """Counts of an interface between two looks, and epochs of the swarm meanwhile."""

    sent: int
    received: int
    seconds: float
    epochs: int


def rows(report: Report, root: Path) -> None:
    if reason := why_not():
        report.add("3 caps and forecasts", 0, "", f"not measured: {reason}", holds=False)
        return
    parts: dict[str, Callable[[Path], None]] = {
        "--max-up": lambda to: capped(report, to, "--max-up", ("--max-up", "4Mbit")),
        "--max-down": lambda to: capped(report, to, "--max-down", ("--max-down", "4Mbit")),
        "--max-up, called back": lambda to: capped(
            report, to, "--max-up, called back", ("--max-up", "4Mbit"), called_back=True
        ),
        "forecast": lambda to: predicted(report, to),
    }
    for name, case in WITHOUT_A_MODEL.items():
        parts[f"without a model, {name}"] = partial(moved, report, name=name, case=case)
    for number, (name, part) in enumerate(parts.items()):
        try:
            part(root / str(number))
        except (Hang, RuntimeError, TimeoutError) as e:
            report.add(f"3 {name} did not come to its end: {e}"[:300], 0, "", holds=False)


def capped(
    report: Report, root: Path, name: str, words: tuple[str, ...], called_back: bool = False
) -> None:
    """One peer of a block stage with a cap; it binds, since every micro-batch goes through that
    peer. ``called_back``: no peer announces an address for gRPC, because a peer sends over its
    own connections to the others, whose addresses decide the way."""
    everybody = ("--force-tunnel",) * called_back
    more = {0: everybody, 1: (*words, *everybody), 2: everybody}
    with Lab(root, (1, 1, 1), more) as lab:
        narrow = lab.peers[1]
        seen = lab.watch()[narrow.label]
        used = seen.sent if "up" in name else seen.received
        share = used / seen.seconds / CAP
        ways = dict(narrow.status().paths_to)
        # The last word on each line to another peer.
        past = {e.get("peer"): bool(e.get("bypass")) for e in narrow.told() if e.kind == "line-up"}
    as_named = not called_back or set(past.values()) == {True}
    report.add(
        f"3 {name}: used of the cap",
        share,
        "x",
        f"4 Mbit/s over {seen.seconds:.0f} s, {ways}, {sum(past.values())} past libp2p",
        f"{LEAST} to {MOST}",
        holds=LEAST <= share <= MOST and as_named,
    )
    report.add(
        f"3 {name}: epochs committed meanwhile",
        seen.epochs,
        "epochs",
        "",
        "1",
        holds=seen.epochs >= 1,
    )


def predicted(report: Report, root: Path) -> None:
    """The forecast beside what peers of every role moved, without a cap."""
    nodes = (1, 2, 1)
    with Lab(root, nodes) as lab:
        found = lab.watch()
        for peer in lab.peers:
            seen = found[peer.label]
            stage = peer.status().stage
            said = forecast(lab.box.manifest, stage, dict(enumerate(nodes))).over(
                seen.epochs, seen.seconds, leads=stage == 0
            )
            for way, expected, counted in (
                ("up", said[0], seen.sent),
                ("down", said[1], seen.received),
            ):
                ratio = expected / counted
                text = (
                    f"{expected / 1e6:.1f} MB said, {counted / 1e6:.1f} counted, {seen.epochs} "
                    f"epochs in {seen.seconds:.0f} s"
                )
                report.add(
                    f"3 forecast over counted, {peer.label} {way}",
                    ratio,
                    "ratio",
                    text,
                    f"within {OFF:.0%}",
                    holds=abs(ratio - 1) <= OFF,
                )


def moved(report: Report, root: Path, name: str, case: Case) -> None:
    """One peer fetches from another as fast as it can, by every way there is; pings go on
    meanwhile."""
    with Internet({"hub": "open", "gives": case.kind, "fetches": case.kind}) as net:
        reach = {"punch": False}
        hub = HostPeer(net, "hub", root / "hub", settings=dict(case.relays), reach=reach)
        gives = HostPeer(
            net, "gives", root / "gives", join=[hub.door], settings=dict(case.gives), reach=reach
        )
        fetches = HostPeer(
            net,
            "fetches",
            root / "fetches",
            join=[hub.door],
            settings=dict(case.fetches),
            reach=reach,
        )
        assert gives.facts
        deadline = time.monotonic() + START_S
        while (
            not _is_reached(way := fetches.do(do="way", peer=gives.peer), case)
            and time.monotonic() < deadline
        ):
            time.sleep(1.0)
        fetches.tell(do="fetch", peer=gives.peer, bytes=round(2 * CAP * (WINDOW_S + WARM_S)))
        time.sleep(WARM_S)
        before = counters(net, case.narrow)
        began = time.monotonic()
        trips = []
        while time.monotonic() < began + WINDOW_S:
            trips.append(gives.do(do="way", peer=hub.peer).get("rtt_s", float("inf")))
            time.sleep(1.0)
        after = counters(net, case.narrow)
        seconds = time.monotonic() - began
    share = (after[case.way == "received"] - before[case.way == "received"]) / seconds / CAP
    path = way.get("path") or way.get("error", "no path")
    past = ", past libp2p" if way.get("bypass") else ""
    text = f"{path}{past}; {len(trips)} pings meanwhile, longest {max(trips):.2f} s"
    report.add(
        f"3 without a model, {name}: used of the cap",
        share,
        "x",
        text,
        f"{LEAST} to {MOST}",
        holds=LEAST <= share <= MOST and _is_reached(way, case),
    )


def _is_reached(way: Mapping[str, Any], case: Case) -> bool:
    """True for a way on the path of the case, by a connection that stays."""
    return way.get("path") == case.path and way["bypass"] == (case.path != "direct")


def counters(net: Internet, host: str) -> tuple[int, int]:
    """Bytes that the interface of a host has sent and received."""
    said = net.run(
        host, ["cat", *(f"/sys/class/net/eth0/statistics/{way}_bytes" for way in ("tx", "rx"))]
    ).stdout.split()
    if len(said) != 2:
        raise Hang(f"no counters on host {host}")
    return int(said[0]), int(said[1])


class Lab:
    """A swarm of ``nodes``, each daemon on a host of its own on one public segment. ``more``: words
    for some of them, by number."""

    def __init__(
        self, root: Path, nodes: tuple[int, ...], more: Mapping[int, tuple[str, ...]] | None = None
    ) -> None:
        self.net = Internet({f"h{i}": "open" for i in range(sum(nodes))})
        self._root = root
        self._nodes = nodes
        self._more = more or {}
        self._count = sum(nodes)
        self.peers: list[Peer] = []

    def __enter__(self) -> "Lab":
        self.net.__enter__()
        hosts = [self.net[f"h{i}"] for i in range(self._count)]
        self.box = Box(self._root, tuple(Host(h.address, h.through) for h in hosts))
        try:
            self._root.mkdir(parents=True)
            self.peers = self.box.swarm(self._nodes, **MODEL)
            for number, peer in enumerate(self.peers):
                peer.child.arguments = (*peer.child.arguments, *self._more.get(number, ()))
                peer.start()
        except BaseException:  # also a Ctrl-C: no namespace stays
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.box.clean_up()
        self.net.close()

    def watch(self) -> dict[str, Seen]:
        """Counts of every peer's interface, from one commit to the first one after WINDOW_S."""
        for peer in self.peers:
            self.box.wait(
                f"{peer.label} in a plan",
                lambda p=peer: p.status().state in WORKING,
                2 * START_S,
                (peer,),
            )
        first = self._next(self.box.epoch() + 1)
        before = self._counters()
        began = time.monotonic()
        while time.monotonic() < began + WINDOW_S:
            time.sleep(0.2)
        last = self._next(self.box.epoch())
        after = self._counters()
        seconds = time.monotonic() - began
        return {
            p.label: Seen(
                after[i][0] - before[i][0], after[i][1] - before[i][1], seconds, last - first
            )
            for i, p in enumerate(self.peers)
        }

    def _next(self, epoch: int) -> int:
        """Wait for a commit after ``epoch``; the epoch then."""

        def reached() -> int | None:
            now = self.box.epoch()
            return now if now > epoch else None

        return self.box.wait(f"epoch {epoch + 1}", reached, 2 * MOVE_S)

    def _counters(self) -> list[tuple[int, int]]:
        return [counters(self.net, f"h{i}") for i in range(self._count)]
