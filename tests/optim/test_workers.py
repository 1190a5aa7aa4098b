"""Tensor work on threads of its own: order, exceptions, thread counts, and that the owner's numbers
depend on it by rounding alone."""

import os
import threading

import pytest
import torch

from node.optim.kernel_rule import CPU, way
from node.optim.newton_schulz import newton_schulz, newton_schulz_all, rule_of
from node.optim.owner import Owner
from node.optim.settings import OptimSettings
from node.optim.workers import spread
from testbed.reference.swarm import step_all


def test_results_keep_their_order_and_run_side_by_side(two_threads):
    both = threading.Barrier(2, timeout=60)

    def act(i):
        both.wait()  # deadlocks if one ended before the other began
        return i, torch.get_num_threads(), threading.current_thread().name

    found = spread([lambda: act(0), lambda: act(1)], 2)
    assert ([i for i, _, _ in found], [threads for _, threads, _ in found]) == ([0, 1], [1, 1])
    assert len({name for _, _, name in found}) == 2
    assert threading.current_thread().name in {name for _, _, name in found}
    assert (torch.get_num_threads(), spread([], 2)) == (2, [])


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


def test_worker_threads_persist_with_the_thread_count_asked_for(two_threads):
    both = threading.Barrier(2, timeout=60)

    def act():
        both.wait()
        return threading.get_ident(), torch.get_num_threads()

    first = spread([act, act], 2, 3)
    there = {thread.ident for thread in threading.enumerate()}
    assert {ident for ident, _ in first} <= there
    assert {threads for _, threads in first + spread([act, act], 2, 3)} == {3}
    assert torch.get_num_threads() == 2


def test_a_fork_has_threads_of_its_own(two_threads):
    assert spread([lambda: 1, lambda: 1], 2) == [1, 1]
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        met = threading.Barrier(2, timeout=60)
        spread([met.wait, met.wait], 2)  # would wait for a thread that the fork did not inherit
        os.write(writer, b"done")
        os._exit(0)
    os.close(writer)
    assert os.read(reader, 4) == b"done"
    os.waitpid(child, 0)


def test_large_matrices_are_divided_among_threads_in_order(two_threads, monkeypatch):
    asked = []

    def recording(acts, workers, each):
        asked.append((len(acts), workers, each))
        return spread(acts, workers, each)

    monkeypatch.setattr("node.optim.newton_schulz.spread", recording)
    monkeypatch.setattr("node.optim.newton_schulz.APART", 192 * 192 * 200)
    g = torch.Generator().manual_seed(0)
    ms = [
        torch.randn(shape, generator=g)
        for shape in [(8, 8), (192, 200), (200, 192), (192, 200), (8, 8), (8, 8), (16, 8)]
    ]
    for m, x in zip(ms, newton_schulz_all(ms, 5, True, rule=CPU), strict=True):
        assert torch.allclose(x, newton_schulz(m), atol=1e-5)
    for some, stack in ((ms[:1], True), (ms[1:2], True), (ms, False)):
        newton_schulz_all(some, 5, stack, rule=CPU)
    assert asked == [(3, 2, 1), (1, 2, 2)], (
        "three large ones a thread each, one alone has both; no thread for small ones"
    )


def test_two_threads_step_the_same_values_as_one(two_threads):
    """The numbers differ by rounding alone: on two threads a library may sum a product in another
    order."""
    names = [f"model.layers.{i}.w.weight" for i in range(9)]
    g = torch.Generator().manual_seed(0)
    shapes = [(64, 64)] * 5 + [(256, 64), (64, 256), (200, 200), (200, 200)]
    parameters, gradients = (
        {n: torch.randn(s, generator=g) for n, s in zip(names, shapes, strict=True)}
        for _ in range(2)
    )
    two = step_all(Owner(OptimSettings(), 0), parameters, gradients, 20)
    torch.set_num_threads(1)
    one = step_all(Owner(OptimSettings(), 0), parameters, gradients, 20)
    for n, shape in zip(names, shapes, strict=True):
        bound = 2e-2 if way(*shape, rule_of(torch.device("cpu"))).precision == "bf16" else 1e-3
        assert torch.linalg.vector_norm(one[n] - two[n]) < bound * torch.linalg.vector_norm(
            one[n] - parameters[n]
        )
