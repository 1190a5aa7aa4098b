"""Versions of a stage's parameters: adopted, undone, settled."""

import pytest
import torch
from torch import nn

from node.training.state.stage import StageState


def state() -> StageState:
    torch.manual_seed(0)
    return StageState(nn.Linear(3, 2), 1, 4)


def plus(s: StageState, x: float) -> dict[str, torch.Tensor]:
    return {n: t + x for n, t in s.parameters().items()}


def test_adopting_replaces_tensors_and_never_writes_into_them() -> None:
    s = state()
    held = s.parameters()
    copies, digest = {n: t.clone() for n, t in held.items()}, s.adopt(plus(s, 1.0), 5)
    assert (s.epoch, digest) == (5, s.digest)
    for name, tensor in held.items():
        assert torch.equal(tensor, copies[name])
        assert torch.equal(s.parameters()[name], copies[name] + 1)
        assert torch.equal(dict(s.module.named_parameters())[name].detach(), copies[name] + 1)


def test_an_update_can_be_undone_once_until_it_is_settled() -> None:
    s = state()
    before, first = s.digest, s.parameters()
    s.adopt(plus(s, 1.0), 5)
    s.roll_back(4)
    assert (s.epoch, s.digest) == (4, before)
    assert all(torch.equal(t, first[n]) for n, t in s.parameters().items())
    with pytest.raises(ValueError, match="no earlier"):
        s.roll_back(3)
    s.adopt(plus(s, 1.0), 5)
    s.settle()
    with pytest.raises(ValueError, match="no earlier"):
        s.roll_back(4)


def test_a_set_that_does_not_fit_changes_nothing() -> None:
    s = state()
    before = s.digest
    with pytest.raises(KeyError):
        s.adopt({"weight": torch.zeros(2, 3)}, 5)
    with pytest.raises(ValueError, match="shape"):
        s.adopt({"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}, 5)
    assert (s.epoch, s.digest) == (4, before)
