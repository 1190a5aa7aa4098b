"""Recomputation of a stage for a backward in place of storage: gradients, the memory of a waiting
micro-batch, time; and the plan for a card."""

import ctypes
import multiprocessing
import multiprocessing.connection
import time
from pathlib import Path
from statistics import median

import psutil
import torch

from benchmarks.report import Report
from node.app.capacity import AMPLE, check_memory
from node.config import NodeConfig
from node.core.numbers import human
from node.manifest import Manifest, amended
from node.model.cost import RECOMPUTE, stash_bytes
from node.model.settings import ModelSettings
from node.model.shapes import shape_named
from node.model.stages import build
from node.pipeline.visit_buffers import StageMath
from testbed.models.visits import arrived, returned, visit

SHAPE = ModelSettings(layers=4, d_model=512, heads=8, kv_heads=4, d_ff=1536, seq_len=512)
SEQUENCES = 4
WAITING = 24
PAIRS = 7
SLOWER = 1.40
NEAR = 0.1
CARD = 16 << 30
M_MMAP_THRESHOLD = -3
"""Constant of malloc.h."""


def rows(report: Report, root: Path) -> None:
    """Rows for each way, and one for a card of 16 GB."""
    torch.set_num_threads(1)
    x, dy = (torch.randn(SEQUENCES, SHAPE.seq_len, SHAPE.d_model) for _ in range(2))
    maths = {mode: StageMath(build(SHAPE, 1, 1), "fp32", recompute=mode) for mode in RECOMPUTE}
    found = {mode: visit(math, x, dy) for mode, math in maths.items()}
    seconds: dict[str, list[float]] = {mode: [] for mode in RECOMPUTE}
    for _ in range(PAIRS):
        for mode, math in maths.items():
            began = time.perf_counter()
            visit(math, x, dy)
            seconds[mode].append(time.perf_counter() - began)
    for mode in RECOMPUTE[1:]:
        differ = sum(
            not torch.equal(share, found["off"][2][name]) for name, share in found[mode][2].items()
        )
        differ += found[mode][:2] != found["off"][:2]
        report.add(
            f"4 recompute = {mode}: tensors that differ from those of off",
            differ,
            f"of {len(found['off'][2]) + 2}: gradients, output, gradient of the input",
            "",
            "0: bit for bit",
            holds=differ == 0,
        )
        ratio = median(a / b for a, b in zip(seconds[mode], seconds["off"], strict=True))
        report.add(
            f"4 recompute = {mode}: time of a forward and backward",
            ratio,
            "times",
            f"off, {median(seconds['off']):.2f} s; median of {PAIRS}",
            f"at most {SLOWER}",
            holds=ratio <= SLOWER,
        )
    for mode in RECOMPUTE:
        predicted = stash_bytes(SHAPE, 1, 1, SEQUENCES, mode)
        measured = kept(mode)
        report.add(
            f"4 recompute = {mode}: predicted over measured memory of a micro-batch that waits",
            predicted / measured,
            f"ratio; {human(predicted)}, the stage's input {human(x.nbytes)}",
            f"growth of the resident set over {WAITING} of them",
            "0.9 to 1.1",
            holds=abs(predicted / measured - 1) <= NEAR,
        )
    large = amended(
        Manifest.default_demo(),
        {f"model.{key}": value for key, value in shape_named("qwen3-1.7b").items()}
        | {"model.seq_len": 2048, "pipeline.stages": 4, "pipeline.micro_batch": 4}
        | {"training.target_batch": 64},
    )
    config = NodeConfig(root)
    for stage in range(5):
        verdict = check_memory(config, large, stage, CARD, AMPLE)
        report.add(
            f"4 Qwen3-1.7B in 4 stages of 4 x 2,048 tokens, stage {stage}: memory planned",
            verdict.needed / CARD,
            f"of {human(CARD)}, recompute = {verdict.recompute}",
            verdict.text,
            "at most 0.9",
            holds=verdict.ok,
        )


def kept(mode: str) -> float:
    """Bytes of a micro-batch between its forward and its backward, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_wait, args=(theirs, mode))
    process.start()
    try:
        if not ours.poll(240.0):
            raise TimeoutError(f"recompute = {mode} was not measured in time")
        return ours.recv()
    finally:
        process.kill()
        process.join()


def _wait(told: multiprocessing.connection.Connection, mode: str) -> None:
    # Every tensor gets pages of its own, which go back with it: resident memory is memory held.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
    torch.set_num_threads(1)
    math = StageMath(build(SHAPE, 1, 1), "fp32", recompute=mode)
    here = psutil.Process()

    def one() -> None:
        work = arrived(torch.randn(SEQUENCES, SHAPE.seq_len, SHAPE.d_model))
        math.forward(work)
        work.output = None  # sent, and DONE has come
        waiting.append(work)

    waiting: list = []
    one()  # the library's own memory, and the tables of the rotary embedding
    returned(math, waiting.pop(), torch.randn(SEQUENCES, SHAPE.seq_len, SHAPE.d_model))
    one()
    before = here.memory_info().rss
    for _ in range(WAITING):
        one()
    told.send((here.memory_info().rss - before) / WAITING)
