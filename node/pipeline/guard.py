"""Checks of a tensor from a peer before it is used: its numbers must be finite, and of the usual
size.

The norm of a tensor that came is taken before (:mod:`node.pipeline.hops.intake`): on the device, on
a thread beside the event loop, or on the loop if it is short. The norm of a result is taken by the
job that made it. Here are only the verdicts.
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
    """We computed something that nobody would take."""


def check_output(size: float) -> None:
    """Raises NotFinite unless a receiver would take a tensor of this root mean square. It is of the
    numbers in the wire's format: fp16 has overflowed there."""
    if not size <= ABSURD_RMS:  # NaN fails too
        raise NotFinite(f"the result is not finite or absurd: root mean square {size:.3g}")


def norm_of_share(grads: Sequence[Tensor]) -> Tensor | None:
    """A scalar that is finite if all numbers of some parameter gradients are, on their device; None
    for no gradients. One pass over them."""
    if not grads:
        return None
    return torch.stack(torch._foreach_norm(grads)).sum()  # pyright: ignore


def check_share(norm: float) -> None:
    """Raises NotFinite when a parameter gradient has a number that is not finite. ``norm``: as
    :func:`norm_of_share`."""
    if not math.isfinite(norm):
        raise NotFinite("a parameter gradient is not finite")


class Guard:
    """The checks of one receiving peer; each objection counts against the sender and is a fact for
    the record (``emit``)."""

    def __init__(self, transport: TransportPort, emit: Callable[..., None], limit: float) -> None:
        self._transport = transport
        self._emit = emit
        self._epoch = 0
        self.watch = ActivationGuard(limit)

    def begin(self, epoch: int) -> None:
        """Tensors of this epoch follow. If it is neither the last known epoch nor the next, this
        peer has missed updates, and the sizes it knows say nothing: it begins anew."""
        if epoch not in (self._epoch, self._epoch + 1):
            self.watch = ActivationGuard(self.watch.limit)
        self._epoch = epoch

    def objection(
        self, way: Direction, stage: int, sender: PeerId, index: int, reader: TensorReader
    ) -> str:
        """Reason for which this training tensor is not used, empty if it may be. ``stage`` is the
        sender's."""
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
