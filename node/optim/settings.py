"""The optimizer and its schedule. Part of the manifest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OptimSettings:
    """Muon for matrices, AdamW for the rest."""

    name: str = "muon"
    """muon | adamw (adamw: for every parameter)."""
    lr: float = 0.02
    """Peak learning rate of Muon, in units of its update (unit spectral norm, scaled by sqrt(max(1, rows/cols)))."""
    momentum: float = 0.95
    """Muon's momentum, Nesterov form."""
    ns_steps: int = 5
    """Newton-Schulz iterations."""
    adam_lr: float = 3e-3
    """Peak learning rate of AdamW: embedding, head, norms."""
    adam_beta1: float = 0.9
    """Decay of the first moment."""
    adam_beta2: float = 0.95
    """Decay of the second moment."""
    adam_eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """Decoupled, scaled by the learning rate."""
    warmup: int = 10
    """Epochs of linear warm-up."""
    decay: float = 0.4
    """Last share of the epochs over which the rate falls linearly to a tenth."""
