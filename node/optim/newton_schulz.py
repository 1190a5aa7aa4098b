"""Orthogonalise a matrix by a quintic Newton-Schulz iteration, and a slow twin to hold it against.

For X = U S V^T scaled to |X|_F <= 1, each step applies p(s) = a s + b s^3 + c s^5 to the singular values. The
coefficients (Jordan et al., 2024) have the steepest start that stays bounded: five steps bring every singular value
above about 1e-3 of the norm into [0.68, 1.14], not to 1. Muon needs no more.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

A, B, C = 3.4445, -4.7750, 2.0315
EPS = 1e-7
"""Smallest norm divided by, so that a zero matrix stays zero."""
SMALL = 256
"""Smaller dimension up to which low-precision matrices of one shape are worth stacking."""


def newton_schulz(matrices: torch.Tensor, steps: int = 5, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Approximately U V^T of each [..., m, n] matrix, computed and returned in ``dtype``.

    A matrix with more rows than columns is worked on transposed: the products are of the smaller side.
    """
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.to(dtype)
    x = (x.mT if tall else x).contiguous()  # strides choose the kernel, and with it the last bits
    x = x / torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True).clamp(min=EPS)
    add = torch.addmm if x.ndim == 2 else torch.baddbmm
    for _ in range(steps):
        gram = x @ x.mT
        poly = add(gram, gram, gram, beta=B, alpha=C)
        x = add(x, poly, x, beta=A)
    return x.mT if tall else x


def reference(matrix: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """The slow twin: the same polynomial applied to the singular values, in fp64. [m, n] -> [m, n]."""
    u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / torch.linalg.vector_norm(s).clamp(min=EPS)
    for _ in range(steps):
        s = A * s + B * s**3 + C * s**5
    return u @ torch.diag(s) @ vt


def working_dtype(matrix: torch.Tensor) -> torch.dtype:
    """bf16 where matrix units make it several times faster: CUDA, and large matrices on a CPU with AMX tiles; else fp32.

    Below a side of 256 a CPU gains nothing from bf16 one matrix at a time, and fp32 makes machines agree.
    """
    if matrix.device.type == "cuda":
        return torch.bfloat16
    if matrix.device.type == "cpu" and min(matrix.shape[-2:]) >= SMALL and _amx():
        return torch.bfloat16
    return torch.float32


def worth_stacking(matrix: torch.Tensor) -> bool:
    """Whether same-shape matrices gain from one batched call: low precision and a small side.

    Measured on one Xeon core, fp32, matrices of 64x256 to 512x512: batched takes 1.0 to 1.6 times as long as one after the
    other. In bf16 it is 1.2 to 6 times faster up to a side of 256 and no faster above; on a GPU small products are
    all launch time.
    """
    return working_dtype(matrix) is torch.bfloat16 and min(matrix.shape) <= SMALL


def newton_schulz_all(matrices: Sequence[torch.Tensor], steps: int, stack: bool) -> list[torch.Tensor]:
    """Each matrix by itself, or with ``stack`` same shapes together where that is worth it. Order is kept.

    Stacked and single products may round differently on some devices, so ``stack`` gives up bit-equality between
    different partitions.
    """
    done: dict[int, torch.Tensor] = {}
    groups: dict[tuple[int, ...], list[int]] = {}
    for i, matrix in enumerate(matrices):
        if stack and worth_stacking(matrix):
            groups.setdefault(tuple(matrix.shape), []).append(i)
        else:
            done[i] = newton_schulz(matrix, steps, working_dtype(matrix))
    for indices in groups.values():
        stacked = torch.stack([matrices[i] for i in indices])
        done.update(zip(indices, newton_schulz(stacked, steps, working_dtype(stacked)).unbind(), strict=True))
    return [done[i] for i in range(len(matrices))]


def _amx() -> bool:
    supported = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(supported is not None and supported())
