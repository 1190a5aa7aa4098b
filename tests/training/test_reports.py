"""What the log says of cells that lead themselves."""

from node.core.ids import CellId, PeerId
from node.core.journey import Partner, Plan, PlanMember, Version, Window
from node.training.leader import reports
from node.training.leader.attempt import EpochAttempt

OWN, OTHER, ME, IT = CellId("ab" * 8), CellId("cd" * 8), PeerId("me"), PeerId("it")
MEMBERS = (PlanMember(ME, 0), PlanMember(IT, 1))


def means(*stages: int) -> Plan:
    window = Window(partners=(Partner(OTHER, IT, {}),), means=dict.fromkeys(stages, "d"))
    return Plan(7, 1, ME, MEMBERS, (), {}, outer=90, cell_id=OWN, window=window)


def test_a_division_names_both_cells() -> None:
    founded = Plan(12, 1, ME, MEMBERS, (), {}, cell_id=OTHER, parent=OWN)
    said = reports.cell_divided(founded)
    assert said.text == "cell ababab divides at epoch 12: 2 of its peers become cell cdcdcd"
    assert said.facts["cell"] == OTHER


def test_an_outer_round_says_whose_means_it_puts_in_place() -> None:
    planned = reports.epoch_planned(means(0, 1), (), {})
    assert planned.text == "epoch 7: puts in place the means with cell cdcdcd"
    some = reports.epoch_planned(means(1), (), {})
    assert some.text.endswith("with cell cdcdcd at 1 of 2 stages")


def test_a_commit_says_whether_it_was_training_or_a_mean() -> None:
    attempt = EpochAttempt(means(0, 1), 0.0, 1.0)
    said = reports.epoch_committed(attempt, Version(8), 100, 2.0, 1.0)
    assert said.text == "epoch 8/100 committed, the means with cell cdcdcd are in place"
    assert (said.facts["cell"], said.facts["outer"]) == (OWN, 90)
    alone = EpochAttempt(Plan(7, 1, ME, MEMBERS, (), {}), 0.0, 1.0)
    said = reports.epoch_committed(alone, Version(8), 100, 2.0, 1.0)
    assert said.text == "epoch 8/100 committed, loss 2.000"
    assert "cell" not in said.facts
