"""Choice between kernels of a stage: what is tried, and what is taken.

Enters  the operator's setting, facts of the stage, and for each kind of kernels its measurement.
Leaves  the kinds to measure, and a KernelDecision with the reason for people.
Never   a clock or a tensor: trials.py measures.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["compile", "liger"]
"""Kernels beside torch's own ("eager")."""
KINDS: tuple[Kind, ...] = ("liger", "compile")
"""In the order in which they are measured: a compiler may take all the time there is."""

GAIN = 1.05
"""Least ratio of eager's time to another one's at which that one is taken: a smaller gain does not
pay for a compiler in memory."""
AGREES = {"fp32": 1e-4, "bf16": 0.05}
"""Largest |difference| / |eager's| of an output or gradient. fp32: another order of sums, of which
two devices differ by 1.5e-6. bf16: every product rounds to 0.4 %, and through six layers two right
ways differ by 1 %. A wrong sign or a forgotten factor is off by far more. The same bounds hold
between a GPU and the CPU, and between the formats, whose peers train together."""


@dataclass(frozen=True, slots=True)
class StageFacts:
    """Facts of a stage that decide what is tried. ``asked``: the operator's setting. ``cuda``: it
    computes on a GPU. ``format``: number format of its forward and backward. ``documents``: the run
    keeps documents apart. ``has_triton``, ``has_liger``: packages that are installed."""

    asked: str
    cuda: bool
    format: str
    documents: bool
    has_triton: bool
    has_liger: bool


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Measurement of kernels beside eager's. ``ratio``: eager's time over theirs. ``error``: the
    largest |difference| / |eager's|. ``problem``: why there are none, "" if there are."""

    ratio: float = 0.0
    error: float = math.inf
    problem: str = ""


@dataclass(frozen=True, slots=True)
class KernelDecision:
    """``name``: of the kernels that are taken. ``said``: the same with its reason, for people; ""
    where there was no choice."""

    name: Literal["eager", "compile", "liger"]
    said: str
    problems: tuple[str, ...] = ()
    """Why kernels that were tried, or asked for, cannot be had."""


def tried(facts: StageFacts) -> tuple[list[Kind], list[str]]:
    """The kinds to measure, and why the one that was asked for is left out."""
    if facts.asked == "auto":
        # To compile for a processor takes minutes there, for a gain nobody has measured.
        if not facts.cuda:
            return [], []
        return [kind for kind in KINDS if not _obstacle(kind, facts)], []
    wanted: list[Kind] = [kind for kind in KINDS if kind == facts.asked]
    obstacles = [_obstacle(kind, facts) for kind in wanted]
    if any(obstacles):
        return [], [f"{facts.asked}: {why}" for why in obstacles]
    return wanted, []


def _obstacle(kind: Kind, facts: StageFacts) -> str:
    """Why kernels of this kind cannot be tried; "" if they can."""
    if facts.format == "fp16":
        return "an fp16 backward may be repeated, and these kernels keep nothing for that"
    if kind == "compile":
        if facts.documents:
            return "the run keeps documents apart, whose number would be compiled in"
        if facts.cuda and not facts.has_triton:
            return "triton is not installed"
        return ""
    if not facts.cuda:
        return "its kernels are for GPUs"
    if not (facts.has_liger and facts.has_triton):
        return "liger-kernel is not installed"
    return ""


def decide(
    facts: StageFacts, times: dict[Kind, KernelTime], problems: Sequence[str] = ()
) -> KernelDecision:
    """The fastest kernels that agree with eager; those that the operator named even if they are
    slower."""
    least = GAIN if facts.asked == "auto" else 0.0
    found = list(problems)
    taken: Kind | None = None
    for kind, time in times.items():
        why = time.problem
        if not why and not time.error <= AGREES[facts.format]:
            why = f"off by {time.error:.1g} of eager's numbers"
        if why:
            found.append(f"{kind}: {why}")
        elif time.ratio >= least and (taken is None or time.ratio > times[taken].ratio):
            taken = kind
    if taken is not None:
        said = f"{taken}, {times[taken].ratio:.2f} times as fast as eager"
        return KernelDecision(taken, said, tuple(found))
    slower = [f"{k} {t.ratio:.2f} times as fast" for k, t in times.items() if t.ratio]
    reason = ", ".join([*slower, *found])
    return KernelDecision("eager", f"eager ({reason})" if reason else "", tuple(found))
