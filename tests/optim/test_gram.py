"""The Gram iteration, and symmetric products by panels."""

import pytest
import torch

from node.optim.gram import ALIGN, PANELS, coefficients, gram, runs, symmetric
from node.optim.gram import standard as overwriting
from tests.optim.conftest import distance

SIMPLE = coefficients("simple", 5)
POLAR = coefficients("polar_express", 5)


def wide(kind, m=64, n=256, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(m, n, generator=g, dtype=torch.float64)
    if kind == "rank 8":
        x = (
            torch.randn(m, 8, generator=g).double() @ torch.randn(8, n, generator=g).double()
            + 1e-3 * x
        )
    elif kind == "rank 1":
        x = x[:, :1] @ x[:1]
    elif kind == "ones":
        x = torch.ones(m, n, dtype=torch.float64)
    elif kind == "power":
        u = torch.linalg.qr(x[:, :m])[0]
        v = torch.linalg.qr(x.mT)[0]
        x = (u / torch.arange(1, m + 1)) @ v.mT
    elif kind == "orthogonal":
        x = torch.linalg.qr(x.mT)[0].mT.contiguous()
    return x / torch.linalg.matrix_norm(x)


def standard(x, steps, panels=0):
    return overwriting(x.clone(), steps, panels)


BOUNDS = [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.1)]


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS)
@pytest.mark.parametrize("steps", [SIMPLE, POLAR])
@pytest.mark.parametrize("shape", [(64, 256), (96, 150), (40, 40)])
def test_the_gram_iteration_agrees_with_the_standard_one(steps, shape, dtype, bound):
    x = wide("gauss", *shape)
    assert distance(gram(x.to(dtype), steps), standard(x, steps)) < bound


@pytest.mark.parametrize("steps", [SIMPLE, POLAR, coefficients("deepseek_v4", 10)])
@pytest.mark.parametrize("kind", ["gauss", "rank 8", "rank 1", "ones", "power", "orthogonal"])
def test_gram_stays_bounded_on_ill_conditioned_matrices(kind, steps):
    x = wide(kind)
    exact = standard(x, steps)
    top = float(torch.linalg.matrix_norm(exact, 2))
    for dtype, slack, times, more in (
        (torch.float32, 1.001, 2, 1e-3),
        (torch.bfloat16, 1.2, 1.5, 0.15),
    ):
        found = gram(x.to(dtype), steps).double()
        assert float(torch.linalg.matrix_norm(found, 2)) < slack * max(top, 1.0)
        # The standard form loses tiny singular values to rounding too: Gram is not much worse.
        lost = distance(standard(x.to(dtype), steps), exact)
        assert distance(found, exact) < times * lost + more


def test_without_the_restart_it_would_diverge(monkeypatch):
    x = wide("rank 8", 128, 512).bfloat16()
    bounded = float(torch.linalg.matrix_norm(gram(x, SIMPLE).double(), 2))
    monkeypatch.setattr("node.optim.gram.runs", lambda steps: [(0, steps)])
    assert bounded < 1.4 < float(torch.linalg.matrix_norm(gram(x, SIMPLE).double(), 2))


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (1, [(0, 1)]),
        (2, [(0, 2)]),
        (3, [(0, 2), (2, 3)]),
        (5, [(0, 2), (2, 5)]),
        (10, [(0, 2), (2, 5), (5, 8), (8, 10)]),
    ],
)
def test_restarts_come_after_two_steps_and_then_every_three(steps, expected):
    assert runs(steps) == expected


@pytest.mark.parametrize("m", [1, 31, 32, 33, 128, 160, 257])
@pytest.mark.parametrize("plus", [False, True])
def test_panels_are_the_symmetric_product(m, plus):
    g = torch.Generator().manual_seed(m)
    x = torch.randn(m, 50, generator=g, dtype=torch.float64)
    r = x @ x.mT
    added = {"plus": r @ r, "beta": -2.0, "alpha": 0.5} if plus else {}
    expected = 0.5 * r - 2 * (r @ r) if plus else r
    found = torch.full_like(r, float("nan"))
    whole = torch.full_like(r, float("nan"))
    symmetric(x, x.mT, found, 1, **added)
    symmetric(x, x.mT, whole, **added)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-9)
    # Blocks above the diagonal are copies. Inside a block on it, a processor may sum (i, j) and (j,
    # i) in another order.
    width = -(-m // (PANELS * ALIGN)) * ALIGN
    for low in range(0, m, width):
        high = low + width
        assert torch.equal(found[low:high, high:], found[high:, low:high].mT)
    assert torch.allclose(whole, expected, rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize(("dtype", "bound"), BOUNDS)
@pytest.mark.parametrize("form", [standard, gram])
def test_panels_change_nothing_but_rounding(form, dtype, bound):
    x = wide("gauss", 160, 400)
    assert distance(form(x.to(dtype), SIMPLE, 1), form(x, SIMPLE)) < bound
