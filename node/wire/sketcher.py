"""Computes sketches of tensors on their own device, without a wait for it.

The rows of a tensor, one for each token, are brought to length 1, added up with several rows of
random weights that sum to 0, and folded into a few projections with random signs. Rows of length 1
keep one token of many times the usual size from deciding alone, and weights that sum to 0 leave out
what all tokens have in common. So two tensors of the same tokens before and after a stage are
alike, and those of other tokens are not.

The size of a tensor is the mean of the square roots of its rows' lengths, squared. The longest rows
would dominate a root mean square: in a young model the gradients of a few random tokens are many
times longer than the others. The shortest rows, which may be zero, would dominate a mean of
logarithms.
"""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from node.wire.sketch import NUMBERS, Sketch

TINY = 1e-20
"""Length below which a row counts as zero."""
MIXES = 8
"""Sums of the rows, each with weights of its own."""
FOLDS = NUMBERS // MIXES
"""Projections of one such sum."""
VALUES = 1 + NUMBERS
"""Numbers of a sketch on the device: the size, then the projections."""


class Sketcher:
    """Sketches with the weights and signs of ``seed``: peers with the same seed get the same
    sketches of a tensor, whatever their devices and number formats, up to rounding."""

    def __init__(self, seed: str) -> None:
        self._seed = seed
        self._kept: dict[tuple[str, int, torch.device], Tensor] = {}

    def sketch(self, tensor: Tensor) -> Tensor:
        """The size and the projections of ``tensor``, fp32 [VALUES] on its device."""
        rows_ND = tensor.detach().flatten(0, -2)
        count, width = rows_ND.shape
        lengths_N = torch.linalg.vector_norm(rows_ND, dim=1, dtype=torch.float32)
        weights_MN = self._weights(count, rows_ND.device) / lengths_N.clamp_min(TINY)
        sums_MD = (weights_MN.to(rows_ND.dtype) @ rows_ND).float()
        signed_MD = sums_MD * self._signs("columns", width, rows_ND.device)
        folded = pad(signed_MD, (0, -width % FOLDS)).view(MIXES, -1, FOLDS).sum(1)
        size = lengths_N.sqrt().mean().square() / math.sqrt(width)
        return torch.cat((size.view(1), folded.flatten()))

    def _weights(self, count: int, device: torch.device) -> Tensor:
        """Weights of the rows [MIXES, count]. Those of each sum add up to 0."""
        key = ("weights", count, device)
        if key not in self._kept:
            signs_MN = self._signs("rows", count, device)
            self._kept[key] = signs_MN - signs_MN.mean(1, keepdim=True)
        return self._kept[key]

    def _signs(self, what: str, count: int, device: torch.device) -> Tensor:
        """Random signs as fp32 numbers [MIXES, count]."""
        key = (what, count, device)
        if key not in self._kept:
            # A hash, not torch's generator, whose numbers differ between devices and versions.
            seed = f"{self._seed}/{what}/{count}".encode()
            raw = bytearray(hashlib.shake_256(seed).digest(MIXES * count))
            bits = torch.frombuffer(raw, dtype=torch.uint8) & 1
            self._kept[key] = (bits.float() * 2 - 1).view(MIXES, count).to(device)
        return self._kept[key]


def read_sketch(numbers: Sequence[float]) -> Sketch:
    """The sketch that has these values of :meth:`Sketcher.sketch`."""
    return Sketch.of(numbers[0], numbers[1:])
