"""Speeds are judged only where the benchmark had the cores for itself."""

import json

import pytest

from benchmarks.report import UNJUDGED, Report, Row, judged
from benchmarks.shared.load import Load, Moment

BUSY = Load(others=0.4, stolen=0.05)
QUIET = Load(others=0.02, stolen=0.01)


SPEEDS = ("s", "ms, the longest", "min", "µs", "x", "x, worst cell", "times those of one", "MiB/s")
SHARES = ("of a core", "% of a core", "% of processor time")


@pytest.mark.parametrize("unit", [*SPEEDS, *SHARES])
def test_a_speed_is_not_judged_beside_other_work(unit: str) -> None:
    row = Row("1 speed", 0.5, unit, "", "at least 1", holds=False)
    (found,) = judged([row], BUSY)
    assert found.holds is None
    assert found.target == f"at least 1; not judged: {BUSY}"
    assert judged([row], QUIET) == [row]


@pytest.mark.parametrize(
    "unit", ["bytes", "of 200", "ratio", "steps", "minutes lost", "% more loss"]
)
def test_counts_and_losses_are_judged_under_any_load(unit: str) -> None:
    row = Row("1 count", 3, unit, "", "at most 2", holds=False)
    assert judged([row], BUSY) == [row]


def test_the_load_is_what_others_took_of_all_cores() -> None:
    before = Moment(busy=100.0, stolen=1.0, all=400.0, ours=10.0)
    after = Moment(busy=108.0, stolen=2.0, all=420.0, ours=13.0)
    load = after.load_since(before)
    assert (load.others, load.stolen) == (pytest.approx(0.25), pytest.approx(0.05))
    assert before.load_since(before) == Load(0.0, 0.0)


def test_work_of_this_process_is_not_the_work_of_others() -> None:
    before = Moment.now()
    sum(range(20_000_000))
    after = Moment.now()
    assert after.ours > before.ours
    assert after.all >= before.all


def test_a_report_of_speeds_alone_says_that_it_could_not_tell(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Moment, "load_since", lambda self, before: BUSY)
    report = Report()
    report.add("1 speed", 0.5, "x", "", "at least 1", holds=False)
    assert report.end("-") == UNJUDGED
    written = json.loads(capsys.readouterr().out)
    assert written["load"] == {"others": 0.4, "stolen": 0.05}
    assert written["results"][0]["holds"] is None
    report.add("2 lost", 1, "peers", "", "0", holds=False)
    assert report.end(None) == 1
