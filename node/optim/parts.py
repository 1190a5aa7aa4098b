"""What can be owned: one part for each parameter, with what it costs its owner."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from node.optim.settings import OptimSettings

ELEMENT_FLOPS = 500
"""Floating-point operations that could be done while one number is moved through the optimizer.

Measured on one core of a 2-core Xeon: an AdamW step takes 2.6 ns a number, fp32 matrix products run at about 170 GF/s.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """One parameter as an owner sees it. ``cost``: floating-point operations of a step; ``bytes``: of the parameter in
    fp32, what is moved when the owner changes; ``atomic``: its update needs the whole matrix at one place."""

    name: str
    shape: tuple[int, ...]
    cost: float
    bytes: int
    atomic: bool


def is_matrix(name: str, shape: tuple[int, ...], settings: OptimSettings) -> bool:
    """Whether the matrix optimizer steps it: the two-dimensional parameters of the blocks.

    The embedding and the head are lookups and classifiers, not maps between activations: AdamW, as in
    Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024).
    """
    return settings.name == "muon" and len(shape) == 2 and ".layers." in f".{name}"


def step_cost(name: str, shape: tuple[int, ...], settings: OptimSettings) -> float:
    """FLOPs of one step: for an m x n matrix, m <= n, ``ns_steps`` * (4 n m^2 + 2 m^3), plus the cost of each number."""
    cost = float(ELEMENT_FLOPS * math.prod(shape))
    if is_matrix(name, shape, settings):
        m, n = min(shape), max(shape)
        cost += settings.ns_steps * (4 * n * m * m + 2 * m**3)
    return cost


def parts_of(shapes: Mapping[str, tuple[int, ...]], settings: OptimSettings) -> tuple[Part, ...]:
    """All parts of a stage, sorted by name."""
    return tuple(
        Part(
            name=name,
            shape=tuple(shapes[name]),
            cost=step_cost(name, tuple(shapes[name]), settings),
            bytes=4 * math.prod(shapes[name]),
            atomic=is_matrix(name, tuple(shapes[name]), settings),
        )
        for name in sorted(shapes)
    )
