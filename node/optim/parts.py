"""Parts that can be owned: one for each parameter, with the method that steps it, the state it
keeps, and the cost of both.

No torch: the planner, the simulator and the check of a peer's state read it.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from node.optim.settings import OptimSettings
from node.partition.matrices import Method, Unit, muon_flops, shampoo_flops, soap_flops

ELEMENT_FLOPS = 500
"""Floating-point operations that could be done while one number is moved through the optimizer.

Measured on one core of a 2-core Xeon: an AdamW step takes 2.6 ns a number, fp32 matrix products run
at about 170 GF/s.
"""

ROOT_FLOPS = 180
"""Operations at that rate that take as long as Shampoo's inverse root of an a x a matrix, over a^3,
by the coupled Newton iteration of the library that steps it; an eigendecomposition, which the
planner counts, would take 11. Same core, a = 512 and 1024."""
FP32 = 4
OF_A_SIDE: dict[Method, tuple[str, str]] = {
    "soap": ("gg", "q"),
    "shampoo": ("statistics", "pre_conditioners"),
}
"""Statistics of a side of a matrix, and the basis or root made of them."""
LOW = "low"
"""Name of the state of a part with a bf16 parameter: the lower half of its fp32 master
(``owner.py``), int16 in memory and in files. On the wire it is fp32 like all state."""
AT_ONCE = 1 << 22
"""Numbers of a part that AdamW steps at once."""
SCRATCH_KEPT = 1 << 26
"""Bytes of scratch space that all threads of a process together keep from a step for the next one:
a box may have a hundred threads."""


@dataclass(frozen=True, slots=True)
class ParameterPart:
    """One parameter as an owner sees it. ``cost``: floating-point operations of a step; ``bytes``:
    of the parameter in fp32; ``state``: bytes of optimizer state, which move with the owner."""

    name: str
    shape: tuple[int, ...]
    cost: float
    bytes: int
    state: int = 0

    @property
    def unit(self) -> Unit:
        """The part as the planner sees it; a vector is a matrix of one column."""
        rows, cols = (*self.shape, 1, 1)[:2]
        return Unit(self.name, rows, cols, max(1, math.ceil(self.cost)), self.state)


def method_of(name: str, shape: tuple[int, ...], settings: OptimSettings) -> Method:
    """The method that steps a part: the matrix method for two-dimensional parameters of the blocks,
    AdamW for everything else.

    The embedding and the head are lookups and classifiers, not maps between activations: AdamW, as
    in Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024). Shampoo
    needs a preconditioner of both sides, so a matrix with a side above ``precondition_side`` is
    AdamW's too.
    """
    if len(shape) != 2 or ".layers." not in f".{name}":
        return "adamw"
    if settings.name == "shampoo" and max(shape) > settings.precondition_side:
        return "adamw"
    return cast(Method, settings.name)


def state_shapes(
    name: str, shape: tuple[int, ...], settings: OptimSettings
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a part's whole optimizer state, on which its receiver must insist. All of
    it is fp32, except for ``LOW``. For side i: ``OF_A_SIDE``, with ``_i`` behind."""
    method = method_of(name, shape, settings)
    moments = ("momentum",) if method in ("muon", "shampoo") else ("exp_avg", "exp_avg_sq")
    found = {"steps": (1,), **dict.fromkeys(moments, shape)}
    sides = [(i, a) for i, a in enumerate(shape) if a <= settings.precondition_side]
    found |= {f"{key}_{i}": (a, a) for i, a in sides for key in OF_A_SIDE.get(method, ())}
    if settings.masters:
        found[LOW] = shape
    return found


def state_bytes(name: str, shape: tuple[int, ...], settings: OptimSettings) -> int:
    """Bytes of a part's optimizer state."""
    return sum(
        (2 if key == LOW else FP32) * math.prod(s)
        for key, s in state_shapes(name, shape, settings).items()
    )


def step_cost(name: str, shape: tuple[int, ...], settings: OptimSettings) -> float:
    """Operations of one step: of the matrix method as the planner counts them, plus the cost of
    each number."""
    cost = float(ELEMENT_FLOPS * math.prod(shape))
    every = settings.precondition_every
    side = settings.precondition_side
    if (method := method_of(name, shape, settings)) == "adamw":
        return cost
    rows, cols = shape
    match method:
        case "muon":
            cost += muon_flops(rows, cols, settings.ns_steps)
        case "soap":
            cost += soap_flops(rows, cols, every, side)
        case "shampoo":
            cost += (
                shampoo_flops(rows, cols, every, side)
                + (ROOT_FLOPS - 11) * (rows**3 + cols**3) / every
            )
    return cost


def parts_of(
    shapes: Mapping[str, tuple[int, ...]], settings: OptimSettings
) -> tuple[ParameterPart, ...]:
    """All parts of a stage, sorted by name."""
    return tuple(
        ParameterPart(
            name,
            shape,
            step_cost(name, shape, settings),
            FP32 * math.prod(shape),
            state_bytes(name, shape, settings),
        )
        for name, shape in sorted((name, tuple(given)) for name, given in shapes.items())
    )


def step_scratch(parts: Sequence[ParameterPart], settings: OptimSettings, group: int) -> int:
    """Most bytes that a step takes beside its results, when parts of at most ``group`` bytes are
    stepped together.

    Matrices of one shape are orthogonalised in one stack: the direction, the input and output of
    the iteration, and five products of the short sides. Other parts are stepped one at a time. The
    factors are the growth of the resident set in a step of one matrix of 2 to 16 MiB. Parameters in
    bf16 are fp32 before and after their step.
    """
    alike = Counter(part.shape for part in parts)
    most = 0
    for part in parts:
        stacked = 1
        size = part.bytes
        short = min(part.shape, default=1)
        long = max(part.shape, default=1)
        match method_of(part.name, part.shape, settings):
            case "muon":
                stacked = min(alike[part.shape], max(1, group // part.bytes))
                scratch = stacked * (3 * part.bytes + 5 * FP32 * short**2)
            case "soap":
                scratch = 15 * part.bytes // 2 + 3 * FP32 * long**2 // 2
            case "shampoo":
                scratch = 8 * part.bytes + FP32 * long**2
            case _:
                size = min(size, FP32 * AT_ONCE)
                scratch = 2 * size
        if settings.masters:
            scratch += 2 * stacked * size
        most = max(most, scratch)
    return most
