"""Many owners are one optimizer: through a death and a newcomer, and through checkpoints of other
group sizes."""

import pytest

from testbed.models.owner_group import METHODS, Group, compared
from tests.optim.conftest import matrix_by_matrix


@pytest.mark.parametrize("parameters", ["fp32", "bf16"])
@pytest.mark.parametrize("method", METHODS)
@matrix_by_matrix()
def test_after_fifty_steps_it_is_one_process_to_the_bit(method, parameters):
    worst, group = compared(method, 50, parameters)
    assert (worst, group.lost) == (0, 0)
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
    monkeypatch.setattr("testbed.models.owner_group.Spares.get", lambda self, name: None)
    worst, group = compared("muon", 6)
    assert group.lost > 0
    assert worst > 0
