"""Three live cells of an open run, one of which means harm between cells: what that costs the other
two, beside the same run in which the third cell is honest.

Two cells divide from one, as in any run. The daemons of the third are started in a cell of their
own, and all of them are bent (:mod:`benchmarks.peers.bent`).
"""

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.firsthour.strangers import LOST
from benchmarks.peers.bent import through
from benchmarks.report import Report
from node.core.ids import CellId, first_cell
from testbed.daemons.books import COMMITTED
from testbed.daemons.fleet import START_S, Box, Hang, Peer
from testbed.daemons.told import Told

KINDS = {
    "silent": "a cell that offers groups and names none",
    "absent": "a cell that posts and answers nothing",
    "noise": "a cell that gives random numbers",
    "heavy": "a cell that gives 100 times what it has",
}
RUN: dict[str, Any] = {
    "averaging.cell": 1,
    "outer.strategy": "moshpit",
    "outer.carries": "state",
    "outer.grid": [4, 4],
    "outer.optimizer": "nesterov",
    "outer.momentum": 0.3,
    "outer.window_s": 15.0,
    "pipeline.stages": 1,
    "training.min_replicas": 1,
    "training.epochs": 100_000,
    "training.eval_every": 0,
    "training.rebalance_every_s": 0.0,
}
"""Settings as in configs/full.toml between cells, in shorter windows: three cells of two peers are
one line of its grid, so the third cell is half of the values that each other cell receives."""
BAD = CellId("b" * 16)
HONEST = 4
"""Daemons, which become two cells of two; two more are the third cell."""
WINDOWS = 3
MOST = 1.03
LATE = 160
"""Epochs counted for the mean loss, two windows' worth: the loss falls in steps at windows, and
over forty epochs the two cells of one run differ by 5 %."""


@dataclass
class Ran:
    """One run, since its honest cells were two. ``means``: windows in which each of these put a
    mean in place, ``losses``: of their training epochs since the run began; ``lost``: events that
    mean a lost epoch; ``won``: honest daemons that were in the third cell, or followed its leader;
    ``harm``: what the third cell did; ``clipped``: partners of honest cells that were."""

    seconds: float = 0.0
    means: list[int] = field(default_factory=list)
    losses: list[list[float]] = field(default_factory=list)
    lost: list[Told] = field(default_factory=list)
    won: set[str] = field(default_factory=set)
    harm: int = 0
    clipped: int = 0
    barred: int = 0


def rows(report: Report, root: Path, kinds: Sequence[str] = tuple(KINDS)) -> None:
    """Four rows for each kind."""
    calm = run(root / "calm", "")
    for kind in kinds:
        _rows(report, KINDS[kind], run(root / kind, kind), calm)


def run(root: Path, kind: str) -> Ran:
    """One swarm, from its start to its end; ``kind``: how the third cell is bent, "" for not.
    Raises Hang when it does not work."""
    root.mkdir(parents=True, exist_ok=True)
    box = Box(root)
    try:
        made = box.swarm((3, 3), **RUN)
        honest = [made[i] for i in (0, 1, 3, 4)]
        bad = [made[2], made[5]]
        for peer in made:
            cell = BAD if peer in bad else first_cell(box.manifest.run_id)
            peer.config.keep_cell(box.manifest.run_id, cell)
            if peer in bad and kind:
                peer.child.through = through(kind)
            peer.start()
        box.until_training(*made)
        box.wait(
            "two honest cells",
            lambda: sum(bool(p.events("cell-entered")) for p in honest) == HONEST // 2,
            START_S,
            must_run=tuple(made),
        )
        return _watch(box, honest, bad)
    except Hang:
        print(box.story(), file=sys.stderr)
        raise
    finally:
        box.clean_up()


def _watch(box: Box, honest: Sequence[Peer], bad: Sequence[Peer]) -> Ran:
    """Return the events of some windows."""
    begun = time.time()
    every = float(RUN["outer.window_s"])
    before = {p.label: len(p.told()) for p in [*honest, *bad]}
    found = Ran()
    strange = {p.key for p in bad}
    while time.time() < begun + (WINDOWS + 0.5) * every:
        for peer in honest:
            said = peer.status()
            if said.leader in strange or said.cell.cell == BAD:
                found.won.add(peer.label)
        for peer in (*honest, *bad):
            if not peer.running:
                raise Hang(f"{peer.label} ended")
        time.sleep(0.5)
    found.seconds = time.time() - begun
    late = {p.label: p.told()[before[p.label] :] for p in (*honest, *bad)}
    for peer in honest:
        told = late[peer.label]
        found.lost += [t for t in told if t.kind in LOST]
        found.clipped += sum(t.kind == "partner-clipped" for t in told)
        found.barred += sum(t.kind == "caller-barred" for t in told)
        commits = [t for t in peer.told() if t.kind == COMMITTED]
        if not peer.status().stage:
            found.losses.append([float(t.get("loss")) for t in commits if t.get("tokens")])
            found.means.append(sum(t.kind == COMMITTED and not t.get("tokens") for t in told))
    found.harm = sum(t.kind == "harm" for p in bad for t in late[p.label])
    return found


def _rows(report: Report, what: str, got: Ran, calm: Ran) -> None:
    kinds = sorted({t.kind for t in got.lost})
    report.add(
        f"6 {what}: epochs that the other cells lost",
        len(got.lost),
        "epochs",
        f"in {got.seconds:.0f} s, {got.harm} times harm; {len(calm.lost)} without it {kinds or ''}",
        "0",
        holds=not got.lost and got.harm > 0,
    )
    report.add(
        f"6 {what}: followers it won",
        len(got.won),
        "peers",
        ", ".join(sorted(got.won)),
        "0",
        holds=not got.won,
    )
    report.add(
        f"6 {what}: windows in which another cell put a mean in place",
        min(got.means, default=0),
        f"of {WINDOWS}, fewest of a cell",
        f"{min(calm.means, default=0)} without it; {got.clipped} partners clipped, {got.barred} "
        "callers barred",
        "1 or more",
        holds=min(got.means, default=0) >= 1,
    )
    epochs = min(map(len, [*got.losses, *calm.losses]))
    mine, theirs = (median(_late(losses, epochs) for losses in r.losses) for r in (got, calm))
    report.add(
        f"6 {what}: loss of the other cells after {epochs} epochs",
        mine / theirs,
        "of the same run without it",
        f"{mine:.4f} and {theirs:.4f} nats per token, medians of {len(got.losses)} cells' means of "
        f"{LATE} epochs",
        f"at most {MOST}",
        holds=mine / theirs <= MOST,
    )


def _late(losses: Sequence[float], epochs: int) -> float:
    """Mean of the last LATE of the first `epochs` losses."""
    return fmean(losses[max(0, epochs - LATE) : epochs])
