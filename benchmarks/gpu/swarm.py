"""Part b: ends and two block stages as three daemons on one device, its memory divided between
them, beside one process that trains the same run: losses, tokens a second, memory."""

import sys
from itertools import pairwise
from statistics import median
from typing import Any

from benchmarks.gpu.bench import Bench
from benchmarks.models.short import finished
from benchmarks.report import Report
from node.app.capacity import room_on, shares
from node.app.daemon import TUNING_S
from node.config import NodeConfig
from node.core.ids import ENDS
from node.core.numbers import human
from node.model.shapes import all_shapes, count
from testbed.daemons.books import COMMITTED
from testbed.daemons.fleet import Box, Hang, folder
from testbed.reference.swarm import Reference

STAGES = 2
EPOCHS = 10
WARM = 2
SHAPE: dict[str, Any] = {
    "model.layers": 12, "model.d_model": 768, "model.heads": 12, "model.kv_heads": 12,
    "model.d_ff": 3072, "model.seq_len": 512, "pipeline.micro_batch": 8,
    "training.target_batch": 128,
}  # fmt: skip
TINY: dict[str, Any] = {
    "model.layers": 4, "model.d_model": 64, "model.heads": 4, "model.kv_heads": 4,
    "model.d_ff": 256, "model.seq_len": 64, "pipeline.micro_batch": 4,
    "training.target_batch": 16,
}  # fmt: skip
RUN: dict[str, Any] = {
    "pipeline.stages": STAGES,
    "training.epochs": EPOCHS,
    "training.min_replicas": 1,
    "training.eval_every": 0,
    "optimizer.name": "muon",
}
CLOSE = 0.01
NEAR = 1e-3
"""Largest relative difference of a loss: under autocast, where two orders of sums round to other
bf16 numbers; in fp32, where daemons on a CPU may step in bf16 by a measured rule."""
START_S = 45.0 + TUNING_S
"""Limit until every daemon is in a plan: the first one measures the optimizer's products, and the
others wait for its times."""
RUN_S = 55.0
"""Limit from there to the end of the run."""


def rows(report: Report, device: str, rehearse: bool) -> None:
    """Rows of the swarm, then of both."""
    bench = Bench.on(device, rehearse)
    with folder() as root:
        box = Box(root, settings=settings(bench))
        try:
            live, at = _swarm(report, bench, box)
        except Hang:
            print(box.story(), file=sys.stderr)
            raise
        finally:
            box.clean_up()
        alone = list(Reference(box.manifest, root, device=bench.device).train(EPOCHS))
    most = CLOSE if bench.device.is_cuda else NEAR
    pairs = zip(live, [epoch.loss for epoch in alone], strict=False)
    worst = max((abs(a / b - 1) for a, b in pairs), default=1.0)
    report.add(
        f"6.b losses of {EPOCHS} epochs: largest relative difference from one process",
        worst,
        f"from {live[0]:.4f} to {live[-1]:.4f}, one process {alone[-1].loss:.4f} nats a token",
        f"{count(all_shapes(box.manifest.model)) / 1e6:.0f} M parameters",
        f"at most {most:g}, in {EPOCHS} epochs",
        holds=worst <= most and len(live) == EPOCHS,
    )
    tokens = alone[0].tokens
    swarm = tokens / median(b - a for a, b in pairwise(at[WARM:]))
    one = tokens / median(epoch.seconds for epoch in alone[WARM:])
    report.add(
        "6.b tokens a second, three daemons over one process",
        swarm / one,
        f"ratio; {swarm:,.0f} tokens/s",
        f"one process on the same device: {one:,.0f} tokens/s",
    )


def settings(bench: Bench) -> tuple[str, ...]:
    """Settings of the daemons. On a card they try no kernels, which would take each of them up to
    90 s of the start; part c has the kernels."""
    found = (f"device={bench.name}", "checkpoint.every=0")
    if bench.device.is_cuda:
        found += ("kernels=eager",)
    return found


def _swarm(report: Report, bench: Bench, box: Box) -> tuple[list[float], list[float]]:
    """(loss of each epoch, when it was committed)."""
    peers = box.swarm((1, 1, 1), **RUN, **(TINY if bench.rehearse else SHAPE))
    config = NodeConfig.load({"home": str(box.root), "device": bench.name}, {})
    limit, _ = room_on(config, [bench.device], processes=STAGES + 2)  # one is this one
    given = shares(config, box.manifest, limit, gpu=bench.device.is_cuda)
    for stage, peer in enumerate(peers):
        peer.child.arguments += ("--set", f"memory={given[stage]}B")
    for peer in peers:
        peer.start()
    for peer in peers:
        box.wait(
            f"{peer.label} in a plan",
            lambda p=peer: p.status().state in ("training", "finished"),
            START_S,
            must_run=tuple(peers),
        )
    try:
        box.wait("the end", lambda: all(map(finished, peers)), RUN_S, must_run=tuple(peers))
    except Hang as e:  # report the losses so far
        print(box.story(), file=sys.stderr)
        report.add(f"6.b the run did not come to its end: {e}"[:300], 0, "", holds=False)
    said = {peer.label: peer.status() for peer in peers}
    told = [t for t in box.made["ends-0"].told() if t.kind == COMMITTED and t.get("tokens")]
    for stage, (label, snapshot) in enumerate(said.items()):
        name = "the ends" if stage == ENDS else f"stage {stage}"
        _memory(report, bench, name, snapshot, given[stage])
        spent = sum(snapshot.time_s.values()) or 1.0
        share = {kind: seconds / spent for kind, seconds in sorted(snapshot.time_s.items())}
        report.add(
            f"6.b {name}: share of compute",
            share.get("compute", 0.0),
            "of the seconds told",
            ", ".join(f"{kind} {part:.2f}" for kind, part in share.items()) + f" of {label}",
        )
    return [float(t.get("loss")) for t in told], [t.at for t in told]


def _memory(report: Report, bench: Bench, name: str, said: Any, given: int) -> None:
    """Given, beside the peak of its tensors; on a CPU the peak is of the whole process."""
    told = f"{human(said.memory_planned)} planned, peak {human(said.memory_peak)}"
    if not bench.device.is_cuda:
        report.add(f"6.b {name}: memory planned", said.memory_planned / 2**20, "MiB", told)
        return
    # A stage that is given more than it plans keeps more micro-batches.
    ratio = given / max(1, said.memory_peak)
    report.add(
        f"6.b {name}: memory given over the peak of its tensors",
        ratio,
        f"ratio; {human(given)} given",
        told,
        "at least 1",
        holds=ratio >= 1,
    )
