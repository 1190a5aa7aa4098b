"""Parameters in bf16 with fp32 masters at their owners: a live swarm beside the same run in fp32,
and beside one process."""

from __future__ import annotations

from pathlib import Path

import torch

from benchmarks.given.short import finished
from benchmarks.lab.books import COMMITTED
from benchmarks.lab.fleet import Box
from benchmarks.reference.swarm import Reference
from benchmarks.report import Report
from benchmarks.soak import scraped
from node.model.shapes import count, parameter_shapes

EPOCHS, CLOSE = 40, 0.01
RUN = {"training.epochs": EPOCHS, "training.min_replicas": 2, "training.eval_every": 0}
PAIR = ("stage-1-0", "stage-1-1")


def rows(report: Report, root: Path) -> None:
    """Losses, and the bytes of a round."""
    torch.set_num_threads(1)
    fresh, ends = dict[str, float](), dict[str, float]()
    for parameters in ("fp32", "bf16"):
        box = Box(root / parameters, settings=())
        box.root.mkdir(parents=True)
        try:
            peers = box.swarm((2, 2), **RUN, pipeline__stages=1, optimizer__parameters=parameters)
            box.start(*peers)
            box.wait("the end", lambda p=peers: all(map(finished, p)), 180.0)
            committed = {
                int(t.get("epoch")): float(t.get("loss"))
                for label in ("ends-0", "ends-1")  # either may lead
                for t in box.made[label].told()
                if t.kind == COMMITTED
            }
            urls = [box.made[label].status().metrics_url for label in PAIR]
            sent = [scraped(url, "tutti_bytes_sent_total")["averaging"] for url in urls]
            digests = {box.made[label].status().digest for label in PAIR}
        finally:
            box.clean_up()
        live = [loss for _, loss in sorted(committed.items())]
        alone = [e.loss for e in Reference(box.manifest, root).train(EPOCHS)]
        worst = max(abs(a - b) for a, b in zip(live, alone, strict=True))
        ends[parameters] = live[-1]
        report.add(
            f"8 {parameters} parameters: largest difference of the losses of {EPOCHS} epochs",
            worst,
            f"nats per token; from {live[0]:.4f} to {live[-1]:.4f}; digests of two replicas: "
            f"{len(digests)}",
            f"one process with {parameters} parameters",
            f"at most {CLOSE:g}",
            holds=worst <= CLOSE and len(digests) == 1,
        )
        m, stages = box.manifest.model, box.manifest.pipeline.stages
        given = 4 * count(parameter_shapes(m, stages, stages))
        # Together they send the gradients of all parts once, and all fresh parameters once.
        fresh[parameters] = (sum(sent) / EPOCHS - given) / given * 4
    report.add(
        "8 bytes of a fresh parameter between two replicas, bf16",
        fresh["bf16"],
        "bytes a number",
        f"{fresh['fp32']:.3f} in fp32; last losses {ends['bf16']:.4f} and {ends['fp32']:.4f}",
        "half of fp32's within 2 %",
        holds=abs(fresh["bf16"] / fresh["fp32"] - 0.5) <= 0.01,
    )
