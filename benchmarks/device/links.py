"""Fewer bytes between stages: tokens per second on slow lines, held-out loss, and cost of the codec
for int8 and int4 beside bf16.

Part 1 of ``python -m benchmarks.device``. Speed: swarms of two daemons, ends and one block stage,
each in a network namespace of its own, with a line of 3 Mbit/s and 100 ms each way between them
(needs root; packets are delayed and paced by the hub of ``testbed/networks/wan.py``). One swarm for
each format, and one whose plans may choose. The busy share of the bf16 swarm's line shows that the
line is the limit. Loss: models of four stages in one process, whose activations and gradients go
through the codec of the daemons at every boundary; three seeds for each format. Codec: seconds of
encoding, checking and decoding, on one thread.
"""

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor

from benchmarks.report import Report
from node.core.ids import ENDS
from node.manifest import Manifest, amended
from node.model.documents import ends_of, lengths_of
from node.model.settings import ModelSettings
from node.model.shapes import layers_of
from node.pipeline.settings import forward_only_wire
from node.wire.tensors import TensorReader, expected_head
from testbed.daemons import books
from testbed.daemons.fleet import Box, Hang, Peer, folder
from testbed.daemons.told import Told
from testbed.fakes.encoded import encode_measured
from testbed.networks.wan import Wan, why_not
from testbed.reference.swarm import Reference
from testbed.reference.unsplit import Unsplit

ITEM = "1"
RATE_BPS = 3e6
DELAY_S = 0.1
BUSY = 0.9
"""Least busy share of the bf16 swarm's line."""
FASTER = {"int8": 1.8, "int4": 3.0}
"""Least tokens per second, relative to bf16's."""
WORSE = 1.01
"""Highest held-out loss, relative to bf16's with the same seed."""
MICRO_BATCHES = 160
"""Number of micro-batches in an epoch, large enough that its beginning and end, where the line
waits, are a small part."""
SLOW_MODEL: dict[str, Any] = {
    "model.layers": 2,
    "model.d_model": 128,
    "model.heads": 4,
    "model.kv_heads": 2,
    "model.d_ff": 256,
    "model.seq_len": 64,
    "pipeline.stages": 1,
    "pipeline.micro_batch": 4,
    "pipeline.forward_timeout_s": 120.0,
    "scheduler.paths": "round-robin",
    "training.min_replicas": 1,
    "training.eval_every": 0,
    "training.buddy_every": 0,
    "training.epochs": 100_000,
    "training.epoch_timeout_s": 600.0,
    "data.source": "builtin:pydoc",
}
"""A tensor has 64 KiB in bf16, which take 0.17 s on the line; computing takes a tenth of that."""
NODE = (
    "checkpoint.every=0",
    "limits.in_flight=12",
    "transport.keepalive_timeout_s=20",
    "transport.dial_timeout_s=30",
)
START_S = 300.0
EPOCH_S = 400.0
"""Longest wait for the next commit."""
LOSS_MODEL: dict[str, Any] = {
    "model.layers": 4,
    "model.d_model": 192,
    "model.heads": 4,
    "model.kv_heads": 2,
    "model.d_ff": 512,
    "model.seq_len": 64,
    "pipeline.stages": 3,
    "pipeline.micro_batch": 8,
    "training.target_batch": 8,
    "training.eval_batches": 16,
    "data.source": "builtin:pydoc",
    "optimizer.warmup": 20,
}
UPDATES = 300
SEEDS = (1, 2, 3)
CODEC_SHAPE = (8, 512, 1024)
"""A micro-batch of 4 M numbers."""
TIMES = 7


# ------------------------------------------------------------------ speed


@dataclass(frozen=True)
class Pace:
    """One swarm. ``tokens_s``: tokens per second over the measured epochs; ``busy``: share of the
    line's rate that was used meanwhile, in the busier direction; ``wires``: formats of the tensors
    that were sent last, and ``error`` their largest relative error."""

    tokens_s: float
    busy: float
    seconds: float
    wires: tuple[str, ...]
    error: float


def pace(changes: dict[str, Any], skipped: int, epochs: int, micro_batches: int) -> Pace:
    """Start a swarm on the slow line, and measure ``epochs`` epochs after the first ``skipped``.
    Raises Hang if it does not train."""
    size = SLOW_MODEL["pipeline.micro_batch"]
    settings = {**SLOW_MODEL, "training.target_batch": size * micro_batches, **changes}
    with contextlib.ExitStack() as stack:
        root = stack.enter_context(folder())
        wan = stack.enter_context(Wan(2))
        wan.shape(0, 1, delay_s=DELAY_S, rate_bps=RATE_BPS)
        box = Box(root, (wan.host(0), wan.host(1)), NODE)
        stack.callback(box.clean_up)
        peers = box.swarm((1, 1), **settings)
        try:
            for peer in peers:
                peer.start()
            box.wait("the first epoch", lambda: commits(peers), START_S + EPOCH_S, tuple(peers))
            return _measured(wan, box, peers, skipped, epochs)
        except Hang:
            print(box.story(), file=sys.stderr)
            raise


def _measured(wan: Wan, box: Box, peers: list[Peer], skipped: int, epochs: int) -> Pace:
    def reached(count: int) -> tuple[float, tuple[int, ...]]:
        """Wait for ``count`` commits; return the time in seconds and the bytes sent in each
        direction."""
        box.wait(
            f"{count} epochs",
            lambda: len(commits(peers)) >= count,
            EPOCH_S * max(1, count),
            tuple(peers),
        )
        return time.monotonic(), tuple(link.carried for link in wan.links.values())

    first = len(commits(peers)) + skipped
    began, before = reached(first)
    ended, after = reached(first + epochs)
    done = commits(peers)[: first + epochs]
    took = done[-1].at - done[first - 1].at
    tokens = sum(e.get("tokens") for e in done[first:])
    carried = max(b - a for a, b in zip(before, after, strict=True))
    sent = [line for peer in peers for line in peer.status().sent]
    return Pace(
        tokens / took,
        carried * 8 / RATE_BPS / (ended - began),
        took,
        tuple(line.wire for line in sent),
        max((line.error for line in sent), default=0.0),
    )


def commits(peers: list[Peer]) -> list[Told]:
    """The commits that the leader told, one for each epoch, in order."""
    return books.commits(e for p in peers for e in p.told())


def speed_rows(report: Report, quick: bool) -> None:
    """Add the rows of the swarms on slow lines; one that does not hold where there can be none."""
    if why := why_not():
        report.add(f"{ITEM} swarms on slow lines", 0, "swarms", why, "4", holds=False)
        return
    micro_batches = MICRO_BATCHES
    epochs = 2
    if quick:
        micro_batches = 32
        epochs = 1
    found = {
        wire: pace({"pipeline.wire": wire}, 0, epochs, micro_batches)
        for wire in ("bf16", "int8", "int4")
    }
    usual = found["bf16"]
    line = f"line of {RATE_BPS / 1e6:g} Mbit/s, {DELAY_S * 1000:g} ms each way"
    report.add(
        f"{ITEM} {line}: busy with bf16",
        round(usual.busy, 3),
        "x",
        f"{usual.tokens_s:.1f} tokens/s over {usual.seconds:.0f} s",
        f">= {BUSY}",
        usual.busy >= BUSY,
    )
    for wire, least in FASTER.items():
        ratio = found[wire].tokens_s / usual.tokens_s
        said = f"{found[wire].tokens_s:.1f} tokens/s, line busy {found[wire].busy:.2f}"
        report.add(
            f"{ITEM} {line}: tokens per second, {wire} over bf16",
            round(ratio, 3),
            "x",
            said,
            f">= {least}",
            ratio >= least,
        )
        report.add(
            f"{ITEM} {line}: relative error of what was sent, {wire}",
            round(found[wire].error, 4),
            "",
            "as status says",
        )
    chosen_by_plan = pace(
        {"pipeline.wire": "bf16", "pipeline.wire_least": "int4"}, 2, epochs, micro_batches
    )
    coarse = sum(wire == "int4" for wire in chosen_by_plan.wires)
    ratio = chosen_by_plan.tokens_s / usual.tokens_s
    report.add(
        f"{ITEM} {line}: links that a plan gave int4, bf16 to int4 allowed",
        coarse,
        "links",
        f"{ratio:.2f} times the tokens per second of bf16",
        "2",
        coarse == len(chosen_by_plan.wires) == 2,
    )


# ------------------------------------------------------------------ loss


def received(tensor: Tensor, wire: str) -> Tensor:
    """The numbers of a tensor as a receiver has them: encoded, read and decoded as daemons do."""
    data, _ = encode_measured(tensor, wire, measure=False)
    head = expected_head("", tensor.shape, wire)
    reader = TensorReader([head], [("", tuple(tensor.shape))], wire)
    reader.feed(data)
    return reader.numbers(tensor.device)


class Crossing(torch.autograd.Function):
    """A boundary between two stages: activations forward, gradients back, in the wire's format."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, wire: str) -> Tensor:  # pyright: ignore
        ctx.wire = wire
        return received(h, wire)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # pyright: ignore
        return received(gradient, ctx.wire), None


class Cut(Unsplit):
    """The model in one process, with a crossing before every block stage and before the head."""

    def __init__(self, settings: ModelSettings, stages: int, wire: str) -> None:
        super().__init__(settings)
        self._stages = stages
        self._wire = wire

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor) -> tuple[Tensor, int]:
        ends = ends_of(targets_BT)
        lengths: tuple[int, ...] = ()
        if ends:
            lengths = lengths_of(ends, *tokens_BT.shape)
        wire = self._wire
        if not torch.is_grad_enabled():
            wire = forward_only_wire(wire)
        h = self.ends.embed(tokens_BT)
        blocks = self.blocks
        for stage in range(ENDS + 1, self._stages + 1):
            h = Crossing.apply(h, wire)
            for layer in layers_of(self.settings, self._stages, stage):
                h = blocks.model.layers[str(layer)](h, blocks.rope, lengths)
        return self.ends.loss(Crossing.apply(h, wire), targets_BT)  # pyright: ignore


def held_out(wire: str, seed: int, updates: int, home: Path) -> float:
    """Held-out loss in nats per token of a model that was trained in this format."""
    changes = {
        **LOSS_MODEL,
        "model.init_seed": seed,
        "data.seed": seed,
        "training.epochs": updates,
    }
    manifest = amended(Manifest.default_demo(), changes)
    run = Reference(manifest, home)
    run.model = Cut(manifest.model, manifest.pipeline.stages, wire)
    for _ in run.train(updates):
        pass
    return run.evaluate()


def loss_rows(report: Report, quick: bool) -> None:
    """Add the rows of the models in one process."""
    seeds = SEEDS
    updates = UPDATES
    if quick:
        seeds = SEEDS[:1]
        updates = 60
    with folder() as home:
        found = {
            wire: [held_out(wire, seed, updates, home) for seed in seeds]
            for wire in ("bf16", *FASTER)
        }
    for wire in FASTER:
        pairs = zip(found[wire], found["bf16"], strict=True)
        ratios = [mine / usual for mine, usual in pairs]
        worst = max(ratios)
        said = ", ".join(f"{loss:.4f}" for loss in found[wire])
        usual = ", ".join(f"{loss:.4f}" for loss in found["bf16"])
        report.add(
            f"{ITEM} held-out loss after {updates} updates in one process, {wire} over bf16, worst "
            f"of {len(seeds)} seeds",
            round(worst, 5),
            "ratio",
            f"{said} nats beside {usual}; mean ratio {mean(ratios):.4f}",
            f"<= {WORSE}",
            worst <= WORSE,
        )


# ------------------------------------------------------------------ codec


def seconds_of(work: Callable[[], object]) -> float:
    """Median seconds of one call."""
    work()
    times: list[float] = []
    for _ in range(TIMES):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return median(times)


def codec_rows(report: Report, shape: tuple[int, ...] = CODEC_SHAPE) -> None:
    """Add the cost of a micro-batch: GB of fp32 numbers per second, and milliseconds."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        for wire in ("bf16", *FASTER):
            _codec(report, x, wire)
    finally:
        torch.set_num_threads(threads)


def _codec(report: Report, x: Tensor, wire: str) -> None:
    head = expected_head("", x.shape, wire)
    data, _ = encode_measured(x, wire, measure=False)

    def reader() -> TensorReader:
        made = TensorReader([head], [("", tuple(x.shape))], wire)
        made.feed(data)
        return made

    came = reader()
    parts = {
        "encode": lambda: encode_measured(x, wire, measure=False),
        "encode and measure": lambda: encode_measured(x, wire, measure=True),
        "check and norm": came.rms,
        "decode": lambda: came.numbers(x.device),
    }
    gigabytes = 4 * x.numel() / 1e9
    for name, work in parts.items():
        took = seconds_of(work)
        report.add(
            f"{ITEM} {wire}, {name}, one thread",
            round(gigabytes / took, 2),
            "GB/s of fp32",
            f"{took * 1000:.1f} ms for {x.numel() / 1e6:.1f} M numbers, "
            f"{len(data) / 2**20:.1f} MiB",
        )


# ------------------------------------------------------------------ all


def rows(report: Report, root: Path | None = None, quick: bool = False) -> None:
    """Measure and add the rows. ``root`` is not used: swarms have folders of their own."""
    began = time.monotonic()
    codec_rows(report)
    loss_rows(report, quick)
    speed_rows(report, quick)
    report.add(f"{ITEM} this measurement took", round(time.monotonic() - began), "s")
