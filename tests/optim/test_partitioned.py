"""Many owners are one optimizer: through a death and a newcomer, and through checkpoints of other
group sizes."""

from __future__ import annotations

import pytest
import torch

from benchmarks.exactness import METHODS, SHAPES, Group, compared, numbers, settings_of
from benchmarks.reference.swarm import step_all
from node.checkpoint.settings import CheckpointSettings
from node.checkpoint.store import CheckpointStore
from node.core.ids import PeerId
from node.optim.owner import Owner
from node.optim.ownership import assign
from node.optim.parts import parts_of
from tests.optim.conftest import matrix_by_matrix


@pytest.mark.parametrize("method", METHODS)
@matrix_by_matrix()
def test_after_fifty_steps_it_is_one_process_to_the_bit(method):
    worst, group = compared(method, 50)
    assert worst == 0
    assert group.lost == 0
    assert group.moved >= 4
    assert len(group.owners) == 3
    assert all(owner.names() for owner in group.owners.values())
    matrix = "model.layers.0.up"
    assert group.owners[group.plan[matrix]].state(matrix)["steps"].tolist() == [50.0]


def test_the_librarys_stacking_changes_only_rounding():
    worst, group = compared("muon", 50)
    assert worst < 1e-5
    assert group.lost == 0


def test_the_comparison_sees_state_that_is_lost(monkeypatch):
    monkeypatch.setattr(Group, "travelled", lambda self, name, state: {})
    with pytest.raises(Exception, match="optimizer state"):
        compared("muon", 6)
    monkeypatch.undo()
    monkeypatch.setattr("benchmarks.exactness.Spares.get", lambda self, name: None)
    worst, group = compared("muon", 6)
    assert group.lost > 0
    assert worst > 0


@pytest.mark.parametrize("method", METHODS)
@matrix_by_matrix()
def test_a_checkpoint_of_three_is_loaded_by_two_and_by_five(tmp_path, method):
    settings = settings_of(method)
    group, alone = Group(settings, SHAPES, [PeerId(p) for p in "abc"]), Owner(settings, 0)
    split, whole = numbers(0), numbers(0)
    for epoch in range(4):
        gradients = numbers(epoch + 1, scale=0.01)
        split, whole = (
            group.epoch(split, gradients, epoch),
            step_all(alone, whole, gradients, epoch),
        )
    for peer, owner in group.owners.items():
        store = CheckpointStore(tmp_path / peer, CheckpointSettings(), "run")
        store.save(
            1, 4, split, {name: owner.state(name) for name in owner.names()}, {"owners": group.plan}
        )
    gradients = numbers(9, scale=0.01)
    expected = step_all(alone, whole, gradients, 4)
    for members in ("ab", "vwxyz"):
        peers = [PeerId(p) for p in members]
        saved = {
            peer: CheckpointStore(tmp_path / peer, CheckpointSettings(), "run").load(1, 4)
            for peer in "abc"
        }
        plan = assign(
            parts_of(SHAPES, settings), [(p, 1.0) for p in peers], saved["a"].meta["owners"]
        )
        fresh = {}
        for peer in peers:
            owner, mine = Owner(settings, 0), [name for name in SHAPES if plan[name] == peer]
            for name in mine:
                owner.load_state(
                    name, SHAPES[name], saved[saved["a"].meta["owners"][name]].optimizer[name], 3
                )
            fresh |= owner.step_parts(
                saved["a"].parameters, {name: gradients[name] for name in mine}, 4
            )
        assert set(plan.values()) == set(peers)
        assert all(torch.equal(fresh[name], expected[name]) for name in SHAPES)
