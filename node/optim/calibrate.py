"""Measure where the ways of multiplying cross on this machine, once: a :class:`Rule` for ``newton_schulz_all``.

Enters  a device, the rule of its kind, seconds it may take.
Leaves  that rule with the crossover points measured; what there was no time for stays.
Never   a file: the caller keeps the result. A busy machine measures badly, so it is for a start or a command, not between steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import torch

from node.optim.coefficients import coefficients
from node.optim.gram import gram, standard, symmetric
from node.optim.kernel_rule import Rule

Act = Callable[[], object]
Pair = Callable[[float], tuple[Act, Act]]
"""For a size: what should be faster beyond (or up to) the crossover, and what it is compared with."""
TRIES = 3
CLEAR = 1.03
"""Times as fast that something must be to count as faster: what is equal is left simple."""
NEVER = 1 << 62
SIDES, STACKS, ASPECTS = (64, 96, 128, 192, 256, 384), (16, 32, 64, 128, 256, 384, 512), (1.25, 1.5, 1.75, 2.0, 3.0, 4.0)
LENGTHS = (1, 2, 4)
"""Columns over rows of the operands that panels are tried on."""
SIDE = 512
"""Rows of the matrices that aspects and, with twice as many in bf16, panels are tried on."""
STACK = 8


def calibrate(device: torch.device, rule: Rule, budget: float = 4.0, side: int = SIDE) -> Rule:
    """``rule`` with what was measured on ``device`` in about ``budget`` seconds; no more than one trial over it."""
    end, steps = time.monotonic() + budget, coefficients("simple", 5)

    def numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        x = torch.randn(shape, device=device)
        return (x / torch.linalg.matrix_norm(x, keepdim=True)).to(dtype)

    def alone(size: float) -> tuple[Act, Act]:
        low, full = (numbers(dtype, int(size), int(size)) for dtype in (torch.bfloat16, torch.float32))
        return lambda: standard(low, steps), lambda: standard(full, steps)

    def together(dtype: torch.dtype) -> Pair:
        def pair(size: float) -> tuple[Act, Act]:
            stack = numbers(dtype, STACK, int(size), int(size))
            singles = stack.to(torch.bfloat16 if rule.units and size >= rule.bf16_from else torch.float32).unbind()
            return lambda: standard(stack, steps), lambda: [standard(x, steps) for x in singles]

        return pair

    def elongated(dtype: torch.dtype) -> Pair:
        def pair(aspect: float) -> tuple[Act, Act]:
            x = numbers(dtype, side, int(side * aspect))
            return lambda: gram(x, steps), lambda: standard(x, steps)

        return pair

    def panelled(dtype: torch.dtype, rows: int) -> Pair:
        def pair(length: float) -> tuple[Act, Act]:
            x, out = numbers(dtype, rows, int(rows * length)), torch.empty(rows, rows, dtype=dtype, device=device)
            return lambda: symmetric(x, x.mT, out, 1), lambda: symmetric(x, x.mT, out)

        return pair

    def compare(sizes: Sequence[float], pair: Pair) -> Iterable[tuple[float, bool]]:
        for size in sizes:
            if time.monotonic() >= end:
                return
            yield size, _faster(*pair(size), device)

    bf16, fp32, found = torch.bfloat16, torch.float32, rule
    trials: list[tuple[str, Sequence[float], Pair, bool]] = [
        ("gram_fp32", ASPECTS, elongated(fp32), True),
        ("stack_fp32_to", STACKS, together(fp32), False),
    ]
    if rule.units:
        trials += [
            ("bf16_from", SIDES, alone, True),
            ("gram_bf16", ASPECTS, elongated(bf16), True),
            ("stack_bf16_to", STACKS, together(bf16), False),
        ]
    for name, sizes, pair, onwards in trials:
        measured = list(compare(sizes, pair))
        if len(measured) == len(sizes):
            found = replace(found, **{name: since(measured) if onwards else until(measured)})
    if device.type == "cpu":
        for name, dtype, rows in (("panels_fp32", fp32, side), ("panels_bf16", bf16, 2 * side))[: 2 if rule.units else 1]:
            measured = list(compare(LENGTHS, panelled(dtype, rows)))
            if len(measured) == len(LENGTHS):
                least = since(measured)
                found = replace(found, **{name: 0 if least >= NEVER else int(rows * rows * least)})
    return found


def since(measured: Iterable[tuple[float, bool]]) -> float:
    """The least size from which on all are faster; ``NEVER`` without."""
    least: float = NEVER
    for size, faster in measured:
        least = min(least, size) if faster else NEVER
    return least


def until(measured: Iterable[tuple[float, bool]]) -> float:
    """The greatest size up to which all are faster; 0 without."""
    most: float = 0
    for size, faster in measured:
        if not faster:
            break
        most = size
    return most


def _faster(new: Act, old: Act, device: torch.device) -> bool:
    """Whether the best of a few tries of ``new`` clearly beats that of ``old``, in turns, after one try unmeasured."""
    best = [float("inf")] * 2
    for turn in range(TRIES + 1):
        for i, act in enumerate((new, old)):
            start = time.perf_counter()
            act()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if turn:
                best[i] = min(best[i], time.perf_counter() - start)
    return best[0] * CLEAR < best[1]
