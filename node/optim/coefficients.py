"""Coefficients (a, b, c) of the quintic steps p(s) = a s + b s^3 + c s^5 that drive singular values
towards 1.

Pure data: which polynomial is applied in which step. Singular values enter in [0, 1], because the
Frobenius norm is 1.
"""

from __future__ import annotations

from node.core.errors import UsageFault

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
"""What singular values are divided by in all Polar Express steps but the last, against rounding
errors above 1."""
FINISH: Step = (2.0, -1.5, 0.5)
"""Converges to 1 exactly: the last two steps of DeepSeek-V4's ten, whose others are the simple
ones."""
NAMES = ("simple", "quintic", "polar_express", "deepseek_v4")


def coefficients(name: str, steps: int) -> tuple[Step, ...]:
    """The ``steps`` triples of a set of :data:`NAMES`.

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
