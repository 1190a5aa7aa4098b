"""Tensor work on threads of its own: order, exceptions, thread counts, and that the owner's numbers do not depend on it."""

from __future__ import annotations

import threading

import pytest
import torch

from node.optim.kernel_rule import AMX, CPU, CUDA, way
from node.optim.newton_schulz import newton_schulz, newton_schulz_all
from node.optim.workers import spread


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_results_keep_their_order_and_run_side_by_side(two_threads):
    both = threading.Barrier(2, timeout=60)

    def act(i):
        both.wait()  # would break if one ended before the other began
        return i, torch.get_num_threads(), threading.current_thread().name

    found = spread([lambda: act(0), lambda: act(1)], 2)
    assert [i for i, _, _ in found] == [0, 1]
    assert [threads for _, threads, _ in found] == [1, 1]
    assert len({name for _, _, name in found} | {threading.current_thread().name}) == 3
    assert torch.get_num_threads() == 2
    assert spread([], 2) == []


def test_an_exception_comes_out_and_the_threads_are_given_back(two_threads):
    def fail():
        raise ArithmeticError("no")

    with pytest.raises(ArithmeticError):
        spread([fail, lambda: None], 2)
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("recorded", [False, True])
def test_gradients_are_recorded_as_by_the_caller(two_threads, recorded):
    with torch.set_grad_enabled(recorded):
        assert spread([torch.is_grad_enabled, torch.is_grad_enabled], 2) == [recorded, recorded]


def test_large_matrices_go_to_threads_and_come_back_in_order(two_threads, monkeypatch):
    asked = []

    def recording(acts, threads):
        asked.append((len(acts), threads))
        return spread(acts, threads)

    monkeypatch.setattr("node.optim.newton_schulz.spread", recording)
    g = torch.Generator().manual_seed(0)
    ms = [torch.randn(shape, generator=g) for shape in [(8, 8), (192, 200), (200, 192), (192, 200), (16, 8)]]
    found = newton_schulz_all(ms, 5, True, rule=CPU)
    assert asked == [(3, 2)]
    for m, x in zip(ms, found, strict=True):
        assert torch.allclose(x, newton_schulz(m), atol=1e-5)
    newton_schulz_all(ms, 5, False, rule=CPU)
    newton_schulz_all(ms[:2], 5, True, rule=CPU)
    assert asked == [(3, 2)]


def test_only_what_is_not_stacked_and_long_enough_goes_apart():
    assert way(1024, 1024, 1, AMX).apart
    assert not way(64, 64, 1, AMX).apart
    assert not way(256, 256, 8, AMX).apart
    assert way(256, 256, 8, AMX).stacked
    assert not way(4096, 4096, 1, CUDA).apart
