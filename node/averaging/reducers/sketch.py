"""The sketch of a stage's parameters that its cells are compared by; see ``spread.py``. Enters:
parameters. Leaves: a few numbers, the same at every peer that holds the same bits. Never: a round.

Of a large stage it reads a sample: one parameter, drawn once for the run, of each of ``SAMPLES``
equal stretches. What is not read counts as what is read nearby. For differences spread like noise
that adds sqrt(2 / SAMPLES) to the error of a square, and more where a few parameters hold most of
the difference.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from node.averaging.reducers.spread import WIDTH, Sketch

SAMPLES = 1 << 15
"""Most parameters that are read."""


class Sketcher:
    """Of one stage. ``sizes``: how many numbers each tensor has; ``about`` names run and stage, and
    so what is drawn.

    All parameters count as one vector, tensor after tensor in order of their names: how it is cut
    does not matter.
    """

    def __init__(self, sizes: Mapping[str, int], about: str) -> None:
        total = sum(sizes.values())
        samples = min(total, SAMPLES)
        # The stream of Philox is fixed; what numpy makes of it for other distributions may change.
        dice = np.random.Philox(
            key=int.from_bytes(blake2b(about.encode(), digest_size=16).digest(), "little")
        )
        words = dice.random_raw(samples)
        edges = np.arange(samples + 1, dtype=np.int64) * total // max(1, samples)
        at = edges[:-1] + (
            (words >> np.uint64(32)) * np.diff(edges).astype(np.uint64) >> np.uint64(32)
        ).astype(np.int64)
        self._bucket = (words & np.uint64(0xFFFF)).astype(np.int64) % WIDTH
        self._sign = np.where(words & np.uint64(1 << 16), 1.0, -1.0) * math.sqrt(
            total / max(1, samples)
        )
        self._where: dict[str, Tensor] = {}
        begin = 0
        for name, size in sorted(sizes.items()):
            first, last = np.searchsorted(at, (begin, begin + size))
            self._where[name] = torch.from_numpy(at[first:last] - begin)
            begin += size

    def of(self, parameters: Mapping[str, Tensor]) -> Sketch:
        """Numbers that fit fp32; empty when there is none, or some parameter that was read is not
        finite.

        Raises KeyError and IndexError for parameters that are not this stage's."""
        read = [
            parameters[name].detach().reshape(-1)[at.to(parameters[name].device)].float().cpu()
            for name, at in self._where.items()
        ]
        values = torch.cat(read).numpy() if read else np.zeros(0, np.float32)
        sums = np.bincount(self._bucket, self._sign * values, WIDTH).astype(np.float32)
        return tuple(sums.tolist()) if np.isfinite(sums).all() else ()
