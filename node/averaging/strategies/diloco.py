"""DiLoCo (arXiv 2311.08105): members train alone for a while, then the average of their moves is
one outer step. Enters: parameters at the anchor and now, averaged differences. Leaves: the next
anchor and momentum, and the parameters to train on from. Never: an average (the strategy makes it),
a half-made step: every function gives a new state, the caller adopts it on commit.

The streaming form (arXiv 2501.18512) does it in fragments, a few steps late, and keeps a part of
the progress made meanwhile.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from node.averaging.strategies.outer import OuterSettings

Named = Mapping[str, Tensor]


@dataclass(frozen=True)
class OuterState:
    """``anchor``: parameters after the last outer step, fp32. ``momentum``: of the outer optimizer,
    same names and shapes; zeros at first."""

    anchor: dict[str, Tensor]
    momentum: dict[str, Tensor]

    @classmethod
    def begin(cls, parameters: Named) -> "OuterState":
        """The state at the beginning; its anchor is a copy of ``parameters``."""
        anchor = {
            name: p.detach().to("cpu", torch.float32, copy=True) for name, p in parameters.items()
        }
        return cls(anchor, {name: torch.zeros_like(p) for name, p in anchor.items()})


@torch.no_grad()
def pseudo_gradient(state: OuterState, local: Named) -> dict[str, Tensor]:
    """Anchor minus local parameters, for the names in ``local``: where gradient descent would have
    gone, with a minus."""
    return {
        name: state.anchor[name] - p.detach().to("cpu", torch.float32) for name, p in local.items()
    }


@torch.no_grad()
def outer_step(state: OuterState, mean: Named, s: OuterSettings) -> OuterState:
    """One step of SGD along the averaged pseudo-gradients ``mean``; names that are not in it keep
    anchor and momentum.

    buf <- momentum * buf + mean; Nesterov: anchor <- anchor - lr * (mean + momentum * buf), as
    torch.optim.SGD; plain: anchor - lr * buf. Element by element and in a fixed order, so equal
    inputs give equal bits at every member. Raises ValueError for numbers that are not finite.
    """
    anchor = dict(state.anchor)
    momentum = dict(state.momentum)
    for name, delta in mean.items():
        if not bool(torch.isfinite(delta).all()):
            raise ValueError(f"the pseudo-gradient of {name} is not finite")
        if s.momentum:
            buf = momentum[name] * s.momentum + delta
        else:
            buf = delta.clone()
        # delta + momentum * buf is buf itself without momentum.
        along = buf
        if s.optimizer == "nesterov" and s.momentum:
            along = delta + s.momentum * buf
        anchor[name] = anchor[name] - s.lr * along
        momentum[name] = buf
    return OuterState(anchor, momentum)
