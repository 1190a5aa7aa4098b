"""Many daemons on two cores: what they cost while they wait, and that slow is not dead while they
train.

    python -m benchmarks.firsthour --only 2        # a quarter of an hour
    CROWD_SECONDS=60 CROWD_PEERS=12 python -m benchmarks.firsthour --only 2

All run the demo's model, one thread each, at their default niceness and settings. Idle: they wait
for one peer more than there is. In training nobody is killed, so that every death is a false one;
an epoch is lost when its plan had to be made again.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import psutil

from benchmarks.report import Report
from node.manifest import Manifest
from testbed.daemons.books import LEADING, Books
from testbed.daemons.fleet import TINY, WORKING, Box, Hang, Peer
from testbed.daemons.told import Chronicle, Told

SECONDS = float(os.environ.get("CROWD_SECONDS", "600"))
PEERS = int(os.environ.get("CROWD_PEERS", "24"))
IDLE = (8, PEERS)
IDLE_S = min(60.0, SECONDS)
SETTLE_S, QUIET_S = min(30.0, SECONDS), min(90.0, SECONDS)
"""After the last one is there, before training is judged, and before idle cost is measured:
newcomers make work for all."""
START_S = 600.0
"""For all of them to load on two cores, one after the other."""
LOST = "peer-lost"
DESTROYED = "Task was destroyed but it is pending"
FAILED = ("task-failed", "task-died")


def rows(report: Report, root: Path) -> None:
    costs = {count: idle(report, root / f"idle-{count}", count) for count in IDLE}
    if len(costs) > 1:
        (few, less), (many, more) = costs.items()
        each = {name: (more[name] - less[name]) / max(1, many - few) for name in less}
        said = ", ".join(f"{name} {value * 100:+.4f} %" for name, value in each.items())
        report.add(
            "2 growth of the idle cost for each peer more",
            max(each.values()) * 100,
            "% of a core",
            said,
        )
    train(report, root / "train")


# ------------------------------------------------------------ waiting


def idle(report: Report, root: Path, count: int) -> dict[str, float]:
    """Shares of a core that a daemon and its p2pd take while they wait: the median of all, by
    name."""
    with crowd(root, count, training__min_replicas=count) as (box, peers):
        began = time.monotonic()
        launch(box, peers, lambda p: p.status().state in ("waiting", "ready"))
        started_s = time.monotonic() - began
        time.sleep(QUIET_S)
        before = spent(peers)
        at = time.monotonic()
        time.sleep(IDLE_S)
        after = spent(peers)
        seconds = time.monotonic() - at
    shares = {
        name: [(after[name][i] - before[name][i]) / seconds for i in range(count)] for name in after
    }
    for name, each in shares.items():
        said = (
            f"mean {mean(each) * 100:.2f}, most {max(each) * 100:.2f} over {seconds:.0f} s; all "
            f"were there after {started_s:.0f} s"
        )
        limit = count >= PEERS
        report.add(
            f"2 idle {name}, {count} peers",
            median(each) * 100,
            "% of a core",
            said,
            "1 %" if limit else "",
            holds=median(each) <= 0.01 if limit else None,
        )
    return {name: median(each) for name, each in shares.items()}


def spent(peers: list[Peer]) -> dict[str, list[float]]:
    """Processor seconds so far, of every daemon and of every p2pd. Raises Hang when one has
    ended."""
    found: dict[str, list[float]] = {"daemon": [], "p2pd": []}
    for peer in peers:
        try:
            p2pd = peer.p2pd()
            for name, process in (("daemon", psutil.Process(peer.pid)), ("p2pd", p2pd)):
                times = process.cpu_times() if process else None
                found[name].append(times.user + times.system if times else 0.0)
        except psutil.Error as e:
            raise Hang(f"{peer.label} has ended: {peer.child.tail(5)}") from e
    return found


# ------------------------------------------------------------ training


def train(report: Report, root: Path) -> None:
    with crowd(root, PEERS, training__epochs=1_000_000, training__rebalance_every_s=0.0) as (
        box,
        peers,
    ):
        chronicle = Chronicle()
        for peer in peers:
            chronicle.follow(peer.label, peer.events_path)
        try:
            launch(box, peers, lambda p: p.status().state in WORKING)
            time.sleep(SETTLE_S)
            since = time.time()
            epoch = box.epoch()
            time.sleep(SECONDS)
            until = time.time()
            done = box.epoch() - epoch
            judge(report, [e for e in chronicle.read() if e.at <= until], since, until, done, peers)
        finally:
            chronicle.close()


def judge(
    report: Report, told: list[Told], since: float, until: float, done: int, peers: list[Peer]
) -> None:
    """The rows about a story in which nobody was killed."""
    later = [e for e in told if e.at >= since]
    minutes = (until - since) / 60
    about = f"{len(peers)} daemons, {minutes:.1f} min"
    books = Books(told)
    before = Books([e for e in told if e.at < since])
    lost = books.losses().since(before.losses())
    deaths = [e for e in later if e.kind == LOST]
    silent = sum(e.kind == "leader-silent" for e in later)
    leaders = sum(e.kind == LEADING for e in later)
    repaired = sum(e.kind == "round-repaired" for e in later)
    report.add(
        "2 epochs committed",
        done,
        "",
        f"{about}; {done / minutes:.1f} a minute",
        "more than 0",
        holds=done > 0,
    )
    report.add(
        "2 false deaths", len(deaths), "", f"{about}; {_commonest(deaths)}", "0", holds=not deaths
    )
    report.add(
        "2 changes of leader",
        leaders,
        "",
        f"{about}; {silent} times a leader was called silent",
        "0",
        holds=not leaders,
    )
    report.add(
        "2 epochs lost",
        lost.epochs,
        "",
        f"{about}; {repaired} rounds repaired",
        "0",
        holds=not lost.epochs,
    )
    destroyed = sum(p.said().count(DESTROYED) for p in peers)
    destroyed += sum(DESTROYED in e.text for e in told)
    failed = [e for e in told if e.kind in FAILED]
    report.add(
        "2 tasks destroyed pending",
        destroyed,
        "",
        f"{about}, from the start",
        "0",
        holds=not destroyed,
    )
    report.add(
        "2 tasks that failed",
        len(failed),
        "",
        f"{about}, from the start; {_commonest(failed)}",
        "0",
        holds=not failed,
    )
    early = sum(e.kind == LOST for e in told) - len(deaths)
    report.add(
        "2 false deaths while they start", early, "", f"{len(peers)} daemons load on two cores"
    )


def _commonest(events: list[Told]) -> str:
    return events[0].text[:120] if events else "none"


# ------------------------------------------------------------ the crowd


@contextlib.contextmanager
def crowd(root: Path, count: int, **changes: Any) -> Iterator[tuple[Box, list[Peer]]]:
    """`count` daemons of the demo's model over its ends and stages, none started; all are ended
    afterwards."""
    root.mkdir(parents=True)
    demo = Manifest.default_demo()
    shape = {
        name.replace(".", "__"): getattr(getattr(demo, section), key)
        for name in TINY
        for section, key in [name.split(".")]
    }
    box = Box(root, settings=())
    stages = 1 + demo.pipeline.stages
    nodes = tuple(count // stages + (i < count % stages) for i in range(stages))
    try:
        made = box.swarm(nodes, **{**shape, "data__source": TINY["data.source"], **changes})
        # As a user's own: nothing that makes a test quick.
        plain = {"TUTTI_DIRECTORY_REFRESH_S": "5", "TUTTI_NICE": "10"}
        peers = [replace(peer, environment={**peer.environment, **plain}) for peer in made]
        box.made = {peer.label: peer for peer in peers}
        yield box, peers
    except Hang:
        print(box.story()[-6000:])
        raise
    finally:
        box.clean_up()


def launch(box: Box, peers: list[Peer], ready: Any) -> None:
    """Start them, a few at a time, for two cores cannot load torch two dozen times at once. Raises
    Hang."""
    for begin in range(0, len(peers), 4):
        for peer in peers[begin : begin + 4]:
            peer.start()
        for peer in peers[begin : begin + 4]:
            box.wait(
                f"{peer.label} to answer",
                lambda p=peer: p.status().state not in ("", "starting"),
                START_S,
                (peer,),
            )
    for peer in peers:
        box.wait(f"{peer.label} to be ready", lambda p=peer: ready(p), START_S, (peer,))
