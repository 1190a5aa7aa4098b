"""Part c: a block stage and the ends in fp32 and under bf16 autocast, and in fp32 beside the CPU:
differences, times, and the time of copies over the bus.

The block stage has everything that chooses a kernel: fewer key and value heads, norms of queries
and keys, documents that do not see each other.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from benchmarks.gpu.bench import Bench, differs
from benchmarks.report import Report
from node.app.capacity import LOGITS_MOST
from node.kernels.trials import MicroBatch, choose_kernels
from node.model.cost import LOGITS_AT_ONCE, flops_per_token
from node.model.documents import NO_TARGET
from node.model.kernels import EAGER, use
from node.model.lanes import Mark, lanes_of
from node.model.precision import Precision
from node.model.settings import ModelSettings
from node.model.stages import Blocks, Ends, build
from node.pipeline.device import DeviceThread, Priority
from node.pipeline.frames import FrameReader
from node.pipeline.visit_buffers import Autocast, StageMath, VisitBuffers
from node.wire.tensors import encode
from testbed.fakes.slow_lanes import SlowLanes
from testbed.models.visits import arrived, read, visit

SHAPE = ModelSettings(
    layers=6,
    d_model=768,
    heads=12,
    kv_heads=4,
    d_ff=3072,
    seq_len=512,
    vocab=40_000,
    tied=True,
    qk_norm=True,
)
TINY = ModelSettings(
    layers=2, d_model=64, heads=4, kv_heads=2, d_ff=256, seq_len=64, vocab=300, qk_norm=True
)
SEQUENCES = 8
FEW = 2
KERNELS_S = 30.0
"""Limit of the trials of kernels."""
Found = tuple[Tensor, Tensor, dict[str, Tensor]]
"""Output or loss, gradient of the input, gradients of the parameters."""
BF16 = 0.05
FP32 = 1e-4
"""Bounds of |difference| / |reference|: for bf16, where each product rounds to 0.4 %, through six
layers; for fp32 on two devices."""


def rows(report: Report, device: str, rehearse: bool) -> None:
    """Differences first, then times."""
    bench = Bench.on(device, rehearse)
    shape = TINY if rehearse else SHAPE
    sequences = FEW if rehearse else SEQUENCES
    x = bench.normal(sequences, shape.seq_len, shape.d_model)
    dy = bench.normal(sequences, shape.seq_len, shape.d_model, seed=1)
    first = x[:1], dy[:1], (shape.seq_len // 3,)
    stage = build(shape, 1, 1)
    beside = once(stage, *first, nullcontext)
    stage.to(bench.device.device)
    fp32 = once(stage, *first, nullcontext)
    _compare(report, "fp32 on the device, beside the CPU", fp32, beside, FP32)
    _compare(report, "bf16 autocast, beside fp32", once(stage, *first, bench.autocast), fp32, BF16)
    beside_copies = through_lanes(stage, bench, *first)
    _compare(
        report, "fp32, copies beside computations, beside one by one", beside_copies, fp32, FP32
    )
    _ends(report, bench, shape, first[0])
    _loss(report, bench, shape, x)
    tokens = sequences * shape.seq_len
    seconds: dict[str, float] = {}
    for name, context in (("fp32", nullcontext), ("bf16 autocast", bench.autocast)):
        math = StageMath(stage, "fp32", context)
        took = seconds[name] = bench.seconds_of_visit(math, x, dy)
        done = tokens * flops_per_token(shape, 1, 1)
        report.add(
            f"6.c {name}: a visit, forward and backward with its tensors to and from the CPU",
            1e3 * took,
            "ms",
            f"{done / took / 1e12:.1f} TFLOP/s, {tokens / took:,.0f} tokens/s; "
            f"{tokens} tokens, {shape.layers} layers of {shape.d_model}",
        )
    _kernels(report, bench, stage, (sequences, shape.seq_len))
    ratio = seconds["fp32"] / seconds["bf16 autocast"]
    report.add("6.c bf16 autocast: times as fast as fp32", ratio, "times")
    here = x.to(bench.device.device)
    came = x.pin_memory() if bench.device.is_cuda else x
    both = bench.seconds(lambda: encode(here, "fp32")) + bench.seconds(
        lambda: came.to(bench.device.device, non_blocking=True)
    )
    report.add(
        "6.c one tensor of a visit to the CPU and one from it",
        1e3 * both,
        "ms",
        f"{2 * x.nbytes / both / 1e9:.1f} GB/s, {2 * both / seconds['bf16 autocast']:.0%} of the "
        "time of a visit under autocast, which has two of each",
    )


def _kernels(
    report: Report, bench: Bench, stage: Blocks | Ends, micro_batch: tuple[int, int]
) -> None:
    """The kernels that a daemon would choose for the stage. On a processor it tries none."""
    began = time.monotonic()
    precision = Precision(bench.device, "fp32")
    work = MicroBatch(*micro_batch, documents=False)
    with TemporaryDirectory() as home:
        found = asyncio.run(
            choose_kernels(
                "auto", stage, bench.device, precision, work, Path(home), limit_s=KERNELS_S
            )
        )
    use(stage, EAGER)
    report.add(
        "6.c kernels of a stage, chosen by measurement",
        found.name,
        found.said,
        f"{time.monotonic() - began:.1f} s; problems: {'; '.join(found.problems) or 'none'}",
    )


def once(
    stage: nn.Module, x: Tensor, dy: Tensor, document_ends: Sequence[int], context: Autocast
) -> Found:
    """Output and gradients of one visit."""
    y, dx, share = visit(StageMath(stage, "fp32", context), x, dy, document_ends)
    numbers = [torch.frombuffer(bytearray(raw), dtype=torch.float32) for raw in (y, dx)]
    return numbers[0], numbers[1], dict(share)


def through_lanes(
    stage: nn.Module, bench: Bench, x: Tensor, dy: Tensor, document_ends: Sequence[int]
) -> Found:
    """As :func:`once` in fp32, by the lanes and threads of a daemon's device thread."""
    lanes = lanes_of(bench.device.device)
    if not lanes.beside:
        lanes = SlowLanes(0.0, 0.0, beside=True)
    math = StageMath(stage, "fp32")
    math.use(lanes)
    thread = DeviceThread(lanes=lanes, begin=bench.device.make_current)
    work = arrived(x, document_ends, locked=math.on_gpu)

    async def job(compute: Callable[[VisitBuffers], None], came: FrameReader | None) -> None:
        def issue() -> Mark:
            compute(work)
            return lanes.mark()

        if came is not None:
            await thread.beside(lambda: math.receive(came))
        await thread.run_through(issue, lambda mark: math.deliver(work, mark), Priority.VISIT)

    async def both() -> None:
        await job(math.forward, work.input)
        work.gradient = read(dy, locked=math.on_gpu)
        await job(math.backward, work.gradient)

    try:
        asyncio.run(both())
    finally:
        thread.close()
    sent = (bytearray(work.output or b""), bytearray(work.upstream or b""))
    y, dx = (torch.frombuffer(raw, dtype=torch.float32) for raw in sent)
    return y, dx, dict(work.share or {})


def _ends(report: Report, bench: Bench, shape: ModelSettings, h: Tensor) -> None:
    """Embedding, head and loss, with a token that has no target."""
    ends = Ends(shape)
    tokens = torch.arange(h.shape[1]).unsqueeze(0) % shape.vocab
    targets = tokens.roll(1, 1)
    targets[0, 0] = NO_TARGET

    def loss(device: torch.device, context: Autocast) -> Found:
        ends.to(device)
        inputs = h.to(device).detach().requires_grad_()
        with context():
            total, count = ends.loss(inputs + ends.embed(tokens.to(device)), targets.to(device))
        trained = dict(ends.named_parameters())
        dh, *grads = torch.autograd.grad(total, [inputs, *trained.values()])
        return total.detach() / count, dh, dict(zip(trained, grads, strict=True))

    beside = loss(torch.device("cpu"), nullcontext)
    fp32 = loss(bench.device.device, nullcontext)
    half = loss(bench.device.device, bench.autocast)
    _compare(report, "the ends, fp32 on the device, beside the CPU", fp32, beside, FP32)
    _compare(report, "the ends, bf16 autocast, beside fp32", half, fp32, BF16)


def _loss(report: Report, bench: Bench, shape: ModelSettings, h: Tensor) -> None:
    """Times of the head and its loss, forward and backward, in small pieces and in large ones."""
    vocab = 1000 if bench.rehearse else 49_152
    ends = Ends(replace(shape, vocab=vocab)).to(bench.device.device)
    math = StageMath(ends, "fp32", bench.autocast)
    targets = torch.arange(h.shape[0] * h.shape[1]).reshape(h.shape[:2]) % vocab

    def prepare() -> VisitBuffers:
        work = arrived(h, locked=math.on_gpu)
        work.targets = targets
        return work

    found: list[float] = []
    for at_once in (LOGITS_AT_ONCE, LOGITS_MOST):
        ends.logits_at_once = at_once
        found.append(1e3 * bench.seconds_with(prepare, math.loss))
    report.add(
        f"6.c the loss of {targets.numel()} tokens, a vocabulary of {vocab}: smallest pieces over "
        "largest",
        found[0] / found[1],
        f"times; {found[0]:.1f} and {found[1]:.1f} ms",
    )


def _compare(report: Report, what: str, found: Found, reference: Found, most: float) -> None:
    pairs = {"output": found[0], "gradient of the input": found[1], **found[2]}
    others = {"output": reference[0], "gradient of the input": reference[1], **reference[2]}
    off = {name: differs(tensor, others[name]) for name, tensor in pairs.items()}
    finite = all(bool(torch.isfinite(tensor).all()) for tensor in pairs.values())
    worst = max(off, key=lambda name: off[name])
    report.add(
        f"6.c {what}: largest difference of {len(off)} tensors, over the tensor's norm",
        off[worst],
        "of the norm",
        f"{worst}; output {off['output']:.2g}, input {off['gradient of the input']:.2g}; "
        f"{'all finite' if finite else 'NOT ALL FINITE'}",
        f"at most {most:g}, all finite",
        holds=finite and off[worst] <= most,
    )
