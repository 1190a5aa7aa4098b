"""The two forms of the Newton-Schulz iteration on wide, normalised matrices, the coefficients
(a, b, c) of its quintic steps p(s) = a s + b s^3 + c s^5, which drive singular values towards 1,
and products known to be symmetric.

With R = X X^T, a step is X <- Z X, Z = a I + b R + c R^2. The standard form does that 5 times: 20 n
m^2 + 10 m^3 floating-point operations for [m, n] in 5 steps. The Gram form ("Gram Newton-Schulz",
Dao-AILab, 2026) collects Q <- Z Q and R <- Z R Z and multiplies by X at the end: 8 n m^2 + 28 m^3
with one restart, less from n = 1.5 m on. Without the restart, which forms R anew, rounding errors
in R outgrow small singular values.
"""

from collections.abc import Sequence

import torch

from node.core.errors import UsageFault
from node.optim.scratch import empty

Step = tuple[float, float, float]

SIMPLE: Step = (3.4445, -4.7750, 2.0315)
"""Jordan et al., "Muon: an optimizer for hidden layers in neural networks" (2024): the same five
times, steepest at 0."""
QUINTIC: tuple[Step, ...] = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
"""Five different steps, found by Cesista, You and Jordan, "Squeezing 1-2% efficiency gains out of
Muon" (2025)."""
POLAR: tuple[Step, ...] = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
"""Amsel et al., "The Polar Express" (arXiv 2505.16932): the minimax polynomial of each step for
singular values from 1e-3."""
SAFETY = 1.01
"""Divisor of singular values in all Polar Express steps but the last, against rounding errors above
1."""
FINISH: Step = (2.0, -1.5, 0.5)
"""Converges to 1 exactly: the last two steps of DeepSeek-V4's ten; its other steps are the simple
ones."""
RESTART = 2
"""Steps after which the Gram form starts again from R = X X^T. In bf16 it diverges without: 3.4
times the norm on low-rank input."""
AGAIN = 3
"""Steps after which it starts again from then on."""
WHOLE = 128
"""Side from which the standard form in bf16 adds a to Z instead of a X to Z X: 1.05 to 1.1 times as
fast at 256, 1.02 to 1.05 at 128. It rounds 2% of the norm instead of 1.2%, where the polynomial
leaves singular values up to 30% from 1."""
PANELS = 4
"""Panels of a symmetric product: 10 of its 16 blocks are multiplied, the others copied."""
ALIGN = 32
"""Rows of a panel are a multiple: matrix units work on tiles of 16 x 32."""


def coefficients(name: str, steps: int) -> tuple[Step, ...]:
    """The ``steps`` triples of a set, by its name in the manifest. Singular values enter in [0, 1],
    because the Frobenius norm is 1.

    Quintic is cyclic. Polar Express repeats its last step, and so becomes exact. DeepSeek-V4 needs
    three steps at least. Raises UsageFault for fewer.
    """
    match name:
        case "simple":
            return (SIMPLE,) * steps
        case "quintic":
            return tuple(QUINTIC[i % len(QUINTIC)] for i in range(steps))
        case "polar_express":
            safe = [(a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in POLAR[:-1]] + [
                POLAR[-1]
            ]
            return tuple(safe[min(i, len(safe) - 1)] for i in range(steps))
        case "deepseek_v4" if steps >= 3:
            return (SIMPLE,) * (steps - 2) + (FINISH,) * 2
    raise UsageFault(
        f"{name[:40]} in {steps} Newton-Schulz steps",
        "choose 3 or more; 10 is what it was made for",
    )


def standard(x: torch.Tensor, steps: Sequence[Step], panels: int = 0) -> torch.Tensor:
    """Orthogonalise [..., m, n], m <= n, of Frobenius norm at most 1; ``x`` is written over.
    ``panels``: see :func:`symmetric`."""
    apart = x.dtype is torch.bfloat16 and x.size(-2) < WHOLE
    y = empty("y", x.shape, x)
    r, z = (empty(name, (*x.shape[:-1], x.size(-2)), x) for name in ("r", "z"))
    for a, b, c in steps:
        symmetric(x, x.mT, r, panels)
        symmetric(r, r, z, panels, plus=r, beta=b, alpha=c)
        if apart:
            multiply(z, x, y, plus=x, beta=a)
        else:
            multiply(_shifted(z, a), x, y)
        x, y = y, x
    return x


def gram(x: torch.Tensor, steps: Sequence[Step], panels: int = 0) -> torch.Tensor:
    """The iteration in the Gram form; ``x`` is not changed. The result equals the standard form's
    except for rounding; its [m, m] products commute, so they are symmetric."""
    for i, (start, end) in enumerate(runs(len(steps))):
        x = _run(x, steps[start:end], panels, empty("xy"[i % 2], x.shape, x))
    return x


def runs(steps: int) -> list[tuple[int, int]]:
    """The (start, end) of the steps between restarts: the first two, then three at a time."""
    ends = [min(end, steps) for end in range(RESTART, steps + AGAIN, AGAIN)]
    return list(zip([0, *ends], ends, strict=False))


def _run(x: torch.Tensor, steps: Sequence[Step], panels: int, out: torch.Tensor) -> torch.Tensor:
    """Q X for the [m, m] product Q of the steps' polynomials, written to ``out``."""
    r, q, z, spare, rz = (
        empty(name, (*x.shape[:-1], x.size(-2)), x) for name in ("r", "q", "z", "spare", "rz")
    )
    symmetric(x, x.mT, r, panels)
    for i, (a, b, c) in enumerate(steps):
        symmetric(r, r, z, panels, plus=r, beta=b, alpha=c)
        _shifted(z, a)  # one Z for Q and R: its rounding leaves no residue between them
        if i == 0:
            q.copy_(z)
        else:
            symmetric(z, q, spare, panels)
            q, spare = spare, q
        if i + 1 < len(steps):
            symmetric(r, z, rz, panels)
            symmetric(z, rz, r, panels)
    multiply(q, x, out)
    return out


def symmetric(
    left: torch.Tensor,
    right: torch.Tensor,
    out: torch.Tensor,
    panels: int = 0,
    plus: torch.Tensor | None = None,
    beta: float = 1,
    alpha: float = 1,
) -> None:
    """``out`` = alpha left @ right + beta plus, known to be symmetric. [..., m, k] by [..., k, m].

    If ``left`` has ``panels`` elements or more (0: never), one pair of matrices is multiplied as
    the lower triangle of ``PANELS`` block columns, 5/8 of the work, and the rest is copied.
    """
    if left.ndim != 2 or not panels or left.numel() < panels:
        multiply(left, right, out, plus, beta, alpha)
        return
    m = len(left)
    width = -(-m // (PANELS * ALIGN)) * ALIGN
    for low in range(0, m, width):
        high = min(low + width, m)
        base = None
        if plus is not None:
            base = plus[low:, low:high]
        multiply(left[low:], right[:, low:high], out[low:, low:high], base, beta, alpha)
        if high < m:  # contiguous first: torch transposes only whole tensors by blocks
            out[low:high, high:] = out[high:, low:high].contiguous().mT.contiguous()


def multiply(
    left: torch.Tensor,
    right: torch.Tensor,
    out: torch.Tensor,
    plus: torch.Tensor | None = None,
    beta: float = 1,
    alpha: float = 1,
) -> None:
    """``out`` = alpha left @ right + beta plus, for matrices or stacks of them; without ``plus``,
    left @ right."""
    if plus is None:
        torch.matmul(left, right, out=out)
    elif left.ndim == 2:
        torch.addmm(plus, left, right, beta=beta, alpha=alpha, out=out)
    else:
        torch.baddbmm(plus, left, right, beta=beta, alpha=alpha, out=out)


def _shifted(z: torch.Tensor, a: float) -> torch.Tensor:
    """z + a I, in place."""
    z.diagonal(dim1=-2, dim2=-1).add_(a)
    return z
