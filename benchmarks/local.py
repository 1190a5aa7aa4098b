"""The matrix optimizer over the devices of one box, beside simpler ways to run it: milliseconds a
step and bytes a rank.

    python -m benchmarks.local [--json -]

  5  two CPU processes over gloo, matrices cut as tensor parallelism cuts them: micro-groups with
     the exchange of one hidden behind the work on another, the same groups one after another, every
     rank gathering and working on everything, and one process

All four take the same matrices in the same run, in turn; the figures are medians. Each process has
one thread.
"""

import json
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.report import Report, command_line
from node.local.groups import Sharded
from node.local.rank import Rank
from node.local.split import cut_of
from node.local.step import TensorParallelStep
from node.model.device import Device
from node.model.settings import ModelSettings
from node.model.shapes import parameter_shapes
from node.optim.newton_schulz import newton_schulz_all

RANKS = 2
STEPS = 5
RUNS = 9
MOST_BYTES = 2 << 20
MODEL = ModelSettings(layers=4, d_model=256, heads=4, kv_heads=2, d_ff=768)
WAYS = ("overlapped", "in turn", "redundant", "one process")


def main() -> int:
    """Print all; exit 0 when every target holds."""
    parser = command_line(__doc__)
    args = parser.parse_args()
    report = Report()
    local(report)
    return report.end(args.json)


def local(report: Report) -> None:
    """The rows of item 5 that a box of several devices adds."""
    with tempfile.TemporaryDirectory(prefix="tutti-local-") as folder:
        context = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=_rank, args=(rank, Path(folder))) for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            raise RuntimeError("a rank failed")
        told = json.loads((Path(folder) / "told.json").read_text())
    ms = {way: statistics.median(told["ms"][way]) for way in WAYS}
    matrices = len(_matrices(RANKS))
    what = f"{matrices} matrices, {told['groups']} micro-groups, {RANKS} processes"
    first = ms["overlapped"]
    report.add("5 tensor parallel step, overlapped", first, f"ms, {what}")
    for way in WAYS[1:]:
        report.add(
            f"5 tensor parallel step, {way}", ms[way], "ms", f"{ms[way] / first:.2f} x overlapped"
        )
    report.add(
        "5 tensor parallel step, largest difference from one process",
        told["off"],
        "",
        "",
        "0",
        told["off"] == 0.0,
    )
    ours = told["bytes"]
    theirs = told["redundant_bytes"]
    report.add(
        "5 tensor parallel bytes sent by a rank",
        ours,
        "bytes a step",
        f"redundant {theirs}",
        "at most 2 x",
        ours <= 2 * theirs,
    )
    report.add(
        "5 tensor parallel buffers of a rank",
        told["buffer"],
        "bytes",
        f"all matrices {told['all']}",
    )


def _matrices(ranks: int) -> list[Sharded]:
    """The matrices of the blocks, cut as the stage cuts them."""
    shapes = {n: s for n, s in parameter_shapes(MODEL, 1, 1).items() if len(s) == 2}
    made = []
    for name, (rows, cols) in shapes.items():
        dim = cut_of(name) or 0
        made.append(Sharded(name, rows, cols, dim, ((rows, cols)[dim] // ranks,) * ranks))
    return made


def _rank(number: int, folder: Path) -> None:
    torch.set_num_threads(1)
    here = Rank.meet(number, RANKS, Device.pick("cpu"), folder / "store")
    matrices = _matrices(RANKS)
    dice = torch.Generator().manual_seed(1)
    whole = {m.name: torch.randn(m.rows, m.cols, generator=dice) for m in matrices}
    shards = {
        m.name: whole[m.name].split(list(m.sizes), m.dim)[number].contiguous() for m in matrices
    }
    ahead, in_turn = (
        TensorParallelStep(here, matrices, STEPS, most_bytes=MOST_BYTES, overlap=overlap)
        for overlap in (True, False)
    )
    got: dict[str, Tensor] = {m.name: torch.empty(m.shape(number)) for m in matrices}

    def apply(name: str, update: Tensor) -> None:
        got[name].copy_(update)

    ways: dict[str, Callable[[], object]] = {
        "overlapped": lambda: ahead.run(shards, apply),
        "in turn": lambda: in_turn.run(shards, apply),
        "redundant": lambda: _redundant(matrices, shards, number, apply),
        "one process": lambda: (
            newton_schulz_all([whole[m.name] for m in matrices], STEPS, False)
            if number == 0
            else None
        ),
    }
    ms: dict[str, list[float]] = {way: [] for way in WAYS}
    for turn in range(RUNS + 1):
        for way, run in ways.items():
            dist.barrier()
            began = time.perf_counter()
            run()
            dist.barrier()
            if turn:
                ms[way].append(1000 * (time.perf_counter() - began))
    ahead.run(shards, apply)
    wanted = newton_schulz_all([whole[m.name] for m in matrices], STEPS, False)
    off = max(
        float((got[m.name] - w.split(list(m.sizes), m.dim)[number]).abs().max())
        for m, w in zip(matrices, wanted, strict=True)
    )
    off = float(here.total(torch.tensor(off)))
    hosted = [m for g in ahead.groups for m in g[number]]
    out = sum(m.part(number) for m in matrices) - sum(m.part(number) for m in hosted)
    back = sum(m.numel - m.part(number) for m in hosted)
    sent = here.total(torch.tensor([4.0 * (out + back)]))
    if number == 0:
        everything = sum(4 * m.numel for m in matrices)
        told = {
            "ms": ms,
            "groups": len(ahead.groups),
            "off": off,
            "bytes": int(sent) // RANKS,
            "buffer": sum(t.nbytes for pair in ahead._buffers for t in pair),
            "redundant_bytes": everything * (RANKS - 1) // RANKS,
            "all": everything,
        }
        (folder / "told.json").write_text(json.dumps(told))
    Rank.leave()


def _redundant(
    matrices: Sequence[Sharded],
    shards: dict[str, Tensor],
    number: int,
    apply: Callable[[str, Tensor], None],
) -> None:
    """The way without hosts: every rank gathers every matrix, works on all, keeps its own shard."""
    for m in matrices:
        parts = [torch.empty(m.shape(r)) for r in range(RANKS)]
        dist.all_gather(parts, shards[m.name])
        (update,) = newton_schulz_all([torch.cat(parts, m.dim)], STEPS, False)
        apply(m.name, update.split(list(m.sizes), m.dim)[number])


if __name__ == "__main__":
    sys.exit(main())
