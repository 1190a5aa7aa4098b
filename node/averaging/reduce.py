"""The owner's arithmetic: which contributions are fit, and their mean, the same bits in whatever order they came."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence

import torch

from node.core.ids import PeerId
from node.wire.tensors import dtype_of, encode


def unfit(named: Mapping[str, torch.Tensor], tokens: int, max_norm: float) -> str:
    """Why these gradient sums must not be averaged, or "".

    The 2-norm of each tensor over ``tokens`` may be at most ``max_norm``; a NaN or an infinity anywhere makes it not finite.
    """
    for name, tensor in named.items():
        norm = float(torch.linalg.vector_norm(tensor, dtype=torch.float32)) / max(1, tokens)
        if not math.isfinite(norm):
            return f"gradient of {name} is not finite"
        if norm > max_norm:
            return f"gradient of {name} has norm {norm:.3g} per token, above {max_norm:.3g}"
    return ""


def as_travelled(tensor: torch.Tensor, wire: str) -> torch.Tensor:
    """fp32 on the CPU with the rounding of the wire, so that a sum does not depend on which peer owns the part."""
    return tensor.detach().to(dtype_of(wire)).to("cpu", torch.float32)


def mean(
    contributions: Mapping[PeerId, Sequence[torch.Tensor]],
    order: Sequence[PeerId],
    tokens: float,
    factors: Mapping[PeerId, float] | None = None,
) -> list[torch.Tensor]:
    """Sum in ``order``, each contribution times its factor (1 when not named), and divide by ``tokens``.

    In order, because floating-point addition does not commute with arrival; a factor of 1 changes no bit.
    """
    first, *rest = order
    factors = factors or {}
    totals = [tensor.clone(memory_format=torch.contiguous_format) for tensor in contributions[first]]
    if factors.get(first, 1) != 1:
        for total in totals:
            total.mul_(factors[first])
    for peer in rest:
        factor = factors.get(peer, 1)
        for total, tensor in zip(totals, contributions[peer], strict=True):
            total.add_(tensor) if factor == 1 else total.add_(tensor, alpha=factor)
    return totals if tokens == 1 else [total.div_(tokens) for total in totals]


def digest(tensors: Sequence[torch.Tensor]) -> str:
    """Hex sha256 over the fp32 bytes in order: what the receiver compares with what arrived."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(encode(tensor, "fp32"))
    return sha.hexdigest()


def finite(tensor: torch.Tensor) -> bool:
    """No NaN and no infinity. In one pass and without another tensor: no sum of fp32 numbers overflows fp64."""
    return bool(torch.isfinite(tensor.sum(dtype=torch.float64)))


def settled(name: str, tensor: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A private fp32 CPU copy of a fresh parameter. Raises ValueError when the optimizer gave another shape or no numbers."""
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"the step made {name} {tuple(tensor.shape)}, expected {tuple(shape)}")
    if not finite(tensor):
        raise ValueError(f"the step made {name} not finite")
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
