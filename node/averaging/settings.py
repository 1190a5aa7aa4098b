"""How replicas average. Part of the manifest."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AveragingSettings:
    """One cell per stage with a butterfly exchange every epoch."""

    cell: str = "all"
    """Which replicas share an optimizer step: "all" of a stage."""
    wire: str = "fp32"
    """Number format of gradients on the wire: fp32, bf16, fp16. Parameters always travel in fp32."""
    round_timeout_s: float = 30.0
    """A contribution or a fresh part that is later counts as missing."""
    max_gradient_norm: float = 1e6
    """A contribution whose norm per token is above it, or not finite, is refused and counted against its sender."""
