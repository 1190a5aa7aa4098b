"""Parameters in bf16 with fp32 masters at their owners: a live swarm beside the same run in fp32,
and beside one process."""

from pathlib import Path

import torch

from benchmarks.models.short import finished
from benchmarks.report import Report
from benchmarks.soak import scraped
from node.model.shapes import count, parameter_shapes
from testbed.daemons.books import COMMITTED
from testbed.daemons.fleet import Box
from testbed.reference.swarm import Reference

EPOCHS = 20
CLOSE = 0.01
RUN = {
    "training.epochs": EPOCHS,
    "training.min_replicas": 2,
    "training.eval_every": 0,
    "scheduler.paths": "round-robin",
}
"""In turns: every replica has gradients to give in every epoch."""
PAIR = ("stage-1-0", "stage-1-1")


def rows(report: Report, root: Path) -> None:
    """Losses, and the bytes of a round."""
    torch.set_num_threads(1)
    each = dict[str, float]()
    ends = dict[str, float]()
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
        m = box.manifest.model
        stages = box.manifest.pipeline.stages
        # Together they send the gradients of all parts once, and all fresh parameters once.
        each[parameters] = sum(sent) / EPOCHS / count(parameter_shapes(m, stages, stages))
    ratio = each["bf16"] / each["fp32"]
    report.add(
        "8 bytes of a round between two replicas, bf16 parameters over fp32",
        ratio,
        f"{each['bf16']:.2f} and {each['fp32']:.2f} bytes a number; last losses "
        f"{ends['bf16']:.4f} and {ends['fp32']:.4f}",
        "4 of a gradient and 2 of a fresh parameter, over 4 and 4",
        "0.75 within 6 %: in an epoch of twenty a replica may have nothing to give",
        holds=abs(ratio / 0.75 - 1) <= 0.06,
    )
