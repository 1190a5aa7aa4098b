"""fp32 numbers in two halves of 16 bits: the upper is the number rounded to bf16, the lower what is
missing. Enters: tensors. Leaves: tensors, nothing changed in place. Together they are the number to
the bit; any lower half goes with any upper one, and moves it by no more than half of what bf16 can
tell apart.
"""

from __future__ import annotations

import torch
from torch import Tensor


def split(whole: Tensor) -> tuple[Tensor, Tensor]:
    """(bf16, int16) of fp32 numbers; what lies in the middle of two goes away from zero, so that
    the lower half is a signed number of 16 bits."""
    bits = whole.view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)


def join(upper: Tensor, lower: Tensor | None) -> Tensor:
    """The fp32 numbers that :func:`split` had; without a lower half those of ``upper``."""
    if lower is None:
        return upper.float()
    bits = upper.view(torch.int16).to(torch.int32) << 16
    return bits.add_(lower.to(upper.device)).view(torch.float32)
