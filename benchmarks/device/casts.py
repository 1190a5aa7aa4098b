"""Kept bf16 copies of weights beside autocast, which casts the weights in every forward: time of a
micro-batch and memory of all micro-batches in flight, on a CPU.

Part 6 of ``python -m benchmarks.device``. A stage of the product computes one visit after another
on one thread, with kept copies and with autocast's in turns. Times are the shortest processor
times.
"""

import pathlib
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from benchmarks.report import Report
from node.core.ids import ENDS
from node.core.numbers import human
from node.model.cost import cast_bytes
from node.model.settings import ModelSettings
from node.model.stages import Ends, build
from node.pipeline.visit_buffers import StageMath
from testbed.models.visits import arrived, visit

ITEM = "6"
HALF = partial(torch.autocast, "cpu", dtype=torch.bfloat16)
MODEL = ModelSettings(layers=2, d_model=512, heads=8, kv_heads=8, d_ff=1536, seq_len=256)
ROUNDS = 15
FEWER = 5
PIECE = 32
"""Tokens of a piece of the loss, as where the vocabulary is large."""
LEAST = 0.95
"""Least speed over autocast's: keeping the copies costs nothing."""
LEAST_HEAD = 1.05
"""The same for the head: its weight is large, and autocast casts it for every piece of the
loss."""


class Case(NamedTuple):
    """A visit that is timed: ``sequences`` of the model's length at a stage. ``least``: speed over
    autocast's."""

    name: str
    model: ModelSettings
    stage: int
    sequences: int
    least: float = LEAST


WIDE = replace(MODEL, d_model=1024, heads=16, kv_heads=16, d_ff=3072)
SMALL = replace(MODEL, d_model=64, heads=1, kv_heads=1, d_ff=192, seq_len=64)
CASES = (
    Case("two layers of 64, 64 tokens", SMALL, 1, 1),
    Case("two layers of 512, 256 tokens", MODEL, 1, 1),
    Case("two layers of 512, 2,048 tokens", MODEL, 1, 8),
    Case("two layers of 1,024, 256 tokens", WIDE, 1, 1),
    Case(
        f"the loss over 16,384 words, 256 tokens in pieces of {PIECE}",
        replace(MODEL, vocab=16_384),
        ENDS,
        1,
        LEAST_HEAD,
    ),
)


class Found(NamedTuple):
    """Seconds of a visit, and the bytes that it keeps for backward."""

    seconds: float
    nbytes: int


def timed(case: Case, rounds: int) -> tuple[Found, Found]:
    """A visit with kept copies, and with autocast's."""
    x = torch.randn(case.sequences, case.model.seq_len, case.model.d_model)
    maths: list[StageMath] = []
    acts: list[Callable[[], object]] = []
    for keeps in (True, False):
        module = build(case.model, 1, case.stage)
        if keeps:
            module.keep_copies()
        math = StageMath(module, "fp32", HALF)
        maths.append(math)
        if isinstance(module, Ends):
            module.logits_at_once = PIECE * case.model.vocab
            targets = torch.randint(0, case.model.vocab, x.shape[:2])
            acts.append(partial(_loss, math, x, targets))
        else:
            acts.append(partial(visit, math, x, x))
    seconds = [float("inf"), float("inf")]
    for turn in range(rounds + 1):
        for i, act in enumerate(acts):
            began = time.thread_time()
            act()
            if turn:  # the first one makes the copies that are kept
                seconds[i] = min(seconds[i], time.thread_time() - began)
    kept, cast = (
        Found(took, sum(math.graph_bytes.values()))
        for took, math in zip(seconds, maths, strict=True)
    )
    return kept, cast


def _loss(math: StageMath, h: torch.Tensor, targets: torch.Tensor) -> None:
    work = arrived(h)
    work.targets = targets
    math.loss(work)


def rows(report: Report, root: pathlib.Path | None = None, quick: bool = False) -> None:
    """Measure and add the rows."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for case in CASES:
            kept, cast = timed(case, FEWER if quick else ROUNDS)
            _add(report, case, kept, cast)
    finally:
        torch.set_num_threads(threads)


def _add(report: Report, case: Case, kept: Found, cast: Found) -> None:
    speed = cast.seconds / kept.seconds
    report.add(
        f"{ITEM} {case.name}: visits a second with weights cast once, over autocast's",
        round(speed, 3),
        "times",
        f"{1e3 * kept.seconds:.1f} and {1e3 * cast.seconds:.1f} ms",
        f">= {case.least:g}",
        speed >= case.least,
    )
    if case.stage == ENDS:
        return
    copies = cast_bytes(case.model, 1, case.stage)
    less = cast.nbytes - kept.nbytes
    report.add(
        f"{ITEM} {case.name}: bytes that a micro-batch in flight keeps less, over those of one "
        "copy of the weights",
        round(less / copies, 3),
        "share",
        f"{human(kept.nbytes)} instead of {human(cast.nbytes)}; one copy of {human(copies)} is "
        "kept for all",
        ">= 0.95",
        less >= 0.95 * copies,
    )
