"""Fourteen daemons in three cells of four, four and six over a wide-area network: epochs of every
cell with planned paths and a third of the block stages left out, beside all stages, planned and in
turns, and beside one cell of all fourteen in turns; windows between the cells; the optimizer's
bytes of a peer. The fourteen places are SkipPipe's setting A, with its bandwidths over `SCALE`, and
a block stage has memory for two micro-batches. Needs root.

Cells that divide keep near peers together, but chance decides between two that are equally near. To
compare the same cells with each other, every cell is moved to its places of `CELLS` when it has
formed, except under the setting "near", where the cells stay where they are.
"""

import contextlib
import sys
import time
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks import live_paths
from benchmarks.report import ROOT, Report
from node.manifest import Manifest
from node.model.cost import stash_bytes
from testbed.daemons.books import COMMITTED, PLANNED
from testbed.daemons.fleet import Box, Hang, Peer
from testbed.daemons.told import Chronicle, Told
from testbed.networks.wan import Wan, why_not

CELLS = (
    (("Canada",), ("Iowa",), ("LA",), ("Canada",)),
    (("Belgium",), ("London",), ("NL",), ("Belgium",)),
    (("Taiwan",), ("Oregon", "Australia"), ("Singapore", "Germany"), ("Japan",)),
)
"""The fourteen places of setting A, by cell and stage. Near ones are in a cell; which of them hosts
which stage was searched for short plans with a third of the stages left out. Two cells divide off,
and one is left."""
SIZES = [sum(map(len, cell)) for cell in CELLS]
NODES = tuple(sum(map(len, stage)) for stage in zip(*CELLS, strict=True))
SCALE = 400.0
"""Published bandwidth over ours, once the cells have formed: so slow that two cores are mostly
idle."""
HELD, IN_FLIGHT = 2, 8
"""Micro-batches that a block stage has memory for, and the most that an ends peer, which keeps no
activations of layers, has under way. Where each of three stages has one peer, two micro-batches
visit all of them at once; of micro-batches that visit two stages, three do."""
CONFIG = ROOT / "configs" / "full.toml"
RUN: dict[str, Any] = {
    "averaging.cell": 1,
    "outer.strategy": "moshpit",
    "outer.carries": "state",
    "outer.grid": [4, 4],
    "outer.optimizer": "nesterov",
    "outer.momentum": 0.8,
    "optimizer.name": "muon",
    "pipeline.stages": 3,
    "pipeline.may_skip": 0.34,
}
"""Where there is no such file."""
SMALL: dict[str, Any] = {
    "outer.window_s": 60.0,
    "model.layers": 3,
    "model.d_model": 32,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.d_ff": 64,
    "model.seq_len": 128,
    "pipeline.micro_batch": 8,
    "pipeline.forward_timeout_s": 60.0,
    "training.min_replicas": 1,
    "training.target_batch": 192,
    "training.epochs": 100_000,
    "training.eval_every": 0,
    "training.rebalance_every_s": 0.0,
    "training.epoch_timeout_s": 180.0,
    "averaging.round_timeout_s": 60.0,
    "optimizer.warmup": 2,
    "data.source": "builtin:pydoc",
}
"""24 micro-batches of 128 KiB in an epoch of a cell."""
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "planned-33": (
        "planned, a third left out",
        {"scheduler.paths": "planned", "scheduler.skip": 0.34},
    ),
    "near": (
        "planned, a third left out, near peers in a cell",
        {"scheduler.paths": "planned", "scheduler.skip": 0.34},
    ),
    "planned-full": ("planned, all stages", {"scheduler.paths": "planned", "scheduler.skip": 0.0}),
    "turns": ("round robin, all stages", {"scheduler.paths": "round-robin", "scheduler.skip": 0.0}),
    "turns-all": (
        "round robin over all peers in one cell",
        {
            "averaging.cell": "all",
            "scheduler.paths": "round-robin",
            "scheduler.skip": 0.0,
            "training.target_batch": 192 * len(SIZES),
        },
    ),
}
"""An ends peer has the same number of micro-batches in each of these."""
TARGETS: dict[str, float | None] = {"planned-full": 0.67, "turns": None, "turns-all": 0.5}
BUSY = 0.6
SHARE = 0.75
MEASURED, WATCHED_S = 5, 75.0
"""Epochs of every cell at least; seconds, in which a window of 60 s begins."""
LOAD_S, EPOCH_S = 420.0, 400.0
"""Bounds: fourteen daemons that load torch on two busy cores and divide twice; an epoch."""


@dataclass(frozen=True)
class Measured:
    """One swarm. ``seconds``: of every cell's epochs, the small cells first; ``busy``: share
    of all cores that its processes and the network's took; ``everything``: with the machine's other
    work; ``windows``: in which a cell found partners, and put means in place; ``owned``: of every
    cell, by stage the bytes of optimizer state of each replica; ``places``: of its peers."""

    seconds: tuple[tuple[float, ...], ...]
    busy: float
    everything: float
    windows: tuple[int, int]
    owned: tuple[Mapping[int, Sequence[int]], ...]
    places: tuple[Sequence[str], ...]

    @property
    def epoch_s(self) -> list[float]:
        return [median(times) for times in self.seconds]


def rows(report: Report, root: Path, only: str = ",".join(SETTINGS)) -> None:
    """Without the right to make network namespaces: one row that says so, and does not hold."""
    if why := why_not():
        report.add("2 live cells", 0, "swarms measured", why, "3", False)
        return
    found: dict[str, Measured] = {}
    for name in only.split(","):
        said, changes = SETTINGS[name]
        sizes = [sum(NODES)] if changes.get("averaging.cell") == "all" else SIZES
        settings = {**base(), **SMALL, **changes}
        if len(sizes) == 1:  # there is nobody to average with
            settings = {k: v for k, v in settings.items() if not k.startswith("outer.")}
        got = found[name] = measure(root / name, settings, sizes, moved=name != "near")
        cells = ", ".join(f"{seconds:.2f}" for seconds in got.epoch_s)
        report.add(
            f"2 epoch of a cell, {said}",
            median(got.epoch_s),
            "s",
            f"the cells {cells} s, medians; cores {got.busy:.0%} busy with them, "
            f"{got.everything:.0%} with all that ran here",
            f"cores at most {BUSY:.0%} busy",
            holds=got.busy <= BUSY,
        )
        if len(sizes) == 1:
            continue
        report.add(
            f"2 windows, {said}",
            got.windows[1],
            "windows with a mean in place",
            f"{got.windows[0]} times it found partners",
            "more than 0",
            holds=got.windows[1] > 0,
        )
    if "near" in found and "turns-all" in found:
        _near(report, found["near"], found["turns-all"])
    ours = found.get("planned-33")
    if ours is not None:
        _owned(report, ours)
    for name, target in TARGETS.items():
        if ours is None or name not in found:
            continue
        other = found[name]
        theirs = other.epoch_s if len(other.epoch_s) > 1 else other.epoch_s * len(SIZES)
        both = list(zip(ours.epoch_s, theirs, strict=True))
        ratios = [mine / theirs for mine, theirs in both]
        report.add(
            f"2 {SETTINGS['planned-33'][0]}, over {SETTINGS[name][0]}",
            max(ratios),
            "x, worst cell",
            ", ".join(f"{mine:.2f} s over {theirs:.2f} s" for mine, theirs in both),
            "" if target is None else f"at most {target}",
            holds=None if target is None else max(ratios) <= target,
        )


def _near(report: Report, ours: Measured, turns: Measured) -> None:
    """Compare the seconds for equally many tokens of the whole swarm."""
    together = sum(1 / s for s in ours.epoch_s)
    alone = len(SIZES) / turns.epoch_s[0]
    target = TARGETS["turns-all"]
    assert target is not None
    report.add(
        f"2 {SETTINGS['near'][0]}, over {SETTINGS['turns-all'][0]}",
        alone / together,
        "x, seconds for as many tokens",
        f"epochs of a cell's size a second: {together:.3f} and {alone:.3f}; the cells: "
        + "; ".join(", ".join(cell) for cell in ours.places),
        f"at most {target}",
        holds=alone / together <= target,
    )


def _owned(report: Report, ours: Measured) -> None:
    """Muon's state of a peer, where its stage has another replica in the cell."""
    shared = [
        (stage, sorted(row)) for cell in ours.owned for stage, row in cell.items() if len(row) > 1
    ]
    said = "; ".join(f"stage {stage}: {' and '.join(map(str, row))}" for stage, row in shared)
    shares = [max(row) / max(1, sum(row)) for _, row in shared]
    report.add(
        "2 optimizer bytes of a peer whose stage has two replicas, over its stage's",
        max(shares, default=1.0),
        "largest share",
        f"{said} bytes; peers alone at a stage hold all of it",
        f"at most {SHARE}, where whole matrices have two owners",
        holds=bool(shares) and max(shares) <= SHARE,
    )


def base() -> dict[str, Any]:
    """The run's settings, by their dotted names."""
    if not CONFIG.is_file():
        return RUN
    tables = tomllib.loads(CONFIG.read_text())
    return {
        f"{table}.{name}": value
        for table, fields in tables.items()
        if isinstance(fields, dict) and table != "swarm"
        for name, value in fields.items()
    }


def memory(run: Manifest) -> int:
    """Bytes that are room for ``HELD`` micro-batches at a block stage, and not for one more."""
    model = run.model
    micro = run.pipeline.micro_batch
    one = stash_bytes(model, run.pipeline.stages, 1, micro)
    # A peer counts what came in beside it.
    one += 4 * micro * model.seq_len * model.d_model
    return (2 * HELD + 1) * one // 2


def measure(
    root: Path, settings: Mapping[str, Any], sizes: Sequence[int], *, moved: bool
) -> Measured:
    """Start a swarm on the shaped network, let every cell of ``sizes`` commit, take it down.
    ``moved``: to the places of ``CELLS``, cell by cell. Raises Hang when a cell does not
    commit."""
    root.mkdir()
    with contextlib.ExitStack() as stack:
        count = sum(NODES)
        wan = stack.enter_context(Wan(count))
        at = [place for stage in zip(*CELLS, strict=True) for here in stage for place in here]
        live_paths.shape(wan, at)
        node = tuple(s for s in live_paths.NODE if "in_flight" not in s)
        node += (f"limits.in_flight={IN_FLIGHT}",)
        box = Box(root, tuple(wan.host(i) for i in range(count)), node)
        stack.callback(box.clean_up)
        box.swarm(NODES, **settings)
        room = ("--set", f"limits.stash_bytes={memory(box.manifest)}")
        peers = {
            peer.label: peer
            for stage, replicas in enumerate(NODES)
            for n in range(replicas)
            for peer in [box.member(stage, str(n), *(room if stage else ()))]
        }
        labels = list(peers)
        chronicle = Chronicle()
        stack.callback(chronicle.close)
        for label, peer in peers.items():
            peer.start()
            chronicle.follow(label, peer.events_path)

        def told() -> list[Told]:
            for label, peer in peers.items():
                if not peer.running:
                    raise Hang(f"{label} ended: {peer.child.tail(3)}")
            return chronicle.read()

        def divided() -> list[list[str]] | None:
            cells: list[set[str]] = []
            for e in told():
                if e.kind == PLANNED:
                    # Earlier plans with one of these peers, maybe by another leader, are over.
                    new = set(e.get("peers"))
                    cells = [cell for cell in cells if not cell & new] + [new]
            if sorted(map(len, cells)) != sizes:
                return None
            names = {peer.key: label for label, peer in peers.items()}
            found = [sorted(names[peer] for peer in cell) for cell in cells]
            return sorted(found, key=lambda cell: (len(cell), cell))

        def measured() -> dict[str, tuple[float, ...]] | None:
            found = epochs(told(), begun)
            enough = len(found) >= len(sizes) and min(map(len, found.values())) >= MEASURED
            return found if enough and time.time() - begun >= WATCHED_S else None

        try:
            cells = box.wait(f"cells of {sizes}", divided, LOAD_S)
            if moved and len(sizes) > 1:
                for cell, stages in zip(cells, CELLS, strict=True):
                    for label, place in zip(cell, chain(*stages), strict=True):
                        at[labels.index(label)] = place
            live_paths.shape(wan, at, SCALE)
            begun = time.time()
            psutil.cpu_percent()
            worked = _worked(peers.values())
            # Reading the daemons' events ten times a second would take a sixth of a core.
            bound = WATCHED_S + EPOCH_S * MEASURED
            found = box.wait("epochs of every cell", measured, bound, every=2.0)
            everything = psutil.cpu_percent() / 100
            took = (time.time() - begun) * (psutil.cpu_count() or 1)
            busy = (_worked(peers.values()) - worked) / took
        except Hang:
            print(box.story(), file=sys.stderr)
            raise
        owned = [_state(peers[label] for label in cell) for cell in cells]
        events = told()
        met = sum(e.kind == "window" for e in events)
        placed = sum(e.kind == COMMITTED and not e.get("tokens") for e in events)
        seconds = tuple(found[next(who for who in cell if who in found)] for cell in cells)
        places = tuple([at[labels.index(label)] for label in cell] for cell in cells)
        return Measured(seconds, busy, everything, (met, placed), tuple(owned), places)


def _state(cell: Iterable[Peer]) -> dict[int, list[int]]:
    """Bytes of optimizer state of the replicas, by stage."""
    found: dict[int, list[int]] = {}
    for peer in cell:
        said = peer.status()
        found.setdefault(said.stage, []).append(said.optimizer_bytes)
    return found


def _worked(peers: Iterable[Peer]) -> float:
    """Seconds of processor time that the daemons, their p2pd and this process have taken."""
    total = time.process_time()
    for peer in peers:
        with contextlib.suppress(psutil.NoSuchProcess):
            daemon = psutil.Process(peer.pid)
            for one in [daemon, *daemon.children(recursive=True)]:
                with contextlib.suppress(psutil.NoSuchProcess):
                    total += sum(one.cpu_times()[:2])
    return total


def epochs(events: list[Told], begun: float) -> dict[str, tuple[float, ...]]:
    """Seconds from commit to commit of training epochs since then, by the leader, which is the only
    ends peer of its cell. The first ones after the division are left out."""
    commits: dict[str, list[Told]] = {}
    for e in events:
        if e.kind == COMMITTED and e.at > begun:
            commits.setdefault(e.who, []).append(e)
    return {
        who: tuple(b.at - a.at for a, b in zip(said, said[1:], strict=False) if b.get("tokens"))[1:]
        for who, said in commits.items()
        if len(said) > 1
    }
