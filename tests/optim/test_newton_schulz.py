"""The fast iteration against its slow twin and against torch's own."""

import pytest
import torch

from node.core.errors import UsageFault
from node.core.tables import settings_of
from node.manifest import SECTIONS
from node.optim.gram import coefficients
from node.optim.kernel_rule import CPU, KernelRule
from node.optim.newton_schulz import newton_schulz, newton_schulz_all
from tests.optim.conftest import distance, matrix_by_matrix

SHAPES = [(1, 1), (1, 9), (16, 16), (64, 64), (48, 128), (128, 48), (256, 100)]
BF16 = KernelRule(bf16_from=1)
MIXED = KernelRule(bf16_from=4096)


def applied(value, chosen):
    """Singular values after the steps."""
    for a, b, c in chosen:
        value = a * value + b * value**3 + c * value**5
    return value


def reference(matrix, steps=5, name="simple"):
    """The slow twin: the same polynomial of the singular values, in fp64. [m, n] -> [m, n]."""
    u, s, vt = torch.linalg.svd(matrix.double(), full_matrices=False)
    return u @ torch.diag(applied(s / s.norm(), coefficients(name, steps))) @ vt


def matrix(shape, seed=0, rank=None):
    g = torch.Generator().manual_seed(seed)
    if rank is None:
        return torch.randn(shape, generator=g)
    low = torch.randn(shape[0], rank, generator=g) @ torch.randn(rank, shape[1], generator=g)
    return low + 1e-3 * torch.randn(shape, generator=g)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.1)]
)
def test_it_agrees_with_the_polynomial_of_the_singular_values(shape, dtype, bound):
    m = matrix(shape)
    assert distance(newton_schulz(m, dtype=dtype), reference(m)) < bound


def test_nearly_singular_input_stays_within_the_bound_of_fp32():
    m = matrix((64, 128), rank=4)
    assert distance(newton_schulz(m), reference(m)) < 1e-3


def test_newton_schulz_ignores_transposition_scale_and_strides():
    m = matrix((96, 32))
    assert torch.allclose(newton_schulz(m), newton_schulz(m.mT.contiguous()).mT, atol=1e-6)
    assert torch.equal(newton_schulz(m), newton_schulz(m * 1024))
    assert torch.equal(newton_schulz(m), newton_schulz(m.mT.contiguous().mT))
    assert newton_schulz(m).is_contiguous()


@pytest.mark.parametrize("rule", [CPU, BF16])
def test_zero_stays_zero_and_what_is_not_finite_shows(rule):
    shapes = [(4, 6), (64, 256), (256, 64)]
    for zero in newton_schulz_all([torch.zeros(s) for s in shapes], 5, False, rule=rule):
        assert torch.equal(zero.float(), torch.zeros(zero.shape))
    for bad in (float("nan"), float("inf")):
        spoiled = [matrix(s) for s in shapes]
        for m in spoiled:
            m[1, 2] = bad
        assert all(
            not torch.isfinite(x).any() for x in newton_schulz_all(spoiled, 5, False, rule=rule)
        )
        stacked = newton_schulz_all(
            [spoiled[1], *(matrix(shapes[1], i) for i in range(4))], 5, True, rule=rule
        )
        assert not torch.isfinite(stacked[0]).any()
        assert all(torch.isfinite(x).all() for x in stacked[1:])


def test_the_input_is_left_alone():
    for dtype in (torch.float32, torch.bfloat16):
        m = matrix((8, 8)).to(dtype)
        before = m.clone()
        newton_schulz(m, dtype=dtype)
        newton_schulz_all([m, m], 5, True)
        assert torch.equal(m, before)
    assert not newton_schulz(torch.ones(4, 8, requires_grad=True)).requires_grad


@pytest.mark.parametrize(
    "rule", [CPU, BF16, MIXED, KernelRule(bf16_from=4096, panels_bf16=1, panels_fp32=1)]
)
@pytest.mark.parametrize("stack", [False, True])
def test_every_way_gives_the_same_matrices_in_order(rule, stack):
    shapes = [
        (32, 64),
        (64, 32),
        (64, 256),
        (32, 64),
        (128, 128),
        (256, 64),
        (32, 64),
        (64, 256),
        (128, 128),
        (32, 64),
        (8, 8),
    ]
    ms = [matrix(shape, i) for i, shape in enumerate(shapes)]
    for m, x in zip(ms, newton_schulz_all(ms, 5, stack, rule=rule), strict=True):
        assert x.shape == m.shape
        assert distance(x, reference(m)) < (0.1 if rule.bf16_from else 1e-4)


@pytest.mark.parametrize("rule", [CPU, BF16, MIXED])
@pytest.mark.parametrize("stack", [False, True])
@matrix_by_matrix()
def test_a_matrix_steps_to_the_same_bits_in_any_company(rule, stack):
    # bf16 is some fifty times slower than fp32 on a processor without instructions for it.
    large = 256 if rule.bf16_from else 512
    shapes = [(64, 64), (48, 128), (256, 64), (24, 40), (5, 3), (8, 8), (130, 130), (large, large)]
    ms = [matrix(shape, i) for shape in shapes for i in range(3 if min(shape) > 200 else 6)]
    alone = [newton_schulz_all([m], 5, stack, rule=rule)[0].float() for m in ms]
    for step in (1, 2, 3, -1):
        found = newton_schulz_all(ms[::step], 5, stack, rule=rule)
        assert all(torch.equal(a, b.float()) for a, b in zip(alone[::step], found, strict=True))


def test_a_stack_is_cut_where_it_would_take_too_much(monkeypatch):
    monkeypatch.setattr("node.optim.newton_schulz.STACKED", 3 * 128 * 128)
    ms = [matrix((128, 128), i) for i in range(7)]
    for m, x in zip(ms, newton_schulz_all(ms, 5, True, rule=BF16), strict=True):
        assert distance(x, reference(m)) < 0.1


@pytest.mark.parametrize(
    ("name", "steps", "least", "low", "high"),
    [
        ("simple", 5, 2e-3, 0.68, 1.21),
        ("quintic", 5, 2e-3, 0.85, 1.15),
        ("polar_express", 5, 1e-3, 0.84, 1.13),
        ("polar_express", 8, 1e-3, 0.999, 1.001),
        ("deepseek_v4", 10, 1e-3, 0.99, 1.01),
    ],
)
def test_each_set_brings_singular_values_to_one(name, steps, least, low, high):
    chosen = coefficients(name, steps)
    assert len(chosen) == steps
    values = [least ** (i / 199) for i in range(200)]  # evenly by their logarithms
    after = [applied(value, chosen) for value in values]
    assert low < min(after) <= max(after) < high
    m = matrix((24, 32))
    assert distance(newton_schulz(m, steps, coefficients=name), reference(m, steps, name)) < 1e-4


def test_too_few_steps_are_refused():
    with pytest.raises(UsageFault):
        coefficients("deepseek_v4", 2)


def test_sets_differ_and_stay_bounded_on_all_they_may_meet():
    names = settings_of(SECTIONS)["optimizer.coefficients"].rule.choices
    for name in names:
        for steps in (5, 10):
            chosen = coefficients(name, steps)
            assert all(0 <= applied(i / 500, chosen) < 1.21 for i in range(501))
    assert len({coefficients(name, 5) for name in names}) == len(names)
