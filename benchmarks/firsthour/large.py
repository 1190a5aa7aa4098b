"""A model of 0.5B parameters on two slow cores: every epoch commits by its first plan, and nobody
calls a slow step dead.

    python -m benchmarks.firsthour --only 1    # 20 minutes on two idle cores; 16 GB of memory
    LARGE_LAYERS=4 LARGE_EPOCHS=2 python -m benchmarks.firsthour --only 1

Three daemons share the machine: the ends with the tied embedding, and two stages of 14 layers.
Their optimizer's steps take longer than the manifest's round_timeout_s, which is a floor. The
status of all three is asked twice a second.
"""

import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from benchmarks.report import Report
from node.model.shapes import count, parameter_shapes
from testbed.daemons.books import COMMITTED
from testbed.daemons.fleet import Box, Hang, Peer
from testbed.daemons.told import Told

LAYERS = int(os.environ.get("LARGE_LAYERS", "28"))
EPOCHS = int(os.environ.get("LARGE_EPOCHS", "5"))
SHAPE: dict[str, Any] = {
    "model__layers": LAYERS,
    "model__d_model": 1024,
    "model__heads": 16,
    "model__kv_heads": 8,
    "model__d_ff": 3072,
    "model__vocab": 151_936,
    "model__seq_len": 256,
    "model__tied": True,
    "pipeline__stages": 2,
    "pipeline__micro_batch": 1,
    "training__target_batch": 4,
    "training__epochs": EPOCHS,
    "training__min_replicas": 1,
    "training__eval_every": 0,
    "training__rebalance_every_s": 0.0,
}
START_S, EPOCH_S = 600.0, 1200.0
"""For three daemons to make half a gigabyte of weights each; for an epoch before the run is given
up."""
LOOK_S = 0.5
NEEDED = 15 << 30
ENOUGH = ("training", "finished")


def rows(report: Report, root: Path) -> None:
    free = psutil.virtual_memory().available
    if LAYERS == 28 and free < NEEDED:
        raise RuntimeError(
            f"1 needs {NEEDED >> 30} GiB of memory that nobody uses, there are {free / 2**30:.1f}"
        )
    box = Box(root, settings=("checkpoint.every=1000", "limits.in_flight=2"))
    try:
        peers = box.swarm((1, 1, 1), **SHAPE)
        m = box.manifest.model
        weights = sum(count(parameter_shapes(m, 2, stage)) for stage in range(3))
        for peer in peers:
            peer.start()
        seen, began = watch(box, peers)
        box.wait("the last commit to be told", lambda: commits(peers) >= EPOCHS, START_S)
        judge(report, [e for p in peers for e in p.told()], seen, time.monotonic() - began, weights)
    finally:
        box.clean_up()


def commits(peers: list[Peer]) -> int:
    return sum(e.kind == COMMITTED for p in peers for e in p.told())


def watch(box: Box, peers: list[Peer]) -> tuple[Counter[str], float]:
    """Until the last epoch is committed: what every status said, from the first plan on. Raises
    Hang."""
    box.wait(
        "everybody in a plan",
        lambda: all(p.status().state in ENOUGH for p in peers),
        START_S,
        tuple(peers),
    )
    seen: Counter[str] = Counter()
    began = moved = time.monotonic()
    epoch = 0
    while epoch < EPOCHS:
        for peer in peers:
            s = peer.status()
            seen["healthy" if s.healthy else f"{peer.label}: {s.reason or 'no answer'}"] += 1
            if s.epoch > epoch:
                epoch = s.epoch
                moved = time.monotonic()
            if not peer.running:
                raise Hang(f"{peer.label} has ended: {peer.child.tail(5)}")
        if time.monotonic() - moved > EPOCH_S:
            raise Hang(f"epoch {epoch + 1} of {EPOCHS}: not in {EPOCH_S:.0f} s; {dict(seen)}")
        time.sleep(LOOK_S)
    return seen, began


def judge(
    report: Report, told: list[Told], seen: Counter[str], seconds: float, weights: int
) -> None:
    """The rows, from what the daemons told and what their status said."""
    commits = sorted((e for e in told if e.kind == COMMITTED), key=lambda e: e.at)
    about = f"{weights / 1e6:.0f}M parameters, {LAYERS} layers, {seconds:.0f} s in all"
    repaired = sum(int(e.get("repaired", 0)) for e in commits) + sum(
        e.kind == "round-repaired" for e in told
    )
    lost = [e.text for e in told if e.kind in ("peer-lost", "epoch-abandoned", "leader-silent")]
    dropped = sum(int(e.get("dropped", 0)) for e in commits)
    report.add(
        "1 epochs committed", len(commits), "", about, str(EPOCHS), holds=len(commits) == EPOCHS
    )
    report.add("1 rounds repaired", repaired, "", about, "0", holds=not repaired)
    report.add(
        "1 deaths and epochs given up",
        len(lost),
        "",
        lost[0][:120] if lost else "none",
        "0",
        holds=not lost,
    )
    report.add("1 micro-batches dropped", dropped, "", about, "0", holds=not dropped)
    looks = sum(seen.values())
    fine = seen["healthy"]
    others = "; ".join(f"{n}: {why}" for why, n in seen.most_common(4) if why != "healthy")[:200]
    report.add(
        "1 status is healthy",
        fine / max(1, looks),
        "of looks",
        f"{looks} looks; {others or 'nothing else'}",
        "1",
        holds=fine == looks,
    )
    for e in commits:
        run_s = float(e.get("run_s", 0.0))
        all_s = float(e.get("seconds", 0.0))
        within = e.get("within_s", [0.0, 0.0])
        said = f"deadlines {within[0]:.0f} s and {within[1]:.0f} s"
        report.add(
            f"1 epoch {e.get('epoch')}",
            f"{run_s:.1f} + {all_s - run_s:.1f}",
            "s, micro-batches and round",
            said,
        )
