"""The two update rules as functions: state and gradient in, new state and fresh parameter out, nothing changed in place.

Both do the operations of torch.optim.Muon and torch.optim.AdamW in their order, so equal settings give equal numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from node.optim.settings import OptimSettings

State = dict[str, torch.Tensor]
"""Optimizer state of one part, by the names of the checkpoint: "momentum" and "steps", or "exp_avg", "exp_avg_sq", "steps"."""


def muon_direction(
    settings: OptimSettings, gradient: torch.Tensor, state: Mapping[str, torch.Tensor]
) -> tuple[torch.Tensor, State]:
    """What is to be orthogonalised, and the new momentum: M' = mu M + (1 - mu) G; Nesterov: (1 - mu) G + mu M'.

    The factor (1 - mu) does not matter to the update, which is scale free; it makes momentum a mean gradient.
    """
    former = state.get("momentum")
    fresh = 1 - settings.momentum
    momentum = gradient * fresh if former is None else former.to(gradient.device).lerp(gradient, fresh)
    return gradient.lerp(momentum, settings.momentum), {"momentum": momentum, "steps": _next(state)}


def muon_fresh(settings: OptimSettings, parameter: torch.Tensor, orthogonal: torch.Tensor, lr: float) -> torch.Tensor:
    """W (1 - lr wd) - lr sqrt(max(1, rows/cols)) O, for the [rows, cols] parameter."""
    rows, cols = parameter.shape
    kept = parameter * (1 - lr * settings.weight_decay) if settings.weight_decay else parameter
    return torch.add(kept, orthogonal.to(kept.dtype), alpha=-lr * math.sqrt(max(1, rows / cols)))


def adamw(
    settings: OptimSettings, parameter: torch.Tensor, gradient: torch.Tensor, state: Mapping[str, torch.Tensor], lr: float
) -> tuple[torch.Tensor, State]:
    """AdamW (Loshchilov and Hutter, 2019). Vectors, which are norm scales, are not decayed."""
    zero = torch.zeros_like(gradient)
    exp_avg = state.get("exp_avg", zero).to(gradient.device).lerp(gradient, 1 - settings.adam_beta1)
    exp_avg_sq = state.get("exp_avg_sq", zero).to(gradient.device) * settings.adam_beta2
    exp_avg_sq.addcmul_(gradient, gradient, value=1 - settings.adam_beta2)
    count = _next(state)
    steps = int(count.item())
    decay = settings.weight_decay if parameter.ndim >= 2 else 0.0
    root = exp_avg_sq.sqrt().div_(math.sqrt(1 - settings.adam_beta2**steps)).add_(settings.adam_eps)
    fresh = (parameter * (1 - lr * decay)).addcdiv_(exp_avg, root, value=-lr / (1 - settings.adam_beta1**steps))
    return fresh, {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "steps": count}


def _next(state: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """One more than the steps behind this state, as a tensor of shape [1], because state travels as fp32 tensors."""
    former = state.get("steps")
    return torch.ones(1) if former is None else former + 1
