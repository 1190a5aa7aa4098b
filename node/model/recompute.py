"""Activation recomputation: a backward computes activations anew, so they need not be kept.

Enters: a part of the model as a function of one tensor, and the parameters that it reads. Leaves:
its output with a graph of the input alone. Never: random numbers, which would differ in the
backward.

torch.utils.checkpoint does the same. Its first call loads torch's compiler, which nothing here
uses: 70 MiB of memory, and seconds in the middle of the first epoch.
"""

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

Part = Callable[[Tensor], Tensor]


def recomputed(part: Part, x: Tensor, parameters: Iterable[Tensor]) -> Tensor:
    """Return ``part(x)``. A backward computes it again, in the same number format, with the same
    gradients to the bit. ``parameters``: of the model that ``part`` reads; others get no
    gradient."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return cast(Tensor, _Recomputed.apply(part, x, *trained))


class _Recomputed(torch.autograd.Function):
    """The graph node of a part that is computed again."""

    @staticmethod
    def forward(ctx: FunctionCtx, part: Part, x: Tensor, *trained: Tensor) -> Tensor:
        device = x.device.type
        node = cast(Any, ctx)
        node.part = part
        # Not among the saved tensors: these may come back as other tensors than the part reads.
        node.trained = trained
        node.casts = torch.is_autocast_enabled(device)
        node.format = torch.get_autocast_dtype(device)
        ctx.save_for_backward(x)
        # A copy of a parameter that is made without gradients must not be kept for a part with
        # gradients.
        with torch.autocast(device, node.format, node.casts, cache_enabled=False):
            return part(x)

    @staticmethod
    def backward(ctx: FunctionCtx, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        node = cast(Any, ctx)
        (saved,) = node.saved_tensors
        needs_x, *needs_trained = node.needs_input_grad[1:]
        x = saved.detach().requires_grad_(needs_x)
        with torch.enable_grad(), torch.autocast(saved.device.type, node.format, node.casts):
            y = node.part(x)
            if not y.dim():
                # torch loads a library of 30 MiB to compare a gradient's shape with an output's.
                y = y * cast(Tensor, gradients[0])
                gradients = (None,)
        wanted = [t for t, needs in zip(node.trained, needs_trained, strict=True) if needs]
        if needs_x:
            wanted = [x, *wanted]
        found = iter(torch.autograd.grad(y, wanted, gradients, allow_unused=True))
        of_all = (next(found) if needs else None for needs in (needs_x, *needs_trained))
        return None, *of_all
