"""Copies of a stage's weights in the 16-bit format of its products.

Enters: fp32 weights, under autocast; the news that they have changed. Leaves: the copy that a
product reads. Never: a gradient in 16 bits at a weight: a copy carries the graph to its weight, as
the copy that autocast makes for one forward does, so gradients are the same to the bit.
"""

from collections.abc import Iterator

import torch
from torch import Tensor


class WeightCopies:
    """Copies that stay from one change of the weights to the next. Autocast alone forgets its own
    at the end of every forward, and makes them again for every micro-batch.

    Whoever changes a weight calls :meth:`forget` afterwards. With ``keeps`` False weights are left
    to autocast.
    """

    def __init__(self, *, keeps: bool = True) -> None:
        self._keeps = keeps
        self._copies: dict[Tensor, Tensor] = {}

    def __iter__(self) -> Iterator[Tensor]:
        """The copies that are kept now."""
        return iter(tuple(self._copies.values()))

    def of(self, weight: Tensor) -> Tensor:
        """The tensor that a product reads for a weight: its copy under autocast, else the weight
        itself. In a compiled layer it is the weight too: the cast is part of its graph."""
        if torch.compiler.is_compiling():
            return weight
        device = weight.device.type
        cast = torch.is_autocast_enabled(device) and weight.dtype is torch.float32
        if not self._keeps or not cast:
            return weight
        # Read before the weight: if the weight changes meanwhile, the copy is put where nobody
        # looks any more.
        copies = self._copies
        wanted = torch.get_autocast_dtype(device)
        copy = copies.get(weight)
        if copy is None or copy.dtype is not wanted:
            # Forwards that record a graph read it too, whichever forward comes first.
            with torch.enable_grad():
                copy = copies[weight] = weight.to(wanted)
        return copy

    def forget(self) -> None:
        """Forget the copies of trained weights, which have changed."""
        self._copies = {w: copy for w, copy in self._copies.copy().items() if not w.requires_grad}

    def forget_all(self) -> None:
        """Forget all copies: weights that are not trained have changed too."""
        self._copies = {}


NO_COPIES = WeightCopies(keeps=False)
