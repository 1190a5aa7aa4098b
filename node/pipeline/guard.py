"""Checks of tensors before they are used: the numbers must be finite and of the usual size.

This module only judges norms. :mod:`node.pipeline.hops.intake` computes the norm of a received
tensor: on the device, on a thread beside the event loop, or on the loop if the tensor is short. The
job that made a result computes the norm of the result.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from node.core.ids import PeerId
from node.pipeline.events import Direction
from node.pipeline.watch import ActivationGuard
from node.transport.port import TransportPort
from node.wire.tensors import TensorReader

ABSURD_RMS = 1e6
"""No activation of a normalised model and no gradient of its loss comes near this root mean
square."""
ODD_WEIGHT = 0.5
"""A fault's weight for a tensor that is finite but of an odd size: an honest sender is odd once
when the model changes."""


class NotFinite(ValueError):
    """A result of this peer that no receiver would accept."""


def check_output(size: float) -> None:
    """Raises NotFinite unless a receiver would accept a tensor of this root mean square. ``size``
    is computed from the encoded numbers, because fp16 may overflow in the encoding."""
    if not size <= ABSURD_RMS:  # NaN fails too
        raise NotFinite(f"the result is not finite or absurd: root mean square {size:.3g}")


def norm_of_share(grads: Sequence[Tensor]) -> Tensor | None:
    """A scalar on the gradients' device that is finite if all their numbers are; None if there are
    no gradients. It takes one pass over them."""
    if not grads:
        return None
    return torch.stack(torch._foreach_norm(grads)).sum()  # pyright: ignore


def check_share(norm: float) -> None:
    """Raises NotFinite if a parameter gradient has a number that is not finite. ``norm``: the value
    that :func:`norm_of_share` computed."""
    if not math.isfinite(norm):
        raise NotFinite("a parameter gradient is not finite")


class Guard:
    """Checks of the tensors that this peer receives. Each objection counts as a fault of the sender
    and is recorded (``emit``)."""

    def __init__(self, transport: TransportPort, emit: Callable[..., None], limit: float) -> None:
        self._transport = transport
        self._emit = emit
        self._epoch = 0
        self.watch = ActivationGuard(limit)

    def begin(self, epoch: int) -> None:
        """Begin an epoch. If it is neither the last known epoch nor the next, this peer has missed
        updates and forgets the usual sizes of tensors."""
        if epoch not in (self._epoch, self._epoch + 1):
            self.watch = ActivationGuard(self.watch.limit)
        self._epoch = epoch

    def objection(
        self, way: Direction, stage: int, sender: PeerId, index: int, reader: TensorReader
    ) -> str:
        """Reason not to use this training tensor; "" if it may be used. ``stage``: the sender's
        stage."""
        size = reader.rms()
        if not size <= ABSURD_RMS:  # NaN fails too
            kind = "activation-not-finite"
            what = "not finite or absurd"
            weight = 1.0
        elif off := self.watch.odd((stage, way), sender, size):
            kind = "activation-odd"
            what = f"{off:.1f} deviations off"
            weight = ODD_WEIGHT
        else:
            return ""
        tensor = "a gradient" if way is Direction.BACKWARD else "an activation"
        text = f"{tensor} whose root mean square is {what} ({size:.3g})"
        self._transport.fault(sender, text, weight)
        self._emit(kind, text, "warning", peer=sender, index=index, way=way.value)
        return text

    def finite(self, reader: TensorReader) -> bool:
        """Return True if a tensor of forward-only work may be used."""
        return reader.rms() <= ABSURD_RMS
