"""DiLoCo (arXiv 2311.08105): members train alone for a while, then the average of what they moved
by is one outer step. Enters: parameters at the anchor and now, averaged differences. Leaves: the
next anchor and momentum, and what to train on from. Never: an average (that is the strategy's), a
half-made step: every function gives a new state, the caller adopts it on commit.

The streaming form (arXiv 2501.18512) does it in fragments, a few steps late, and keeps part of what
was learned meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from node.averaging.outer import OuterSettings
from node.core.errors import StepFault

Named = Mapping[str, Tensor]


@dataclass(frozen=True)
class OuterState:
    """``anchor``: parameters after the last outer step, fp32. ``momentum``: of the outer optimizer,
    same names and shapes; zeros at first."""

    anchor: dict[str, Tensor]
    momentum: dict[str, Tensor]

    @classmethod
    def begin(cls, parameters: Named) -> OuterState:
        """From a copy of ``parameters``."""
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
    inputs give equal bits at every member. Raises ValueError for a shape that is not the anchor's,
    or numbers that are not finite.
    """
    anchor, momentum = dict(state.anchor), dict(state.momentum)
    for name, delta in mean.items():
        if delta.shape != anchor[name].shape:
            raise ValueError(
                f"{name} is {tuple(anchor[name].shape)}, its pseudo-gradient {tuple(delta.shape)}"
            )
        if not bool(torch.isfinite(delta).all()):
            raise ValueError(f"the pseudo-gradient of {name} is not finite")
        buf = momentum[name] * s.momentum + delta if s.momentum else delta.clone()
        # delta + momentum * buf is buf itself without momentum.
        along = delta + s.momentum * buf if s.optimizer == "nesterov" and s.momentum else buf
        anchor[name], momentum[name] = anchor[name] - s.lr * along, buf
    return OuterState(anchor, momentum)


@torch.no_grad()
def pushed(value: Tensor, delta: Tensor, rate: float) -> Tensor:
    """value - rate * delta: what a server without a barrier makes of one pseudo-gradient by itself.
    It has no momentum, which would count the direction that cells have in common once for each of
    them.

    Raises StepFault for another shape, or numbers that are not finite.
    """
    if delta.shape != value.shape:
        raise StepFault(f"a push of {tuple(delta.shape)} to a part of {tuple(value.shape)}")
    after = value - rate * delta
    if not bool(torch.isfinite(after).all()):
        raise StepFault("a push that makes numbers that are not finite")
    return after


@torch.no_grad()
def merged(states: Sequence[OuterState], weights: Sequence[float]) -> OuterState:
    """Weighted mean of anchors and momenta of members who each made their own outer step.

    The step is linear, so this is the step of the mean from the mean anchor; replicas over partial
    groups contract only with it. Raises ValueError without states, or when weights do not sum to 1.
    """
    if not states or abs(sum(weights) - 1) > 1e-6:
        raise ValueError("weights of states that are merged sum to 1")
    names = states[0].anchor

    def mean(of: Sequence[dict[str, Tensor]], name: str) -> Tensor:
        total = of[0][name] * weights[0]
        for one, weight in zip(of[1:], weights[1:], strict=True):
            total = total.add_(one[name], alpha=weight)
        return total

    anchors, momenta = [s.anchor for s in states], [s.momentum for s in states]
    return OuterState({n: mean(anchors, n) for n in names}, {n: mean(momenta, n) for n in names})


@torch.no_grad()
def mixed(local: Named, state: OuterState, mixing: float) -> dict[str, Tensor]:
    """What to train on from, for the names in ``local``: ``mixing`` of the local parameters, the
    rest from the anchor."""
    if not mixing:
        return {name: state.anchor[name].clone() for name in local}
    return {
        n: torch.lerp(state.anchor[n], p.detach().to("cpu", torch.float32), mixing)
        for n, p in local.items()
    }


@dataclass(frozen=True, slots=True)
class Due:
    """What happens after a step: fragments whose deltas are sent, fragments whose outer step
    lands."""

    send: tuple[int, ...]
    land: tuple[int, ...]


def due(step: int, s: OuterSettings) -> Due:
    """After step ``step`` (1, 2, ..): fragment p is sent every ``every`` steps, offset by p * every
    / fragments, and lands ``overlap`` later.

    One fragment and no overlap is plain DiLoCo: sent and landed after steps every, 2 every, .. A
    function of the step alone, so all members agree on the fragment.
    """
    gap = s.every // s.fragments

    def at(when: int) -> tuple[int, ...]:
        if when < gap or when % gap:
            return ()
        return ((when // gap - 1) % s.fragments,)

    return Due(at(step), at(step - s.overlap))


def fragments(layers: Mapping[str, int | None], count: int) -> list[tuple[str, ...]]:
    """Names of every fragment: layer i goes to fragment i mod ``count`` (strided), what has no
    layer to the smallest in turn.

    ``layers``: the layer of each parameter, None outside of layers. Raises ValueError when a
    fragment would be empty.
    """
    found: list[list[str]] = [[] for _ in range(count)]
    for name, layer in sorted(layers.items()):
        if layer is not None:
            found[layer % count].append(name)
    for name in sorted(n for n, layer in layers.items() if layer is None):
        min(found, key=len).append(name)
    if not all(found):
        raise ValueError(f"{len(layers)} parameters do not fill {count} fragments")
    return [tuple(names) for names in found]
