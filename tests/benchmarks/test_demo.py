"""Rows of the demo, from outcomes as the demo prints them."""

from typing import Any

from benchmarks import demo
from benchmarks.report import Report


def outcome(**changes: Any) -> dict[str, Any]:
    """The JSON line of a demo of three daemons."""
    usual = {
        "epochs": 150,
        "tokens": 1_228_800,
        "seconds": 140.0,
        "first_epoch_seconds": 12.0,
        "loss_first": 5.58,
        "loss_val": 1.246,
        "digests_equal": True,
        "compared": 6,
        "failures": 0,
        "killed": "stage-1-1",
        "replaced_in_s": 9.0,
        "work": {"ends-0": 0.5, "stage-1-0": 0.3, "stage-1-1": 0.2},
    }
    return usual | changes


def held(*runs: dict[str, Any]) -> list[bool | None]:
    report = Report()
    demo.whole(report, runs)
    return [row.holds for row in report.rows]


def test_rows_hold_for_a_run_as_it_was_asked_for():
    assert held(outcome(), outcome()) == [True, True, True, True, None]


def test_each_figure_can_fail():
    bad = {"first_epoch_seconds": 16.0, "seconds": 151.0, "loss_val": 1.26, "digests_equal": False}
    assert held(outcome(**bad)) == [False, False, False, False, None]
    assert held(outcome(compared=0))[3] is False
    assert held(outcome(failures=1), outcome())[3] is False


def test_the_share_of_the_less_busy_replica_is_the_least_of_all_stages():
    work = {"ends-0": 0.5, "stage-1-0": 0.1, "stage-1-1": 0.4, "stage-2-0": 0.2, "stage-2-1": 0.2}
    assert demo.lesser_share(work) == 0.25


def test_a_peer_that_is_not_replaced_does_not_hold():
    report = Report()
    demo.killed(report, outcome(replaced_in_s=0.0))
    demo.killed(report, outcome())
    assert [row.holds for row in report.rows] == [False, True]
