"""Orthogonalise matrices by a quintic Newton-Schulz iteration, and a slow twin to hold it against.

For X = U S V^T scaled to |X|_F <= 1, each step applies p(s) = a s + b s^3 + c s^5 to the singular values. With the default
coefficients five steps bring every singular value above 2e-3 of the norm into [0.68, 1.21], not to 1. Muon needs no more.
How the products are made is decided by ``kernel_rule.py`` from a matrix's shape; what is computed does not depend on it but for
rounding, in fp32 about 1e-5 of the norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from node.core.errors import StepFault
from node.optim.coefficients import coefficients as coefficients_of
from node.optim.gram import gram, standard
from node.optim.kernel_rule import AMX, CPU, CUDA, Rule, Way, way
from node.optim.workers import spread

Job = tuple[list[int], Way]
EPS = 1e-7
"""Smallest norm divided by, so that a zero matrix stays zero."""
STACKED = 1 << 24
"""Elements stacked at once: bounds what a stack takes beside the matrices themselves."""


def newton_schulz(
    matrices: torch.Tensor,
    steps: int = 5,
    dtype: torch.dtype = torch.float32,
    *,
    coefficients: str = "simple",
    use_gram: bool = False,
    panels: int = 0,
) -> torch.Tensor:
    """Approximately U V^T of each [..., m, n] matrix, computed and returned in ``dtype``, contiguous, without a gradient.

    A matrix with more rows than columns is worked on transposed: the products are of the smaller side. ``use_gram``, ``panels``:
    see ``gram.py``. Numbers that are not finite come out as such. Raises StepFault for what is no matrix or an empty one, UsageFault
    for coefficients that do not exist.
    """
    chosen = coefficients_of(coefficients, steps)
    _check(matrices)
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.detach().contiguous().to(torch.promote_types(torch.promote_types(matrices.dtype, dtype), torch.float32))
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    x = torch.div(x, norm, out=torch.empty_like(x, dtype=dtype))
    x = (x.mT if tall else x).contiguous()  # strides choose the kernel, and with it the last bits; transposing fp32 is slower
    x = (gram if use_gram else standard)(x, chosen, panels)
    return x.mT.contiguous() if tall else x


def reference(matrix: torch.Tensor, steps: int = 5, coefficients: str = "simple") -> torch.Tensor:
    """The slow twin: the same polynomial applied to the singular values, in fp64. [m, n] -> [m, n]."""
    u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / torch.linalg.vector_norm(s).clamp(min=EPS)
    for a, b, c in coefficients_of(coefficients, steps):
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag(s) @ vt


def rule_of(device: torch.device) -> Rule:
    """The rule of a kind of device: CUDA, a CPU with AMX tiles, another CPU and all else."""
    if device.type == "cuda":
        return CUDA
    return AMX if device.type == "cpu" and _amx() else CPU


def working_dtype(matrix: torch.Tensor) -> torch.dtype:
    """bf16 where matrix units make it faster for one matrix by itself; else fp32."""
    return _dtype(way(matrix.size(-2), matrix.size(-1), 1, rule_of(matrix.device)))


def worth_stacking(matrix: torch.Tensor, count: int = 4) -> bool:
    """Whether ``count`` matrices of this shape gain from being multiplied together."""
    return way(matrix.size(-2), matrix.size(-1), count, rule_of(matrix.device)).stacked


def newton_schulz_all(
    matrices: Sequence[torch.Tensor], steps: int, stack: bool, *, coefficients: str = "simple", rule: Rule | None = None
) -> list[torch.Tensor]:
    """Each matrix by itself, or with ``stack`` together: small ones of a shape stacked, large ones on as many threads as torch has.

    Order is kept; what comes out is bf16 or fp32. By itself a matrix gives the same bits whatever else is stepped. ``stack`` gives that
    up: small matrices may be worked in bf16 that alone would be in fp32, and another number of threads rounds differently.
    ``rule``: what was measured on this machine, instead of the one for its kind. Raises as :func:`newton_schulz`.
    """
    _, jobs = coefficients_of(coefficients, steps), _jobs(matrices, stack, rule)

    def act(job: Job) -> list[torch.Tensor]:
        members, chosen = job
        first = matrices[members[0]]
        ours = torch.stack([matrices[i] for i in members]) if chosen.stacked else first
        dtype = _dtype(chosen) if chosen.stacked or rule else working_dtype(first)
        out = newton_schulz(ours, steps, dtype, coefficients=coefficients, use_gram=chosen.gram, panels=chosen.panels)
        return list(out.float().unbind()) if chosen.stacked else [out]

    threads = torch.get_num_threads()
    aside = [job for job in jobs if stack and threads > 1 and job[1].apart and matrices[job[0][0]].device.type == "cpu"]
    if len(aside) > 1:  # the longest first, so that none is left alone with a long one
        aside.sort(key=lambda job: -min(matrices[job[0][0]].shape) * matrices[job[0][0]].numel())
        jobs = aside + [job for job in jobs if job not in aside]
        outs = spread([partial(act, job) for job in aside], threads) + [act(job) for job in jobs[len(aside) :]]
    else:
        outs = [act(job) for job in jobs]
    done = {i: one for (members, _), out in zip(jobs, outs, strict=True) for i, one in zip(members, out, strict=True)}
    return [done[i] for i in range(len(matrices))]


def _jobs(matrices: Sequence[torch.Tensor], stack: bool, rule: Rule | None) -> list[Job]:
    """What is multiplied together, as positions, and in which way: with ``stack`` all of a shape may be, else each by itself."""
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, matrix in enumerate(matrices):
        if matrix.ndim != 2:
            raise StepFault(f"a tensor of shape {tuple(matrix.shape)} is no matrix", "give it to AdamW, or reshape it")
        _check(matrix)
        groups.setdefault((matrix.shape, matrix.device, matrix.dtype) if stack else (i,), []).append(i)
    jobs: list[Job] = []
    for members in groups.values():
        first = matrices[members[0]]
        chosen = way(first.size(0), first.size(1), len(members), rule or rule_of(first.device))
        many = max(1, STACKED // first.numel()) if chosen.stacked else 1
        jobs += [(members[start : start + many], chosen) for start in range(0, len(members), many)]
    return jobs


def _check(matrices: torch.Tensor) -> None:
    if matrices.ndim < 2 or not matrices.numel():
        raise StepFault(f"a tensor of shape {tuple(matrices.shape)} is no matrix", "give it to AdamW, or reshape it")
    if not matrices.is_floating_point():
        raise StepFault(f"a matrix of {matrices.dtype} cannot be orthogonalised", "give floating-point numbers")


def _dtype(chosen: Way) -> torch.dtype:
    return torch.bfloat16 if chosen.precision == "bf16" else torch.float32


def _amx() -> bool:
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(supported is not None and supported())
