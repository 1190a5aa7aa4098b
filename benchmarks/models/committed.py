"""Cost of an epoch's end for a peer with a stage of 1 GiB: fresh parameters are put in place and
named by their digest, which must be there before the next epoch may begin."""

import hashlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.report import Report
from node.core.journey import Version
from node.model.settings import ModelSettings
from node.model.stages import build
from node.stage.state import StageState
from node.wire.tensors import encode

MODEL = ModelSettings(
    layers=16, d_model=1024, heads=8, kv_heads=8, d_ff=4096, vocab=300, weights=("", "")
)
EPOCH_S = 30.0
SHARE = 0.02
TRIES = 5


def rows(report: Report, root: Path) -> None:
    """One row, in seconds of a core: it is the work of one thread, and the machine may be busy."""
    torch.set_num_threads(1)
    state = StageState(build(MODEL, 1, 1), 1)
    fresh = {name: torch.rand_like(p) for name, p in state.parameters().items()}
    size = sum(t.nbytes for t in fresh.values())

    def commit() -> None:
        state.adopt(fresh, Version(state.version.epoch + 1))
        state.settle()

    (took, core), (took_flat, core_flat) = least(commit), least(lambda: flat(fresh))
    report.add(
        "6 commit and digest of a stage of 1 GiB, over an epoch of 30 s",
        core / EPOCH_S,
        f"times; {core:.2f} s of one core for {size / 2**30:.2f} GiB, {took:.2f} s by the clock",
        f"{core_flat:.2f} s, {took_flat:.2f} s: SHA-256 of all of it",
        f"at most {SHARE}",
        holds=core / EPOCH_S <= SHARE,
    )


def least(act: Callable[[], None]) -> tuple[float, float]:
    """Seconds that the fastest of :data:`TRIES` took, and seconds of a core that the one with the
    fewest did."""
    walls = []
    cores = []
    for _ in range(TRIES):
        wall = time.perf_counter()
        core = time.process_time()
        act()
        walls.append(time.perf_counter() - wall)
        cores.append(time.process_time() - core)
    return min(walls), min(cores)


def flat(tensors: Mapping[str, Tensor]) -> None:
    """As digests were made before: every byte in a row."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        sha.update(encode(tensors[name], "fp32"))
