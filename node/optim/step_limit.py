"""The largest step that the optimizer of a run makes of a part in one epoch, whatever its gradients
are. Fresh parameters that moved further were made by something else.

Enters: a part's shape, the run's settings, an epoch; parameters before and after. Leaves: bounds,
and the check of parameters against them. Never: the peer that gave the parameters.
``docs/optimizer.md`` derives the bounds.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from node.optim.gram import coefficients
from node.optim.parts import AT_ONCE, method_of
from node.optim.settings import OptimSettings, learning_rate
from node.partition.matrices import Method

GRID = 4000
"""Singular values from 0 to 1 at which the polynomial of Newton-Schulz is evaluated."""
ROUNDED = 1.25
"""Times the bound of exact Newton-Schulz, for products in bf16: tests hold their error below 0.1 of
the norm, and the spectral norm of the Gram form within 1.2 of the exact one."""
ROTATED = 4.0
"""Times the bound of Adam, for SOAP: its second moments are of the basis before the last rotation,
so no number follows from its settings alone. Owners cut a longer step to this length."""
EVERY_STEP = 1024
"""Steps up to which the bound of Adam is evaluated at each; then at every doubling."""
MOST_STEPS = 1 << 24
KEPT = 1.005
"""Multiple of the bound to which owners cut longer steps, so that rounding cuts none."""
ALLOWED = 1.01
"""Multiple of the bound that members allow."""
ROUNDING = {"fp32": 2.0**-22, "bf16": 1.01 * 2.0**-7}
"""Share of a number by which rounding may move it. A number in bf16 is rounded to 8 bits, so it is
up to 2^-8 of itself away from the master that its step begins from, and so is its fresh value from
the result of the step."""


@dataclass(frozen=True)
class StepLimit:
    """Bounds on one epoch's step of a part. A number p moves by at most ``each`` plus ``share``
    times abs(p). All numbers together move by at most ``whole`` plus ``share`` times their own
    2-norm, in the 2-norm."""

    each: float
    whole: float
    share: float

    def times(self, factor: float) -> "StepLimit":
        """Bounds that are ``factor`` times as wide, but for the share of the numbers."""
        return StepLimit(factor * self.each, factor * self.whole, self.share)

    def excess(self, before: Tensor, fresh: Tensor) -> float:
        """Length of the step from ``before`` to ``fresh`` relative to the bounds: at most 1 within
        them."""
        most = 0.0
        moved = 0.0
        own = 0.0
        for old, new in _rows(before, fresh):
            step = torch.sub(new, old)
            moved += float(torch.linalg.vector_norm(step)) ** 2
            own += float(torch.linalg.vector_norm(old)) ** 2
            step.abs_().sub_(old.abs(), alpha=self.share)
            most = max(most, float(step.max()))
        if not math.isfinite(moved):
            return math.inf
        beyond = math.sqrt(moved) - self.share * math.sqrt(own)
        return max(_ratio(most, self.each), _ratio(beyond, self.whole))


@dataclass(frozen=True)
class StepLimits:
    """Bounds on the steps of a run with these settings. ``epochs``: of the run, 0 for unknown."""

    settings: OptimSettings
    epochs: int

    def of(self, name: str, shape: tuple[int, ...], epoch: int) -> StepLimit:
        """Bounds on the step of a whole part in this epoch."""
        return self.by_method(method_of(name, shape, self.settings), shape, epoch)

    def by_method(self, method: Method, shape: tuple[int, ...], epoch: int) -> StepLimit:
        """Bounds on the step of a part, or a piece of a part, by the method that steps the part."""
        settings = self.settings
        lr = learning_rate(settings, method, epoch, self.epochs)
        decay = lr * settings.weight_decay
        root = math.sqrt(math.prod(shape))
        match method:
            case "muon":
                rows, cols = shape
                each = lr * math.sqrt(max(1.0, rows / cols))
                each *= newton_schulz_bound(settings.coefficients, settings.ns_steps)
                whole = each * math.sqrt(min(shape))
            case "shampoo":
                # A mean of updates that are as long as one which changes every number by 1.
                whole = each = lr * root
            case "soap":
                ratio = adam_bound(settings.momentum, settings.adam_beta2)
                whole = each = lr * max(1.0, abs(1 - decay)) * ROTATED * ratio * root
            case _:
                each = lr * adam_bound(settings.adam_beta1, settings.adam_beta2)
                whole = each * root
        return StepLimit(each, whole, decay + ROUNDING[settings.parameters])

    def objection(
        self, before: Mapping[str, Tensor], fresh: Mapping[str, Tensor], epoch: int
    ) -> str:
        """The reason for which no owner made ``fresh`` of ``before`` in this epoch; empty for
        none."""
        for name, new in fresh.items():
            old = before[name]
            limit = self.of(name, tuple(old.shape), epoch).times(ALLOWED)
            if not (excess := limit.excess(old.detach(), new)) <= 1.0:
                return f"{name} moved {excess:.3g} times as far as a step of the optimizer can"
        return ""

    def cut(self, method: Method, before: Tensor, fresh: Tensor, epoch: int) -> Tensor:
        """The fresh parameter, or a piece of it, both in fp32, with a step of this method that was
        too long cut to the bounds. This happens with state of the optimizer that does not belong
        together, and with SOAP."""
        limit = self.by_method(method, tuple(before.shape), epoch).times(KEPT)
        excess = limit.excess(before, fresh)
        if excess <= 1.0:
            return fresh
        return torch.lerp(before, fresh, 1.0 / excess)


@lru_cache(64)
def adam_bound(beta1: float, beta2: float) -> float:
    """Upper bound on abs(m) / sqrt(v) of Adam's corrected moments after any number of steps; inf
    where there is none."""
    if beta1**2 >= beta2:
        if not beta1:
            return 1.0
        return math.inf
    ratio = beta1**2 / beta2
    most = 0.0
    for steps in _steps():
        terms = (1 - ratio**steps) / (1 - ratio)
        corrected = math.sqrt((1 - beta2**steps) / (1 - beta2)) * (1 - beta1) / (1 - beta1**steps)
        most = max(most, corrected * math.sqrt(terms))
    return most


@lru_cache(64)
def newton_schulz_bound(name: str, steps: int) -> float:
    """Upper bound on the singular values that Newton-Schulz with these coefficients leaves."""
    values = [i / GRID for i in range(GRID + 1)]
    for a, b, c in coefficients(name, steps):
        values = [a * s + b * s**3 + c * s**5 for s in values]
    return ROUNDED * max(map(abs, values))


def _steps() -> Iterator[int]:
    yield from range(1, EVERY_STEP)
    steps = EVERY_STEP
    while steps <= MOST_STEPS:
        yield steps
        steps *= 2


def _rows(before: Tensor, fresh: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Some rows of both at a time, in fp32: an embedding takes little memory beside itself."""
    if not before.numel():
        return
    old = before.reshape(before.shape[0] if before.ndim else 1, -1)
    new = fresh.reshape(old.shape)
    rows = max(1, AT_ONCE // old.shape[1])
    for start in range(0, len(old), rows):
        piece = slice(start, start + rows)
        yield old[piece].float(), new[piece].to(old.device, torch.float32)


def _ratio(length: float, bound: float) -> float:
    """Length relative to its bound; any step is too long where there can be none."""
    if math.isinf(bound) or length <= 0:
        return 0.0
    if not bound:
        return math.inf
    return length / bound
