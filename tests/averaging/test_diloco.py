"""DiLoCo: the algorithms that it must equal, and the safety of anchors and momentum."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from node.averaging.strategies.diloco import (
    OuterState,
    outer_step,
    pseudo_gradient,
)
from node.averaging.strategies.outer import OuterSettings

torch.set_num_threads(1)
PLAIN = OuterSettings(carries="deltas", optimizer="sgd", lr=1.0, momentum=0.0)
DILOCO = OuterSettings(carries="deltas", optimizer="nesterov", lr=0.7, momentum=0.9)
Named = dict[str, Tensor]


class Model:
    """A curved problem of two matrices; rows of data by worker."""

    def __init__(self) -> None:
        dice = torch.Generator().manual_seed(5)
        self.x = torch.randn(64, 6, generator=dice)
        self.y = torch.randn(64, 1, generator=dice)
        self.start: Named = {
            "a": torch.randn(6, 5, generator=dice),
            "b": torch.randn(5, 1, generator=dice),
        }

    def gradient(self, at: Named, rows: slice) -> Named:
        here = {n: p.clone().requires_grad_() for n, p in at.items()}
        loss = (torch.tanh(self.x[rows] @ here["a"]) @ here["b"] - self.y[rows]).square().mean()
        return dict(zip(here, torch.autograd.grad(loss, list(here.values())), strict=True))


def sgd(model: Model, at: Named, rows: slice, steps: int, lr: float) -> Named:
    for _ in range(steps):
        gradient = model.gradient(at, rows)
        at = {n: p - lr * gradient[n] for n, p in at.items()}
    return at


def close(a: Named, b: Named, atol: float = 1e-6) -> bool:
    return all(torch.allclose(a[n], b[n], atol=atol, rtol=0) for n in a)


def test_a_round_after_every_step_of_sgd_is_data_parallelism() -> None:
    model = Model()
    workers = [slice(16 * i, 16 * i + 16) for i in range(4)]
    together = model.start
    state = OuterState.begin(model.start)
    for _ in range(10):
        together = sgd(model, together, slice(0, 64), 1, 0.1)
        local = [pseudo_gradient(state, sgd(model, state.anchor, r, 1, 0.1)) for r in workers]
        mean = {n: torch.stack([one[n] for one in local]).mean(0) for n in state.anchor}
        state = outer_step(state, mean, PLAIN)
    assert close(state.anchor, together, 1e-5)
    assert not close(together, model.start, 0.01)


@pytest.mark.parametrize("optimizer", ["sgd", "nesterov"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_outer_step_is_torchs(optimizer: str, momentum: float) -> None:
    s = replace(DILOCO, optimizer=optimizer, momentum=momentum)
    state = OuterState.begin(Model().start)
    theirs = {n: torch.nn.Parameter(p.clone()) for n, p in Model().start.items()}
    nesterov = optimizer == "nesterov" and momentum > 0
    outer = torch.optim.SGD(theirs.values(), lr=s.lr, momentum=momentum, nesterov=nesterov)
    dice = torch.Generator().manual_seed(1)
    for _ in range(5):
        mean = {n: torch.randn(p.shape, generator=dice) for n, p in theirs.items()}
        for name, parameter in theirs.items():
            parameter.grad = mean[name].clone()
        outer.step()
        state = outer_step(state, mean, s)
    assert close(state.anchor, {n: p.data for n, p in theirs.items()}, 1e-5)


def test_a_step_changes_nothing_until_it_is_adopted() -> None:
    state = OuterState.begin(Model().start)
    before = {n: p.clone() for n, p in state.anchor.items()}
    once = outer_step(state, {"a": torch.ones(6, 5)}, DILOCO)
    again = outer_step(state, {"a": torch.ones(6, 5)}, DILOCO)
    assert close(state.anchor, before, 0.0)
    assert close(once.anchor, again.anchor, 0.0)
    assert torch.equal(once.anchor["b"], state.anchor["b"])
    assert torch.equal(once.momentum["b"], torch.zeros(5, 1))
    assert torch.allclose(state.anchor["a"] - once.anchor["a"], torch.full((6, 5), 0.7 * 1.9))


def test_a_pseudo_gradient_that_is_not_finite_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        outer_step(OuterState.begin(Model().start), {"a": torch.full((6, 5), torch.nan)}, DILOCO)


def test_the_state_is_a_copy() -> None:
    start = Model().start
    state = OuterState.begin(start)
    start["a"].zero_()
    assert float(state.anchor["a"].abs().sum()) > 1
