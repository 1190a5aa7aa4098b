"""Tensors in the formats that stages send in, encoded at once."""

import torch

from node.wire.tensors import begin_encoding, to_host


def encode_measured(
    tensor: torch.Tensor, wire: str, *, measure: bool
) -> tuple[memoryview, float | None]:
    """The numbers of ``tensor`` in any format that stages send in, and the relative error of the
    numbers that a receiver reads from them: the 2-norm of the differences over the 2-norm of the
    tensor. None unless ``measure``; 0 for a zero tensor.

    int8 and int4 are made on the tensor's device, and brought over as bytes. Raises ValueError for
    an unknown format, and in int8 and int4 for a number that is not finite, or nearly so.
    """
    made = begin_encoding(tensor, wire, measure=measure)
    return made.read(to_host(made.data), [look.item() for look in made.looks])
