"""Reducers as their papers write them, with no care for time or memory: what the fast ones are
compared with."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from node.averaging.reducers.reducer import Reduced


def mean(v: Tensor, w: Sequence[float]) -> Tensor:
    """Weighted mean of the rows of ``v`` [n, numbers]; so for all below."""
    share = torch.tensor(w, dtype=v.dtype) / sum(w)
    return (v * share[:, None]).sum(0)


def median(v: Tensor, w: Sequence[float]) -> Tensor:
    """Yin et al., arXiv 1803.01498, definition 1; weights are not asked for."""
    n = len(v)
    if n % 2:
        return torch.median(v, 0).values
    ordered = torch.sort(v, 0).values
    return (ordered[n // 2 - 1] + ordered[n // 2]) / 2


def trimmed_mean(v: Tensor, w: Sequence[float], share: float = 0.25) -> Tensor:
    """Yin et al., arXiv 1803.01498, definition 2, with one row at least cut at each end and one at
    least kept."""
    n = len(v)
    cut = min(max(1, int(share * n)), (n - 1) // 2)
    return torch.sort(v, 0).values[cut : n - cut].mean(0)


def clipped_mean(v: Tensor, w: Sequence[float], clip: float = 2.0) -> Tensor:
    """Weighted mean of rows no longer than ``clip`` times the median length."""
    return centered_clip(v, w, clip, 1)


def centered_clip(
    v: Tensor,
    w: Sequence[float],
    clip: float = 2.0,
    iterations: int = 3,
    center: Tensor | None = None,
) -> Tensor:
    """Karimireddy et al., arXiv 2012.10333, algorithm 2, with a radius of ``clip`` median
    distances."""
    c = torch.zeros_like(v[0]) if center is None else center.clone()
    share = torch.tensor(w, dtype=v.dtype) / sum(w)
    for _ in range(iterations):
        apart = v - c
        lengths = apart.norm(dim=1)
        ordered = lengths.sort().values
        radius = clip * float(ordered[(len(v) - 1) // 2] + ordered[len(v) // 2]) / 2
        scale = torch.where(lengths <= radius, torch.ones_like(lengths), radius / lengths)
        c = c + (apart * (share * scale)[:, None]).sum(0)
    return c


TWINS: dict[str, Callable[..., Tensor]] = {
    "mean": mean,
    "clipped-mean": clipped_mean,
    "median": median,
    "trimmed-mean": trimmed_mean,
    "centered-clip": centered_clip,
}
"""Slow twins of the reducers, by their name in the manifest."""


def flat(tensors: Sequence[Tensor], tokens: float) -> Tensor:
    """One row: a contribution's gradient per token."""
    return torch.cat([t.reshape(-1) for t in tensors]) / tokens


def means_of(reduced: Reduced) -> list[Tensor]:
    """Tensors of a reduction, in memory."""
    return [each.whole() for each in reduced.numbers]


def length(v: Tensor) -> float:
    """2-norm in double precision."""
    return math.sqrt(float(v.double().square().sum()))
