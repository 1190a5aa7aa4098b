"""The number format of forward and backward, chosen for this process, and the scale that keeps
small gradients in fp16.

Parameters, sums of gradients, optimizer steps and tensors on the wire stay in fp32 (or the run's
formats) whatever is chosen here.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from node.model.device import Device, Format

FIRST_SIZE = 2.0**12
"""Size to which the largest number of the first gradient is brought, and the largest such size."""
LEAST_SIZE = 2.0**-8
GROW_AFTER = 200
"""Backward passes without overflow after which the size is doubled."""


class GradientScale:
    """Factor of gradients on their way through an fp16 backward, where numbers below 6e-8 would
    become zero. The largest number of an incoming gradient is brought to ``size``. After an
    overflow the size is halved and the same backward is computed again, so no micro-batch is lost.
    Factors are powers of two, which change no digit."""

    def __init__(self) -> None:
        self.size = FIRST_SIZE
        self._good = 0

    def gradients(
        self, output: Tensor, inputs: Sequence[Tensor], gradient: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """As ``torch.autograd.grad``, None for inputs without influence. ``gradient``: of
        ``output``; None for a scalar output. Numbers are infinite or NaN if they are so at size
        :data:`LEAST_SIZE` too, or if the output or its gradient is: the size is not the reason
        then, and stays as it was."""
        before = self.size
        seed = torch.ones_like(output) if gradient is None else gradient
        largest = float(seed.abs().max())
        sound = math.isfinite(largest) and _finite((output,))
        exponent = 0
        if math.isfinite(largest):
            exponent = math.frexp(largest)[1]
        while True:
            factor = math.ldexp(self.size, -exponent)
            found = torch.autograd.grad(
                output, inputs, seed * factor, retain_graph=True, allow_unused=True
            )
            if _finite(found):
                break
            if not sound or self.size <= LEAST_SIZE:
                self.size = before
                return _divided(found, factor)
            self.size /= 2
            self._good = 0
        self._good += 1
        if self._good >= GROW_AFTER:
            self._good = 0
            self.size = min(FIRST_SIZE, 2 * self.size)
        return _divided(found, factor)


class Precision:
    """The format in which a stage computes. ``choose`` is asked before every forward, so the answer
    may change when the processor has been measured; a backward has the format of its forward.

    ``parameters``: format in which parameters are held. Those in bf16 are computed with under
    autocast only.
    """

    def __init__(
        self, device: Device, parameters: str, choose: Callable[[], Format] | None = None
    ) -> None:
        self._device = device
        self._parameters = parameters
        self._choose = choose or (lambda: device.usual_format)
        self.scale = GradientScale()

    @property
    def format(self) -> Format:
        chosen = self._choose()
        if chosen == "fp32" and self._parameters == "bf16":
            return "bf16"
        return chosen

    def autocast(self) -> AbstractContextManager[object]:
        """The context of a forward. A processor computes in fp32 where no gradient is recorded: a
        product for one token of a text gains little in 16 bits, and the first token after every
        change of the weights would wait for their copies."""
        if not torch.is_grad_enabled() and not self._device.is_cuda and self._parameters == "fp32":
            return self._device.computing_in("fp32")
        return self._device.computing_in(self.format)

    def gradients(
        self, output: Tensor, inputs: Sequence[Tensor], gradient: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """As ``torch.autograd.grad``, None for inputs without influence, scaled where the format
        needs it."""
        if self.format == "fp16":
            return self.scale.gradients(output, inputs, gradient)
        return torch.autograd.grad(output, inputs, gradient, allow_unused=True)


def _divided(gradients: Sequence[Tensor | None], factor: float) -> tuple[Tensor | None, ...]:
    """Gradients by a factor, in fp32, which holds the small numbers that fp16 could not."""
    return tuple(None if g is None else g.float() / factor for g in gradients)


def _finite(gradients: Sequence[Tensor | None]) -> bool:
    return all(g is None or bool(torch.isfinite(g).all()) for g in gradients)
