"""What a server makes of pushes without a barrier: each is applied by itself, as it comes, and answered with what is there then.
Enters: what is served of a part, a cell's push of it. Leaves: what is served of it next.
Never: a half-made step: every function gives a new value, the caller adopts it on commit; a lock, a clock, a word with anybody.

A push is a cell's pseudo-gradient: what it pulled last minus what it has. Hogwild (Niu et al. 2011) applies every one; the stale-bounded
server (Ho et al. 2013) refuses one when more than a bound of others were applied since its cell's last pull. The server itself keeps
what each cell pulled, so nobody can claim to know of something newer than it was told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from node.averaging.central import admit
from node.averaging.outer import OuterSettings


@dataclass(frozen=True)
class Served:
    """Of one part: its ``value`` (fp32, CPU; never written again), its ``version``, which is the number of pushes applied since this
    server began to serve it, and the version each cell has ``pulled``. A cell that never did is taken to know the present one."""

    value: Tensor
    version: int = 0
    pulled: Mapping[int, int] = field(default_factory=dict)

    def age(self, cell: int) -> int:
        """Pushes of others applied since this cell's last pull."""
        return self.version - self.pulled.get(cell, self.version)


@torch.no_grad()
def push(here: Served, cell: int, delta: Tensor | None, s: OuterSettings) -> tuple[Served, bool]:
    """(what is served after a cell's push, whether it was applied): value - lr * delta, plain SGD. None: it only pulls.

    A push older than ``s.staleness`` changes nothing; its cell gets the value all the same. Raises ValueError for a delta of another
    shape, or one that makes numbers that are not finite.
    """
    applied = delta is not None and admit(here.version, here.version - here.age(cell), s.staleness) > 0
    if delta is None or not applied:
        return Served(here.value, here.version, {**here.pulled, cell: here.version}), applied
    if delta.shape != here.value.shape:
        raise ValueError(f"a push of {tuple(delta.shape)} to a part of {tuple(here.value.shape)}")
    value = here.value - s.lr * delta
    if not bool(torch.isfinite(value).all()):
        raise ValueError("a push that makes numbers that are not finite")
    return Served(value, here.version + 1, {**here.pulled, cell: here.version + 1}), True
