"""What a server keeps of pushes from attempt to attempt, from plan to plan and over versions."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from node.core.errors import StepFault
from node.training.rounds.serving import Serving


def fresh() -> Serving[int]:
    """Serves "p" and "q" under plan "one", each from 0; cell 1 has pushed 5 to both."""
    serving: Serving[int] = Serving()
    assert serving.opens("one", ("p", "q"), lambda name: 0) == ("p", "q")
    assert take(serving, "one", 1, p=5, q=5) == {"p": 5, "q": 5}
    return serving


def take(serving: Serving[int], plan: str, cell: int, **deltas: int) -> Mapping[str, int]:
    return serving.take(plan, cell, ("p", "q"), deltas, 1, lambda value, by: value + by)[0]


def test_attempts_of_one_plan_go_on_from_each_other() -> None:
    serving = fresh()
    assert serving.opens("one", ("p", "q", "r"), lambda name: 100) == ("r",), (
        "a dead server's part begins here"
    )
    assert take(serving, "one", 2, p=1, q=1) == {"p": 6, "q": 6}


def test_another_plan_of_a_version_begins_at_that_version() -> None:
    serving = fresh()
    serving.settled()
    serving.opens("two", ("p", "q"), lambda name: 0)
    take(serving, "two", 1, p=5, q=5)
    assert serving.opens("three", ("p", "q"), lambda name: 0) == (), (
        "plan two came to nothing, and nobody adopted it"
    )
    assert take(serving, "three", 1, p=1, q=1) == {"p": 6, "q": 6}


def test_an_undone_round_is_discarded_and_a_settled_one_kept() -> None:
    serving = fresh()
    serving.undone()
    assert serving.names == set()
    serving = fresh()
    serving.settled()
    assert serving.names == {"p", "q"}
    serving.settled()
    assert serving.names == {"p", "q"}, "epochs of micro-batches settle too"
    serving.opens("two", ("p", "q"), lambda name: 0)
    take(serving, "two", 2, p=1, q=1)
    serving.undone()
    serving.opens("again", ("p", "q"), lambda name: 0)
    assert take(serving, "again", 2, p=2, q=2) == {"p": 7, "q": 7}


def test_what_is_served_by_others_now_is_not_kept_for_later() -> None:
    serving = fresh()
    serving.settled()
    serving.opens("two", ("p",), lambda name: 0)
    serving.settled()
    assert serving.names == {"p"}
    assert serving.opens("three", ("p", "q"), lambda name: 50) == ("q",)
    assert take(serving, "three", 1, p=0, q=0) == {"p": 5, "q": 50}


def test_who_came_from_elsewhere_begins_anew() -> None:
    serving = fresh()
    serving.settled()
    serving.forget()
    assert serving.opens("two", ("p", "q"), lambda name: 9) == ("p", "q")


def test_a_push_for_an_ended_round_is_not_applied() -> None:
    serving = fresh()
    with pytest.raises(StepFault):
        take(serving, "zero", 2, p=1, q=1)
    for cell in (2, 3):
        take(serving, "one", cell, p=1, q=1)
    values, age = serving.take(
        "one", 1, ("p", "q"), {"p": 1, "q": 1}, 1, lambda value, by: value + by
    )
    assert (values, age, serving.refused) == ({"p": 7, "q": 7}, 2, 1)


def test_a_push_in_progress_survives_another_attempt() -> None:
    serving = fresh()

    def step(value: int, by: int) -> int:
        serving.opens("one", ("p", "r"), lambda name: 100)
        return value + by

    assert serving.take("one", 2, ("p", "q"), {"p": 1, "q": 1}, 1, step)[0] == {"p": 6, "q": 6}
    assert serving.take("one", 3, ("p", "r"), {"p": 1, "r": 1}, 1, lambda value, by: value + by)[
        0
    ] == {"p": 7, "r": 101}
    with pytest.raises(StepFault, match="any more"):
        take(serving, "one", 3, p=1, q=1)
