"""Checkpoints of a 0.5B-parameter model beside training and in a stop; the disk that they take.

Of the large model every second epoch is written, so each pair of neighbours shows the cost of one
writing. By default it is written as often as the schedule says for epochs of that length.
"""

import os
import signal
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from benchmarks.firsthour import large
from benchmarks.nothing_lost.moments import WITHIN_S
from benchmarks.report import Report
from node.checkpoint.files import BlockWriter
from node.checkpoint.schedule import CheckpointSchedule
from node.checkpoint.settings import CheckpointSettings
from node.model.shapes import count, parameter_shapes
from testbed.daemons.books import COMMITTED
from testbed.daemons.fleet import START_S, Box, Peer
from testbed.daemons.told import Told

COST = 0.02
"""Share of the tokens per second that writing may cost."""
STOP_S = 10.0
"""Target for the seconds until a stop is over."""
PAIRS = 4
QUICK_LAYERS = 2
LARGE_EPOCH_S = 900.0
SHAPE: dict[str, Any] = {
    **large.SHAPE,
    "model__seq_len": 64,
    "training__target_batch": 2,
    "training__epochs": 10_000,
}
CHECKPOINTS = 500
LIMIT = 3 << 20
LIMIT_S = 600.0
PROBE = 1 << 30
"""Bytes written to find the speed of the disk."""


def rows(report: Report, root: Path, quick: bool) -> None:
    """Row 2; ``quick``: the large model has few layers, and its rows judge nothing."""
    below_the_limit(report, root / "limit")
    large_model(report, root / "large", quick)


# ------------------------------------------------------------ the limit


def below_the_limit(report: Report, root: Path) -> None:
    """500 checkpoints of a small model below a limit for some of them."""
    root.mkdir()
    settings = ("checkpoint.every=1", f"checkpoint.max_disk={LIMIT}", "checkpoint.keep=50")
    box = Box(root, settings=settings)
    most = 0
    began = time.monotonic()
    try:
        peers = box.swarm(
            (1, 1), pipeline__stages=1, training__epochs=10**6, training__min_replicas=1
        )
        box.start(*peers)
        while (written := _written(peers[0])) < CHECKPOINTS and time.monotonic() - began < LIMIT_S:
            most = max(most, *(_bytes_of_checkpoints(p.home) for p in peers))
        left = [len(list(p.home.rglob("manifest.json"))) for p in peers]
    finally:
        box.clean_up()
    report.add(
        f"2 most bytes on the disk of a peer over {written} checkpoints",
        most,
        "bytes",
        f"{min(left)} and {max(left)} left at the end",
        f"at most {LIMIT:,}, over {CHECKPOINTS}",
        holds=0 < most <= LIMIT and written >= CHECKPOINTS and min(left) >= 2,
    )


def _written(peer: Peer) -> int:
    return sum(e.kind == "checkpoint-written" for e in peer.told())


def _bytes_of_checkpoints(home: Path) -> int:
    """Bytes below the directory of checkpoints, of one being written too. Files come and go
    meanwhile."""
    total = 0
    for folder, _, names in os.walk(home / "swarms"):
        if "ckpt" in folder:
            for name in names:
                try:
                    total += os.lstat(os.path.join(folder, name)).st_size
                except FileNotFoundError:
                    continue
    return total


# ------------------------------------------------------------ a large model


def large_model(report: Report, root: Path, quick: bool) -> None:
    if not quick and psutil.virtual_memory().available < large.NEEDED:
        raise RuntimeError(f"2 needs {large.NEEDED >> 30} GiB of memory that nobody uses")
    root.mkdir()
    changes = SHAPE | ({"model__layers": QUICK_LAYERS} if quick else {})
    settings = ("checkpoint.every=2", "checkpoint.within_s=0", "limits.in_flight=2")
    box = Box(root, settings=settings)
    try:
        peers = box.swarm((1, 1, 1), **changes)
        m = box.manifest.model
        weights = sum(count(parameter_shapes(m, 2, stage)) for stage in range(3))
        for peer in peers:
            peer.start()
        wanted = 2 * PAIRS + 2
        box.wait(
            f"{wanted} epochs",
            lambda: len(_commits(peers)) >= wanted,
            wanted * LARGE_EPOCH_S,
            tuple(peers),
            every=1.0,
        )
        speed = disk_speed(root)
        size = sum(int(e.get("bytes")) for e in _last_written(peers))
        cost(report, peers, weights, size, speed, judged=not quick)
        stop(report, peers, weights, size, speed, judged=not quick)
    finally:
        box.clean_up()


def _commits(peers: Sequence[Peer]) -> list[Told]:
    found = [e for p in peers for e in p.told() if e.kind == COMMITTED]
    return sorted(found, key=lambda e: e.at)


def _last_written(peers: Sequence[Peer]) -> list[Told]:
    return [[e for e in p.told() if e.kind == "checkpoint-written"][-1] for p in peers]


def disk_speed(root: Path) -> float:
    """Bytes a second of one file that is written and flushed as a checkpoint is."""
    block = memoryview(bytes(8 << 20))
    path = root / "probe"
    began = time.monotonic()
    with path.open("wb", buffering=0) as file:
        out = BlockWriter(file.fileno(), lambda: True)
        for _ in range(PROBE // len(block)):
            out.add(block)
        out.finish()
        os.fsync(file.fileno())
    seconds = time.monotonic() - began
    path.unlink()
    return PROBE / seconds


def cost(
    report: Report,
    peers: Sequence[Peer],
    weights: int,
    size: int,
    speed: float,
    *,
    judged: bool,
) -> None:
    """A version that is settled when epoch e begins is written while epoch e + 1 is made: of even
    epochs here."""
    took = {int(e.get("epoch")): float(e.get("seconds")) for e in _commits(peers)}
    # The first epochs have no state to save, and measure kernels.
    steady = {epoch: s for epoch, s in took.items() if epoch > 2}
    extra = [
        (steady[b] - steady[a]) if b % 2 else (steady[a] - steady[b])
        for a, b in pairwise(sorted(steady))
    ]
    plain = median(s for epoch, s in steady.items() if epoch % 2 == 0)
    write_s = max(float(e.get("seconds")) for e in _last_written(peers))
    schedule = CheckpointSchedule(CheckpointSettings())
    for epoch in range(2):
        schedule.settled(epoch, epoch * plain)
    schedule.written(0.0, write_s)
    share = median(extra) / (schedule.stride * plain)
    about = (
        f"{weights / 1e6:.0f}M parameters, {size / 1e9:.2f} GB in {write_s:.1f} s, "
        f"{size / speed:.1f} s at the disk's speed; {median(extra):+.2f} s an epoch of "
        f"{plain:.1f} s ({min(extra):+.2f} to {max(extra):+.2f}), every {schedule.stride} epochs"
    )
    report.add(
        f"2 share of the tokens per second that checkpoints every {WITHIN_S:.0f} s cost",
        share,
        "x",
        about,
        f"at most {COST}",
        holds=share <= COST if judged else None,
    )


def stop(
    report: Report,
    peers: Sequence[Peer],
    weights: int,
    size: int,
    speed: float,
    *,
    judged: bool,
) -> None:
    """All stages of the machine stop at once, in the middle of an epoch that was not written."""
    epoch = _commits(peers)[-1].get("epoch")
    began = time.monotonic()
    for peer in peers:
        peer.signal(signal.SIGTERM)
    codes = [peer.wait(START_S) for peer in peers]
    seconds = time.monotonic() - began
    held = {int(e.get("epoch")) for e in _last_written(peers)}
    report.add(
        "1 seconds until a stop of 0.5B parameters is over",
        seconds,
        "s",
        f"{weights / 1e6:.0f}M parameters, {size / 1e9:.2f} GB, {size / speed:.1f} s at the disk's "
        f"speed; exit codes {codes}; epoch {epoch} committed, {sorted(held)} written",
        f"at most {STOP_S:.0f}",
        holds=seconds <= STOP_S and max(held) >= epoch if judged else None,
    )
