"""Many owners are one optimizer: through a death and a newcomer, and through checkpoints of other
group sizes."""

import pytest

from node.core.ids import PeerId
from testbed.models.owner_group import METHODS, SHAPES, Group, compared, numbers, settings_of
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


@pytest.mark.parametrize(("every", "age", "lost"), [(5, 2, 0), (1, 0, 0), (0, 0, 1)])
def test_a_death_costs_the_age_of_the_newest_copy_or_the_state(every, age, lost):
    a, b = (PeerId(p) for p in "ab")
    group = Group(settings_of("muon"), SHAPES, (a, b), every=every)
    parameters = numbers(0)
    for epoch in range(12):
        parameters = group.epoch(parameters, numbers(epoch + 1, scale=0.01), epoch)
    orphans = [name for name, owner in group.plan.items() if owner == b]
    group.change((a,), 11)
    assert (group.age, group.lost) == (age * len(orphans), lost * len(orphans))
    steps = {float(group.owners[a].state(n).get("steps", [0.0])[0]) for n in orphans}
    assert steps == {0.0 if lost else 12.0 - age}
