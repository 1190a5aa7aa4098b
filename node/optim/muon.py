"""The two update rules as functions: state and gradient in, new state and fresh parameter out,
nothing changed in place.

Both do the operations of torch.optim.Muon and torch.optim.AdamW in their order, so equal settings
give equal numbers.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from node.optim.kernel_rule import KernelChoice
from node.optim.newton_schulz import EPS, Wide, finish, norms
from node.optim.scratch import empty, reuse
from node.optim.settings import OptimSettings

FEW = 1 << 19
"""Numbers in all matrices of a shape up to which everything is done on stacks of them. 64 of 64x64
take 2.6 ms that way on two threads, 3.0 with an operation for each matrix; 16 of 256x256 gain
nothing."""
State = dict[str, Tensor]
"""Optimizer state of one part, by the names of the checkpoint: "momentum" and "steps", or
"exp_avg", "exp_avg_sq", "steps"."""


def muon_direction(
    settings: OptimSettings, gradient: Tensor, momentum: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The direction to be orthogonalised, and the new momentum: M' = mu M + (1 - mu) G; Nesterov:
    (1 - mu) G + mu M'.

    The factor (1 - mu) does not matter to the update, which is scale free; it makes momentum a mean
    gradient.
    """
    momentum = momentum.lerp(gradient, 1 - settings.momentum)
    return torch.lerp(gradient, momentum, settings.momentum, out=out), momentum


def muon_fresh(
    settings: OptimSettings,
    parameter: Tensor,
    orthogonal: Tensor,
    lr: float,
    shape: Sequence[int] | None = None,
) -> Tensor:
    """W (1 - lr wd) - lr sqrt(max(1, rows/cols)) O, for the [rows, cols] parameter. ``shape``:
    shape of the whole matrix, if the tensors are pieces of it."""
    kept = parameter
    if settings.weight_decay:
        kept = parameter * (1 - lr * settings.weight_decay)
    rows, cols = (shape or kept.shape)[-2:]
    scale = math.sqrt(max(1, rows / cols))
    return torch.add(kept, orthogonal.to(kept.dtype), alpha=-lr * scale)


def muon(
    settings: OptimSettings,
    parameters: list[Tensor],
    gradients: list[Tensor],
    momenta: list[Tensor],
    lr: float,
    chosen: KernelChoice,
    finite: Callable[[Tensor], None],
) -> list[tuple[Tensor, Tensor]]:
    """Fresh parameter and momentum of matrices of one shape; several are worked on as a stack, and
    the results are views of it.

    ``finite`` is called with the norms of the directions to be orthogonalised, which are not finite
    where a gradient is not, and may raise.
    """
    if len(gradients) > 1 and len(gradients) * gradients[0].numel() <= FEW:
        return _small(settings, parameters, gradients, momenta, lr, chosen, finite)
    first = gradients[0]
    after = list[Tensor]()
    sizes = list[Tensor]()
    with reuse():
        # One matrix after the other before and after the products, so that it is in the cache from
        # its gradient to its format.
        direction = empty("direction", first.shape, first)
        stack = Wide(len(gradients), first, chosen)
        for i, (gradient, momentum) in enumerate(zip(gradients, momenta, strict=True)):
            after.append(muon_direction(settings, gradient, momentum, out=direction)[1])
            sizes.append(norms(direction))
            stack.put(i, direction.div_(sizes[-1].clamp(min=EPS)))
        finite(torch.cat(sizes).view(-1))
        stack.iterate(settings.ns_steps, settings.coefficients)
        fresh = []
        for i, parameter in enumerate(parameters):
            stack.get(i, direction)
            fresh.append(muon_fresh(settings, parameter, direction, lr))
    return list(zip(fresh, after, strict=True))


def _small(
    settings: OptimSettings,
    parameters: list[Tensor],
    gradients: list[Tensor],
    momenta: list[Tensor],
    lr: float,
    chosen: KernelChoice,
    finite: Callable[[Tensor], None],
) -> list[tuple[Tensor, Tensor]]:
    """:func:`muon` for few numbers in all: one operation over a stack costs less than one for each
    matrix, even with the copies."""
    many = (len(gradients), *gradients[0].shape)
    with reuse():
        direction = torch.stack(gradients, out=empty("direction", many, gradients[0]))
        before = _stacked("momenta", momenta)
        _, after = muon_direction(settings, direction, before, out=direction)
        finite((size := norms(direction)).view(-1))
        direction.copy_(finish(direction, size, chosen, settings.ns_steps, settings.coefficients))
        fresh = muon_fresh(settings, _stacked("parameters", parameters), direction, lr)
    return list(zip(fresh.unbind(), after.unbind(), strict=True))


def _stacked(name: str, matrices: list[Tensor]) -> Tensor:
    """The matrices as one tensor: a view of their own memory where they lie one behind the other,
    as the results of a stacked step do."""
    first = matrices[0]
    size = matrices[0].nbytes
    start = first.data_ptr()
    many = (len(matrices), *first.shape)
    end = first.untyped_storage().data_ptr() + first.untyped_storage().nbytes()
    places = range(start, start + len(matrices) * size, size)
    if places.stop <= end and all(
        m.data_ptr() == at and m.is_contiguous() for m, at in zip(matrices, places, strict=True)
    ):
        return first.as_strided(many, (first.numel(), first.stride(0), first.stride(1)))
    return torch.stack(matrices, out=empty(name, many, first))


def adamw(
    settings: OptimSettings,
    parameter: Tensor,
    gradient: Tensor,
    state: Mapping[str, Tensor],
    lr: float,
) -> tuple[Tensor, State]:
    """AdamW (Loshchilov and Hutter, 2019). Vectors, which are norm scales, are not decayed."""
    zero = torch.zeros_like(gradient)
    exp_avg = state.get("exp_avg", zero).to(gradient.device).lerp(gradient, 1 - settings.adam_beta1)
    exp_avg_sq = state.get("exp_avg_sq", zero).to(gradient.device) * settings.adam_beta2
    exp_avg_sq.addcmul_(gradient, gradient, value=1 - settings.adam_beta2)
    (count,) = next_counts([state])
    steps = int(count.item())
    decay = 0.0
    if parameter.ndim >= 2:
        decay = settings.weight_decay
    root = exp_avg_sq.sqrt().div_(math.sqrt(1 - settings.adam_beta2**steps)).add_(settings.adam_eps)
    fresh = (parameter * (1 - lr * decay)).addcdiv_(
        exp_avg, root, value=-lr / (1 - settings.adam_beta1**steps)
    )
    return fresh, {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq, "steps": count}


def next_counts(states: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
    """One more than the steps behind each state, as tensors of shape [1], because state travels as
    fp32 tensors."""
    none = torch.zeros(1)
    befores = [state["steps"] if state else none for state in states]
    # Parts that have been stepped together share a tensor: nobody writes into one.
    different = {id(before): before for before in befores}
    after = {number: before + 1 for number, before in different.items()}
    return [after[id(before)] for before in befores]
