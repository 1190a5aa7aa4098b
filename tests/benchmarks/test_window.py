"""Rows of the benchmark of the page: they hold only where there was something to see."""

from typing import Any

import pytest

from benchmarks import window
from benchmarks.report import UNJUDGED, Report

NAMES = " ".join(window.NAMES)


@pytest.mark.parametrize(
    ("shown", "made", "said", "holds"),
    [
        (NAMES, 0, [], True),
        ("", 0, [], False),
        (" ".join(window.NAMES[1:]), 0, [], False),
        (NAMES, 1, [], False),
        (NAMES, 0, ["dialog 1"], False),
    ],
)
def test_hostile_names_hold_where_they_stand_as_text(
    shown: str, made: int, said: list[str], holds: bool
) -> None:
    report = Report()
    window.tell_names(report, shown, made, said)
    (row,) = report.rows
    assert row.holds is holds


def test_names_that_no_browser_shows_are_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window.shutil, "which", lambda name: None)
    report = Report()
    window.hostile_names(report, "http://127.0.0.1:1/")
    assert report.end(None) == UNJUDGED


@pytest.mark.parametrize(("events", "holds"), [(0, False), (1, True)])
def test_viewers_that_see_nothing_do_not_cost_little(
    monkeypatch: pytest.MonkeyPatch, events: int, holds: bool
) -> None:
    def cost(*_: Any) -> tuple[float, int]:
        return 0.0, events

    monkeypatch.setattr(window, "cost_of_viewers", cost)
    report = Report()
    window.cost_row(report, "", "of a core", [], "", 1.0)
    (row,) = report.rows
    assert row.holds is holds
