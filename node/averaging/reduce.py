"""The owner's arithmetic: which contributions are fit, and their mean, the same bits in whatever order they came."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from node.averaging.codecs import encode, settle
from node.core.ids import PeerId


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


def finite(tensor: torch.Tensor) -> bool:
    """No NaN and no infinity. In one pass and without another tensor: no sum of fp32 numbers overflows fp64."""
    return bool(torch.isfinite(tensor.sum(dtype=torch.float64)))


def settled(name: str, tensor: torch.Tensor, shape: Sequence[int], codec: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What a fresh part is to everybody (a private fp32 CPU tensor), and the bytes that say so.

    Raises ValueError when the step gave another shape, or numbers that are not finite or cannot be sent in ``codec``.
    """
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"the step made {name} {tuple(tensor.shape)}, expected {tuple(shape)}")
    if codec == "fp32":
        fresh = tensor.detach().to("cpu", torch.float32, copy=True).contiguous()
        data = encode(fresh, codec)
    else:
        data, fresh = settle(tensor, codec)
    if not finite(fresh):
        raise ValueError(f"the step made {name} not finite")
    return fresh, data
