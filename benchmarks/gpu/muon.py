"""Part e: Muon's step: equal to the CPU's, operations a second beside a plain product, ways of
multiplying that the rule chooses between, the rule that a daemon measures, share of a training
step."""

import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import count

import torch
from torch import Tensor

from benchmarks.gpu import autocast
from benchmarks.gpu.bench import Bench, differs
from benchmarks.kernels import flops
from benchmarks.report import Report
from node.model.stages import build
from node.optim.kernel_rule import CUDA, KernelRule, rule_from
from node.optim.newton_schulz import newton_schulz_all
from node.optim.owner import Owner
from node.optim.settings import OptimSettings
from node.optim.trials import measure, menu_of
from node.pipeline.visit_buffers import StageMath
from node.wire.tensors import to_host
from testbed.models.visits import visit
from testbed.reference.swarm import step_all

Shape = tuple[int, int]
COMPARED: tuple[Shape, ...] = ((256, 256), (768, 768), (768, 3072), (3072, 768), (1024, 2048))
TIMED: tuple[tuple[int, Shape], ...] = (
    (24, (256, 256)), (24, (768, 768)), (12, (768, 3072)), (8, (1024, 1024)), (8, (2048, 2048)),
    (4, (2048, 8192)), (2, (4096, 4096)), (2, (4096, 14336)),
)  # fmt: skip
SIDES = (128, 256, 512, 1024, 2048)
ASPECTS = (1.0, 1.5, 2.0, 3.0, 4.0)
SQUARE = 8192
MANY = 8
STEPS = 5
TINY = {
    "compared": ((64, 64), (64, 256), (256, 64)),
    "timed": ((4, (64, 64)), (2, (64, 256))),
    "sides": (64, 128),
    "aspects": (1.0, 2.0),
    "square": 256,
}
BF16 = 0.05
FP32 = 1e-3
"""Largest |difference| / |reference| of a step: bf16 rounds 2 % of the norm where the polynomial
leaves singular values up to 30 % from 1 (gram.py); fp32 on two devices."""
RULE_S = 20.0
"""Most seconds that a daemon's first start on a card may measure."""
MICRO_BATCHES = 16
"""Micro-batches in the epoch that a step is compared with."""
LR = 0.02


def rows(report: Report, device: str, rehearse: bool) -> None:
    """Exactness, then speed, then the share of an epoch, then what a measured rule would need."""
    bench = Bench.on(device, rehearse)
    torch.set_grad_enabled(False)
    for shape in TINY["compared"] if rehearse else COMPARED:
        _compared(report, bench, shape)
    rate = _product(report, bench, TINY["square"] if rehearse else SQUARE)
    for many, shape in TINY["timed"] if rehearse else TIMED:
        _timed(report, bench, many, shape, rate)
    _share(report, bench)
    _ways(report, bench)
    _rule(report, bench, TINY["timed"] if rehearse else TIMED)


def _compared(report: Report, bench: Bench, shape: Shape) -> None:
    """One matrix, by the rule and in fp32, beside fp32 on the CPU."""
    matrix = bench.normal(*shape)
    (beside,) = newton_schulz_all([matrix], STEPS, True, rule=KernelRule())
    here = matrix.to(bench.device.device)
    for name, chosen, most in (
        ("bf16, as on a GPU", CUDA, BF16),
        ("fp32", replace(CUDA, bf16_from=0), FP32),
    ):
        (found,) = newton_schulz_all([here], STEPS, True, rule=chosen)
        off = differs(found, beside)
        report.add(
            f"6.e {shape[0]}x{shape[1]} orthogonalised in {name}: difference from fp32 on the CPU",
            off,
            "of the norm",
            "",
            f"at most {most:g}",
            holds=off <= most,
        )


def _product(report: Report, bench: Bench, side: int) -> float:
    """Operations a second of one large bf16 product."""
    a, b = (bench.normal(side, side, seed=n).to(bench.device.device).bfloat16() for n in (0, 1))
    rate = 2 * side**3 / bench.seconds(lambda: a @ b)
    report.add(f"6.e a bf16 product of {side}", rate / 1e12, "TFLOP/s")
    return rate


def _timed(report: Report, bench: Bench, many: int, shape: Shape, rate: float) -> None:
    """A whole step of ``many`` matrices by their owner, and the operations in it."""
    owner = Owner(OptimSettings(lr=LR, warmup=0), 0)
    names = [f"model.layers.{i}.w.weight" for i in range(many)]
    device = bench.device.device
    parameters = {n: bench.normal(*shape, seed=i).to(device) for i, n in enumerate(names)}
    gradients = {n: bench.normal(*shape, seed=i + many).to(device) for i, n in enumerate(names)}
    epoch = count()
    took = bench.seconds(lambda: step_all(owner, parameters, gradients, next(epoch)))
    done = many * flops(shape, device)[0]
    report.add(
        f"6.e step of {many} of {shape[0]}x{shape[1]}",
        1e3 * took,
        "ms",
        f"{done / took / 1e12:.2f} TFLOP/s, {done / took / rate:.0%} of a plain product's",
    )


def _share(report: Report, bench: Bench) -> None:
    """The stage of part c: its step beside the forwards and backwards of an epoch."""
    shape = autocast.TINY if bench.rehearse else autocast.SHAPE
    sequences = autocast.FEW if bench.rehearse else autocast.SEQUENCES
    stage = build(shape, 1, 1).to(bench.device.device)
    math = StageMath(stage, "fp32", bench.autocast)
    x = bench.normal(sequences, shape.seq_len, shape.d_model)
    with torch.enable_grad():
        passes = bench.seconds_of_visit(math, x, x)
        _, _, share = visit(math, x, x)
    mean: dict[str, Tensor] = {name: gradient.cpu() for name, gradient in share.items()}
    live = {name: parameter.data for name, parameter in stage.named_parameters()}
    owner = Owner(OptimSettings(warmup=0), 0)
    epoch = count()

    def step() -> None:
        for tensor in step_all(owner, live, mean, next(epoch)).values():
            to_host(tensor)

    took = bench.seconds(step)
    whole = took + MICRO_BATCHES * passes
    report.add(
        f"6.e step, means and fresh parameters over the bus: share of an epoch of {MICRO_BATCHES} "
        "micro-batches",
        took / whole,
        f"share; {1e3 * took:.1f} ms of {1e3 * whole:.1f}",
        f"{sum(t.numel() for t in live.values()) / 1e6:.1f} M parameters, {sequences} x "
        f"{shape.seq_len} tokens a micro-batch",
    )


def _ways(report: Report, bench: Bench) -> None:
    """For a rule that is measured: stacks beside one after the other, the Gram form beside the
    standard one."""
    began = time.monotonic()
    device = bench.device.device
    for side in TINY["sides"] if bench.rehearse else SIDES:
        matrices = [bench.normal(side, side, seed=i).to(device) for i in range(MANY)]
        seconds = {
            name: bench.seconds(
                lambda stack=stack, ms=matrices: newton_schulz_all(ms, STEPS, stack, rule=always), 5
            )
            for name, stack in (("stacked", True), ("alone", False))
        }
        report.add(
            f"6.e {MANY} of {side}x{side}: one after the other over stacked",
            seconds["alone"] / seconds["stacked"],
            "times",
            f"{1e3 * seconds['alone']:.2f} and {1e3 * seconds['stacked']:.2f} ms; the rule stacks "
            f"up to {CUDA.stack_bf16_to}",
        )
    for side in TINY["sides"] if bench.rehearse else SIDES[2:]:
        for aspect in TINY["aspects"] if bench.rehearse else ASPECTS:
            matrix = bench.normal(side, int(side * aspect)).to(device)
            seconds = {
                name: bench.seconds(
                    lambda chosen=chosen, m=matrix: newton_schulz_all(
                        [m], STEPS, False, rule=chosen
                    ),
                    5,
                )
                for name, chosen in (("gram", gram), ("standard", standard))
            }
            report.add(
                f"6.e {side}x{int(side * aspect)}: standard form over Gram form",
                seconds["standard"] / seconds["gram"],
                "times",
                f"{1e3 * seconds['standard']:.2f} and {1e3 * seconds['gram']:.2f} ms; the rule "
                f"takes Gram from {CUDA.gram_aspect} and {CUDA.gram_from}",
            )
    report.add("6.e seconds for these ways", time.monotonic() - began, "s")


def _rule(report: Report, bench: Bench, timed: Sequence[tuple[int, Shape]]) -> None:
    """The rule that a daemon measures at its first start on this card, and steps by it beside steps
    by the default one."""
    began = time.monotonic()
    menu = menu_of(bench.device)
    rule = rule_from(measure(threading.Event(), bench.device), menu)
    took = time.monotonic() - began
    said = ", ".join(f"{name} {value}" for name, value in asdict(rule).items())
    report.add(
        "6.e seconds to measure the rule of this card",
        took,
        "s",
        said,
        f"at most {RULE_S:g}",
        holds=None if bench.rehearse else took <= RULE_S,
    )
    for many, shape in timed:
        matrices = [bench.normal(*shape, seed=i).to(bench.device.device) for i in range(many)]
        seconds = [
            bench.seconds(lambda by=by, ms=matrices: newton_schulz_all(ms, STEPS, True, rule=by), 5)
            for by in (menu.usual, rule)
        ]
        ratio = seconds[0] / seconds[1]
        report.add(
            f"6.e {many} of {shape[0]}x{shape[1]}: by the default rule over the measured one",
            ratio,
            "times",
            f"{1e3 * seconds[0]:.2f} and {1e3 * seconds[1]:.2f} ms",
            "at least 0.95",
            holds=None if bench.rehearse else ratio >= 0.95,
        )


always = replace(CUDA, stack_bf16_to=1 << 20, gram_from=1 << 20)
gram, standard = (replace(CUDA, gram_from=n, gram_aspect=1.0) for n in (1, 1 << 20))
