"""Versions of a stage's parameters: adopted, undone, settled."""

from collections.abc import Mapping

import pytest
import torch
from torch import nn

from node.core.journey import Version
from node.stage import state as state_module
from node.stage.state import StageState

NEXT = Version(1, "ab" * 16)


def state() -> StageState:
    torch.manual_seed(0)
    return StageState(nn.Linear(3, 2), 1)


def plus(s: StageState, x: float) -> dict[str, torch.Tensor]:
    return {n: t + x for n, t in s.parameters().items()}


def test_adopting_replaces_tensors_and_never_writes_into_them() -> None:
    s = state()
    held = s.parameters()
    copies = {n: t.clone() for n, t in held.items()}
    digest = s.adopt(plus(s, 1.0), NEXT)
    assert (s.version, digest) == (NEXT, s.digest)
    assert all(torch.equal(tensor, copies[name]) for name, tensor in held.items())
    for now in (s.parameters(), dict(s.module.named_parameters())):
        assert all(torch.equal(now[name].detach(), copies[name] + 1) for name in held)


def test_an_update_can_be_undone_once_until_it_is_settled() -> None:
    s = state()
    before = s.digest
    first = s.parameters()
    s.adopt(plus(s, 1.0), NEXT)
    s.roll_back()
    assert (s.version, s.digest) == (Version(0), before)
    assert all(torch.equal(t, first[n]) for n, t in s.parameters().items())
    with pytest.raises(ValueError, match="no earlier"):
        s.roll_back()
    s.adopt(plus(s, 1.0), NEXT)
    s.settle()
    with pytest.raises(ValueError, match="no earlier"):
        s.roll_back()


def test_the_version_before_is_given_by_its_name_until_the_new_one_is_settled() -> None:
    s = state()
    first = s.digest
    before = s.parameters()
    s.adopt(plus(s, 1.0), NEXT)
    for epoch, lineage in ((None, ""), (1, ""), (1, NEXT.lineage)):
        held = s.held(epoch, lineage)
        assert held is not None
        assert (held.version, held.digest) == (NEXT, s.digest)
    for epoch, lineage in ((2, ""), (1, "cd" * 16)):
        assert s.held(epoch, lineage) is None
    held = s.held(0, "")
    assert held is not None
    assert (held.version, held.digest) == (Version(0), first)
    assert all(torch.equal(t, before[n]) for n, t in held.parameters.items())
    s.settle()
    assert s.held(0, "") is None


def test_a_set_that_does_not_fit_changes_nothing() -> None:
    s = state()
    before = s.digest
    with pytest.raises(KeyError):
        s.adopt({"weight": torch.zeros(2, 3)}, NEXT)
    with pytest.raises(ValueError, match="shape"):
        s.adopt({"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}, NEXT)
    assert (s.version, s.digest) == (Version(0), before)


def test_no_reader_sees_new_tensors_under_the_old_version(monkeypatch: pytest.MonkeyPatch) -> None:
    s = state()
    first = s.parameters()
    whole = state_module.digest
    seen = []

    def digest(tensors: Mapping[str, torch.Tensor]) -> str:
        held = s.held(None, "")
        assert held is not None
        seen.append(held.version)
        assert all(torch.equal(tensor, first[name]) for name, tensor in held.parameters.items())
        assert held.digest == whole(held.parameters)
        return whole(tensors)

    monkeypatch.setattr(state_module, "digest", digest)
    s.adopt(plus(s, 1.0), NEXT)
    assert seen == [Version(0)], "another thread may read while the digest is computed"
    assert s.digest == whole(s.parameters())
