"""The fast iteration against its slow twin and against torch's own."""

from __future__ import annotations

import pytest
import torch

from node.optim.newton_schulz import newton_schulz, newton_schulz_all, reference, working_dtype

SHAPES = [(1, 1), (1, 9), (16, 16), (64, 64), (48, 128), (128, 48), (256, 100)]


def matrix(shape, seed=0, rank=None):
    g = torch.Generator().manual_seed(seed)
    if rank is None:
        return torch.randn(shape, generator=g)
    low = torch.randn(shape[0], rank, generator=g) @ torch.randn(rank, shape[1], generator=g)
    return low + 1e-3 * torch.randn(shape, generator=g)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.1)])
def test_it_agrees_with_the_polynomial_of_the_singular_values(shape, dtype, bound):
    m = matrix(shape)
    expected = reference(m)
    error = torch.linalg.vector_norm(newton_schulz(m, dtype=dtype).double() - expected) / torch.linalg.vector_norm(expected)
    assert error < bound


def test_nearly_singular_input_stays_within_the_bound_of_fp32():
    m = matrix((64, 128), rank=4)
    expected = reference(m)
    assert torch.linalg.vector_norm(newton_schulz(m).double() - expected) / torch.linalg.vector_norm(expected) < 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_singular_values_come_near_one_and_vectors_stay(seed):
    m = matrix((32, 96), seed)
    x = newton_schulz(m).double()
    values = torch.linalg.svdvals(x)
    assert values.min() > 0.65
    assert values.max() < 1.2
    u, _, vt = torch.linalg.svd(m.double(), full_matrices=False)
    rotated = u.T @ x @ vt.T
    assert torch.linalg.vector_norm(rotated - torch.diag(torch.diagonal(rotated))) < 1e-4


def test_tall_is_wide_transposed_and_scale_does_not_matter():
    m = matrix((96, 32))
    assert torch.equal(newton_schulz(m), newton_schulz(m.mT.contiguous()).mT)
    assert torch.equal(newton_schulz(m), newton_schulz(m * 1024))


def test_zero_stays_zero():
    assert torch.equal(newton_schulz(torch.zeros(4, 6)), torch.zeros(4, 6))


def test_the_input_is_left_alone():
    m = matrix((8, 8))
    before = m.clone()
    newton_schulz(m)
    assert torch.equal(m, before)


def test_bf16_agrees_with_torchs_own():
    from torch.optim._muon import _zeropower_via_newtonschulz

    for shape in SHAPES:
        m = matrix(shape)
        theirs = _zeropower_via_newtonschulz(m, (3.4445, -4.7750, 2.0315), 5, 1e-7)
        assert torch.allclose(newton_schulz(m, dtype=torch.bfloat16).float(), theirs.float(), atol=2e-2)


def test_stacking_changes_nothing_but_speed(monkeypatch):
    monkeypatch.setattr("node.optim.newton_schulz.working_dtype", lambda _: torch.bfloat16)
    ms = [matrix((32, 64), 1), matrix((64, 32), 2), matrix((32, 64), 3)]
    for one, many in zip(newton_schulz_all(ms, 5, False), newton_schulz_all(ms, 5, True), strict=True):
        assert torch.allclose(one.float(), many.float(), atol=2e-2)


def test_a_small_matrix_on_a_cpu_is_worked_in_fp32():
    assert working_dtype(torch.zeros(64, 4096)) is torch.float32
