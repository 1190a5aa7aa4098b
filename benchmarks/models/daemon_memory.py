"""The memory that a daemon plans for a stage, beside the growth of its peak over the peak of a
daemon with a tiny stage: memory of its tensors on a GPU, otherwise its resident set."""

from pathlib import Path
from typing import Any

from benchmarks.report import Report
from node.app.capacity import check_memory
from node.config import NodeConfig
from node.core.numbers import human
from node.manifest import Manifest, amended
from node.pipeline.settings import PipelineLimits
from testbed.daemons.fleet import Box

SHAPES: dict[str, dict[str, int]] = {
    "wide": {"model.layers": 4, "model.d_model": 1024, "model.d_ff": 4096, "model.heads": 8,
             "model.kv_heads": 8, "model.seq_len": 64, "pipeline.micro_batch": 2},
    "long": {"model.layers": 4, "model.d_model": 512, "model.d_ff": 2048, "model.heads": 8,
             "model.kv_heads": 4, "model.seq_len": 2048, "pipeline.micro_batch": 2},
    "even": {"model.layers": 4, "model.d_model": 768, "model.d_ff": 3072, "model.heads": 12,
             "model.kv_heads": 4, "model.seq_len": 512, "pipeline.micro_batch": 4},
}  # fmt: skip
MODES = ("off", "layers")
EPOCHS = 3
IN_FLIGHT = 2
NEAR = 0.1
MICRO_BATCHES = 6
SCARCE = 1.2
"""Memory given to a daemon, over its plan: little enough for it to keep no holes."""
RUN: dict[str, Any] = {
    "pipeline.stages": 1,
    "training.min_replicas": 1,
    "training.eval_every": 0,
    "training.epochs": 10_000,
    "optimizer.name": "muon",
}


def rows(report: Report, root: Path) -> None:
    """A row for each shape and each way."""
    empty, _ = measured(root / "empty", "off", {})
    for name, shape in SHAPES.items():
        for mode in MODES:
            peak, plan = measured(root / f"{name}-{mode}", mode, shape)
            report.add(
                f"4 {name}, recompute = {mode}: planned over measured memory of a daemon",
                plan / (peak - empty),
                f"ratio; {human(plan)} planned",
                f"{human(peak - empty)}: growth of the peak over an empty daemon's {human(empty)}",
                "0.9 to 1.1",
                holds=abs(plan / (peak - empty) - 1) <= NEAR,
            )


def measured(root: Path, mode: str, shape: dict[str, int]) -> tuple[int, int]:
    """Return (peak of a daemon with one block stage, its plan) in bytes: of the tensors on the GPU
    if there is one, otherwise of the resident set."""
    root.mkdir()
    few = Manifest.default_demo().pipeline.micro_batch
    batch = MICRO_BATCHES * shape.get("pipeline.micro_batch", few)
    run = {**RUN, **shape, "training.target_batch": batch}
    config = NodeConfig(root, limits=PipelineLimits(recompute=mode, in_flight=IN_FLIGHT))
    about = check_memory(config, amended(Manifest.default_demo(), run), 1, 1 << 40).needed
    # The ends need at least the memory of their loss.
    given = max(int(SCARCE * about), 1 << 30)
    settings = (
        f"limits.recompute={mode}",
        f"limits.in_flight={IN_FLIGHT}",
        f"memory={given}",
    )
    box = Box(root, settings=settings)
    try:
        peers = box.swarm((1, 1), **run)
        box.start(*peers)
        box.goes_on(EPOCHS, 400.0)
        said = box.made["stage-1-0"].status()
        return said.memory_peak, said.memory_planned
    finally:
        box.clean_up()
