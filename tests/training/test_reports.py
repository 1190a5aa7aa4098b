"""Log lines about cells that lead themselves."""

import pytest

from node.core.ids import CellId, PeerId
from node.core.journey import Partner, Plan, PlanMember, Version, Window
from node.epoch.attempts.timing import AttemptTimes
from node.epoch.events import RecordFact
from node.epoch.leader import reports
from node.epoch.leader.attempt import EpochAttempt

OWN = CellId("ab" * 8)
OTHER = CellId("cd" * 8)
ME = PeerId("me")
IT = PeerId("it")
MEMBERS = (PlanMember(ME, 0), PlanMember(IT, 1))


def means(*stages: int) -> Plan:
    window = Window(partners=(Partner(OTHER, IT, {}),), means=dict.fromkeys(stages, "d"))
    return Plan(7, 1, ME, MEMBERS, (), {}, outer=90, cell_id=OWN, window=window)


def committed(plan: Plan) -> RecordFact:
    return reports.epoch_committed(
        EpochAttempt(plan, AttemptTimes(0.0, 1.0)), Version(8), 100, 2.0, 1.0
    )


FOUNDED = Plan(12, 1, ME, MEMBERS, (), {}, cell_id=OTHER, parent=OWN)
DIVIDES = "cell ababab divides at epoch 12: 2 of its peers become cell cdcdcd"
LANDS = "epoch 7: puts in place the means with cell cdcdcd"


@pytest.mark.parametrize(
    ("said", "text", "facts"),
    [
        (reports.cell_divided(FOUNDED), DIVIDES, {"cell": OTHER}),
        (reports.epoch_planned(means(0, 1), (), {}), LANDS, {}),
        (reports.epoch_planned(means(1), (), {}), f"{LANDS} at 1 of 2 stages", {}),
        (
            committed(means(0, 1)),
            "epoch 8/100 committed, the means with cell cdcdcd are in place",
            {"cell": OWN, "outer": 90},
        ),
        (committed(Plan(7, 1, ME, MEMBERS, (), {})), "epoch 8/100 committed, loss 2.000", {}),
    ],
    ids=["divided", "all-stages", "one-stage", "mean", "training"],
)
def test_what_cells_do_is_said_with_their_names(
    said: RecordFact, text: str, facts: dict[str, object]
) -> None:
    assert said.text == text
    assert facts.items() <= said.facts.items()


def test_a_run_of_one_cell_says_nothing_of_cells() -> None:
    assert "cell" not in committed(Plan(7, 1, ME, MEMBERS, (), {})).facts
