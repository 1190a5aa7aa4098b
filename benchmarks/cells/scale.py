"""Costs that grow with the number of cells: the services of the daemon in virtual time, in swarms
of 10 and 1,000 cells with ten peers each (two processes of some 6 GB that take an hour or more).
Cells are there from the beginning, as after a restart of all.

Every peer is a whole one: it trains, leads, averages with other cells, reads and posts. Bytes of
the directory are counted as a DHT has them: a reader asks the nodes that hold a key, each answers
with all records under it, a writer sends its record to each; those nodes count the same bytes.
"""

import gc
import hashlib
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.report import Report
from node.averaging.strategies.outer import OuterSettings
from node.core.ids import CellId, PeerId, first_cell
from node.core.journey import Plan
from node.dht.record import PeerEntry, Posting
from node.dht.settings import DirectorySettings
from node.dht.topics import most_writers
from node.scheduler.settings import SchedulerSettings
from node.sim.setup import LinkProfile, Setup, WorkTimes, toy_parts
from node.sim.swarm import SimSwarm
from node.sim.world.loop import bury, quiet
from testbed.fakes.memory_directory import SEAL
from testbed.swarms.unchecked import Unchecked

SIZES = (10, 1000)
ENDS = 4
REPLICAS = 3
STAGES = 2
PEERS = ENDS + STAGES * REPLICAS
WINDOW_S = 60.0
SETTLED_S, ENDS_S = 1.5 * WINDOW_S, 2.5 * WINDOW_S
"""Begin and end of the counting, in s of virtual time."""
SAMPLED = 16
"""Cells in which the leader and one follower are measured: by the functions they call in every
other cell, by their processor time in the others."""
TURN_S, TIMED = 0.002, 4
"""Virtual seconds that a swarm goes on before the others that share its process do, and the number
of these swarms that are measured. In a process with thousands of peers the processor's caches hold
nothing of a peer when its turn comes, which no daemon of its own meets. The time in a large swarm
is therefore compared with the time in small swarms that share a process with equally many peers."""
GROWTH = 1.25
Measure = Callable[..., None]
Sampled = tuple[int, PeerId]
"""A swarm's seed and one of its peers."""


@dataclass
class Counts:
    """Counts of one swarm, from `SETTLED_S` on.

    `spent`: seconds of processor time, and `calls`: functions called, by sampled peer; `links`:
    pairs of sender and receiver, in each window; `by`: kind of the largest message.
    """

    cells: int
    largest: int = 0
    by: str = ""
    handled: Counter[PeerId] = field(default_factory=Counter)
    links: defaultdict[int, set[tuple[PeerId, PeerId]]] = field(
        default_factory=lambda: defaultdict(set)
    )
    spent: defaultdict[Sampled, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[Sampled] = field(default_factory=Counter)
    events: int = 0
    reads: Counter[PeerId] = field(default_factory=Counter)
    stored: Counter[PeerId] = field(default_factory=Counter)
    fullest: tuple[str, int] = ("", 0)
    leaders: set[PeerId] = field(default_factory=set)
    epochs: int = 0
    met: int = 0
    seconds: float = 0.0

    def weighs(self, what: str, size: int) -> None:
        """A message."""
        if size > self.largest:
            self.largest = size
            self.by = what


class Quiet(Unchecked):
    """Counts plans, and checks nothing: what checkers cost is not what a daemon costs."""

    def began(self, peer: Any, plan: Plan, listener: bool) -> None:
        if plan.leader == peer.name:
            self.counts["epochs" if plan.paths else "means" if plan.outer else "other plans"] += 1


class CellSwarm(SimSwarm):
    """A swarm of `cells` cells, each with a leader of its own from the beginning."""

    def __init__(self, cells: int, seed: int = 0) -> None:
        setup = Setup(
            ends=ENDS * cells,
            stages=STAGES,
            replicas=REPLICAS * cells,
            epochs=100_000,
            parts=toy_parts(STAGES, 3),
            cell=ENDS,
            outer=OuterSettings(
                "moshpit", "state", window_s=WINDOW_S, grid=(4, 4), optimizer="nesterov"
            ),
            scheduler=SchedulerSettings("round-robin", 0.0),
            work=WorkTimes(ends_s=0.4, forward_s=1.2, step_s=0.2, unequal=1.0),
            links=LinkProfile(bandwidth=1e8),
        )
        super().__init__(setup, seed)
        self.watch = Quiet(self)
        first = first_cell(self.manifest.run_id)
        names = [first, *(_cell(n) for n in range(1, cells))]
        for stage in range(STAGES + 1):
            here = sorted(p.name for p in self.peers.values() if p.named == stage)
            for n, name in enumerate(here):
                self.peers[name].disk.cell = names[n % cells]


def rows(report: Report, root: Path, sizes: Sequence[int] = SIZES) -> None:
    """A row for each quantity: its growth from the smallest to the largest swarm.

    The largest swarm and the small ones it is compared with run at once, a process each, so that
    both meet the same load of the machine."""
    with ProcessPoolExecutor(2, get_context("spawn"), max_tasks_per_child=1) as processes:
        among = processes.submit(time_among, sizes[0], sizes[-1] // sizes[0])
        playing = [processes.submit(play, cells) for cells in reversed(sizes)]
        found = [one.result() for one in reversed(playing)]
        _times(report, found, among.result())
    for what, unit, of in QUANTITIES:
        values = [of(counts) for counts in found]
        growth = values[-1] / values[0] if values[0] else 1.0
        beside = ", ".join(
            f"{PEERS * c.cells} peers {v:.4g}{' ' + c.by if what == LARGEST else ''}"
            for c, v in zip(found, values, strict=True)
        )
        report.add(
            f"5 {what}: growth from {PEERS * sizes[0]} to {PEERS * sizes[-1]} peers",
            growth,
            "ratio",
            f"{unit}: {beside}",
            f"at most {GROWTH}",
            holds=growth <= GROWTH,
        )
    bound = DirectorySettings().max_postings + DirectorySettings().max_peers
    for counts in found:
        most = max(counts.stored.values())
        report.add(
            f"5 {PEERS * counts.cells} peers: records stored by the fullest node",
            most,
            "records",
            f"mean {fmean(counts.stored.values()):.1f}; most under one key {counts.fullest[1]} "
            f"({counts.fullest[0]}, room for {most_writers(counts.fullest[0])})",
            f"at most {bound}",
            holds=most <= bound,
        )
        report.add(
            f"5 {PEERS * counts.cells} peers: epochs of a cell, windows in which it averaged",
            counts.epochs / counts.cells,
            f"epochs in {ENDS_S - SETTLED_S:.0f} s, mean of {counts.cells} cells",
            f"{counts.met / counts.cells:.2f} means in place; simulated in {counts.seconds:.0f} s",
            "both more than 0",
            holds=counts.epochs > 0 and counts.met > 0,
        )


def _times(report: Report, found: Sequence[Counts], among: float) -> None:
    """The row of processor time: that in small swarms which share a process is ``among``."""
    values = [_spent(c) for c in found]
    peers = [PEERS * c.cells for c in found]
    beside = ", ".join(f"{n} peers {v:.4g}" for n, v in zip(peers, values, strict=True))
    growth = values[-1] / among
    report.add(
        f"5 processor time of a sampled daemon: growth from {peers[0]} to {peers[-1]} peers, as "
        "many simulated in the process",
        growth,
        "times",
        f"ms a second: {beside}; {peers[-1] // peers[0]} swarms of {peers[0]} peers {among:.4g}",
        f"at most {GROWTH}",
        holds=growth <= GROWTH,
    )


def _spent(c: Counts) -> float:
    return 1000 * fmean(c.spent.values()) / SPAN_S


def _mean(c: Counts, of: Counter[PeerId]) -> float:
    return sum(of.values()) / (PEERS * c.cells)


def _connections(c: Counts) -> Counter[PeerId]:
    """Most connections of each peer in any window."""
    most = Counter[PeerId]()
    for pairs in c.links.values():
        for peer, count in Counter(peer for pair in pairs for peer in pair).items():
            most[peer] = max(most[peer], count)
    return most


def _most_but_few(of: Counter[PeerId]) -> float:
    """Value that 99 of 100 peers do not exceed: among a hundred times as many peers the highest
    value is always higher."""
    return float(sorted(of.values())[-1 - len(of) // 100])


def _leaders(c: Counts, of: Counter[PeerId]) -> float:
    return fmean(of[p] for p in c.leaders)


LARGEST = "largest message"
SPAN_S = ENDS_S - SETTLED_S
QUANTITIES: tuple[tuple[str, str, Callable[[Counts], float]], ...] = (
    (LARGEST, "bytes", lambda c: c.largest),
    ("connections of a peer in a window, mean", "peers", lambda c: _mean(c, _connections(c))),
    (
        "connections of 99 of 100 peers in a window",
        "peers",
        lambda c: _most_but_few(_connections(c)),
    ),
    ("events a peer", "a second", lambda c: c.events / (PEERS * c.cells) / SPAN_S),
    ("bytes handled, mean of all peers", "a second", lambda c: _mean(c, c.handled) / SPAN_S),
    ("bytes handled, mean of leaders", "a second", lambda c: _leaders(c, c.handled) / SPAN_S),
    (
        "bytes handled, most of 99 of 100 peers",
        "a second",
        lambda c: _most_but_few(c.handled) / SPAN_S,
    ),
    (
        "function calls of a sampled daemon",
        "a second",
        lambda c: fmean(c.calls.values()) / SPAN_S,
    ),
    ("directory reads, mean of all peers", "a second", lambda c: _mean(c, c.reads) / SPAN_S),
    ("directory reads, mean of leaders", "a second", lambda c: _leaders(c, c.reads) / SPAN_S),
    ("directory reads, most of 99 of 100", "a second", lambda c: _most_but_few(c.reads) / SPAN_S),
)


def play(cells: int, seed: int = 0) -> Counts:
    """One swarm from its beginning to ``ENDS_S``."""
    counts = Counts(cells)
    began = time.perf_counter()
    with quiet():
        swarm = CellSwarm(cells, seed)
        swarm.world.run(SETTLED_S)
        gc.collect()
        gc.freeze()
        _count(swarm, counts)
        events = swarm.world.events
        before = Counter(swarm.watch.counts)
        reads = Counter(swarm.record_store.reads)
        writes = Counter(swarm.record_store.writes)
        swarm.world.run(ENDS_S)
        counts.events = swarm.world.events - events
        counts.epochs = swarm.watch.counts.get("epochs", 0) - before["epochs"]
        counts.met = swarm.watch.counts.get("means", 0) - before["means"]
        counts.leaders = {p.name for p in swarm.live() if p.leader is not None}
        _directory(
            swarm, counts, swarm.record_store.reads - reads, swarm.record_store.writes - writes
        )
        gc.unfreeze()
        swarm.world.close()
        bury()
    counts.seconds = time.perf_counter() - began
    return counts


def time_among(cells: int, swarms: int, seed: int = 0) -> float:
    """Milliseconds of processor time that a sampled daemon of a swarm takes a second, while
    `swarms` swarms of this size are simulated in one process."""
    counts = Counts(cells)
    with quiet():
        every = [CellSwarm(cells, seed + n) for n in range(swarms)]
        _together(every, 0.0, SETTLED_S)
        gc.collect()
        gc.freeze()
        for swarm in every[:TIMED]:
            _sample(swarm, counts)
        _together(every, SETTLED_S, ENDS_S)
        gc.unfreeze()
        bury()
    return _spent(counts)


def _together(swarms: Sequence[SimSwarm], begins: float, ends: float) -> None:
    """All from one virtual time to another, in turns."""
    for turn in range(1, round((ends - begins) / TURN_S) + 1):
        for swarm in swarms:
            swarm.world.run(begins + turn * TURN_S)


def _count(swarm: SimSwarm, counts: Counts) -> None:
    """Count messages and measure some peers from now on."""
    links = swarm.links
    net = swarm.net
    travel = links.travel
    weigh = net.weigh

    def travels(a: PeerId, b: PeerId, nbytes: int, now: float) -> float:
        if nbytes:
            counts.handled[a] += nbytes
            counts.handled[b] += nbytes
        counts.links[int(now // WINDOW_S)].add((a, b) if a < b else (b, a))
        return travel(a, b, nbytes, now)

    def weighs(method: str, message: Any) -> int:
        size = weigh(method, message)
        counts.weighs(method, size)
        return size

    links.travel, net.weigh = travels, weighs  # type: ignore[method-assign]
    _sample(swarm, counts)


def _sample(swarm: SimSwarm, counts: Counts) -> None:
    """Take the processor time and the calls of some peers from now on."""
    world = swarm.world
    push = swarm.world.push
    cells = sorted({p.training.cell for p in swarm.live()})[:SAMPLED]
    sampled: dict[Any, Measure] = {}
    for number, cell in enumerate(cells):
        there = [p for p in swarm.live() if p.training.cell == cell]
        measure = _calls if number % 2 else _time
        for peer in (*(p for p in there if p.leader is not None), there[-1]):
            sampled[peer.loop] = partial(measure, counts, (swarm.seed, peer.name))

    def measured(handle: Any) -> Any:
        measure = sampled.get(handle.loop)
        if measure is not None and handle.callback is not None:
            handle.callback = partial(measure, handle.callback)
        return handle

    world.push = lambda *args, **more: measured(push(*args, **more))
    for loop, measure in sampled.items():
        loop.call_soon = partial(_call_soon, loop.call_soon, measure)


def _call_soon(
    call_soon: Any, measure: Measure, callback: Any, *args: Any, context: Any = None
) -> Any:
    return call_soon(partial(measure, callback), *args)


def _time(counts: Counts, peer: Sampled, callback: Any, *args: Any) -> None:
    """Call it, and add its processor time to what the peer has spent."""
    began = time.thread_time()
    try:
        callback(*args)
    finally:
        counts.spent[peer] += time.thread_time() - began


def _calls(counts: Counts, peer: Sampled, callback: Any, *args: Any) -> None:
    """Call it, and count the functions that are called."""
    found = [0]

    def one(frame: Any, event: str, arg: Any) -> None:
        found[0] += event in ("call", "c_call")

    sys.setprofile(one)
    try:
        callback(*args)
    finally:
        sys.setprofile(None)
        counts.calls[peer] += found[0]


def _directory(
    swarm: SimSwarm,
    counts: Counts,
    reads: Counter[tuple[PeerId, str]],
    writes: Counter[tuple[PeerId, str]],
) -> None:
    """Add what the directory costs its readers, writers and holders, and what these store."""
    dht = swarm.record_store
    readers = _by_topic(reads)
    writers = _by_topic(writes)
    for topic in sorted({topic for _, topic in (*dht.reads, *dht.writes)}):
        there = dht.under(topic)
        sizes = [SEAL + len(_body(entry)) for entry in there]
        holders = dht.ring.holders(topic)
        for holder in holders:
            counts.stored[holder] += len(there)
        if len(there) > counts.fullest[1] and topic != "peers":
            counts.fullest = topic, len(there)
        answer = sum(sizes)
        record = max(sizes, default=SEAL)
        counts.weighs(topic, answer)
        for asked, size in ((readers, answer), (writers, record)):
            for peer, times in asked[topic]:
                for holder in holders:
                    counts.handled[peer] += times * size
                    counts.handled[holder] += times * size
    for (peer, _), times in reads.items():
        counts.reads[peer] += times


def _by_topic(
    asked: Counter[tuple[PeerId, str]],
) -> defaultdict[str, list[tuple[PeerId, int]]]:
    """Readers with their number of reads, by topic."""
    found: defaultdict[str, list[tuple[PeerId, int]]] = defaultdict(list)
    for (peer, topic), times in asked.items():
        found[topic].append((peer, times))
    return found


def _body(entry: PeerEntry | Posting) -> bytes:
    if isinstance(entry.body, bytes):
        return entry.body
    # Simulated peers have short names, which a real record would not be packed with.
    return json.dumps(asdict(entry.body), separators=(",", ":")).encode()


def _cell(number: int) -> CellId:
    return CellId(hashlib.sha256(f"cell {number}".encode()).hexdigest()[:16])
