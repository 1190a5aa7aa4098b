"""Speeds are judged only where the benchmark had the cores for itself."""

import json
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from benchmarks import kernels
from benchmarks.kernels import Contestant, Scene
from benchmarks.nothing_lost import disk
from benchmarks.report import UNJUDGED, Report, Row, judged
from benchmarks.shared.load import Load, Moment
from testbed.daemons.books import COMMITTED
from testbed.daemons.fleet import Peer
from testbed.daemons.told import Told

Times = dict[str, list[float]]
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


@pytest.mark.parametrize("stopped", [False, True])
def test_the_speed_of_a_step_beside_its_peers_is_a_speed(
    monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    weights = torch.zeros(4, 4)

    def step() -> None:
        weights.add_(1.0)

    def first_steps(
        scene: Scene, known: object, shapes: object, errors: dict[str, float], times: Times
    ) -> list[str]:
        errors.update({kernels.OURS: 0.1, kernels.QUINTIC: 0.1})
        times.update({kernels.OURS: [], kernels.QUINTIC: []})
        if stopped:
            return ["torch"]
        errors["torch"] = 0.1
        times["torch"] = []
        return []

    one = Contestant(step, lambda: None, lambda: [weights])
    names = (kernels.OURS, kernels.QUINTIC, "torch")
    monkeypatch.setattr(kernels, "contestants", lambda *_: dict.fromkeys(names, one))
    monkeypatch.setattr(Scene, "first_steps", first_steps)
    monkeypatch.setattr(Scene, "rates", lambda *_: None)
    report = Report()
    Scene(torch.device("cpu"), "1 thread", 1, 1).table(report, "mixed", [(4, 4)], False, 60.0)
    (speed,) = [row for row in judged(report.rows, BUSY) if "speed" in row.name]
    assert speed.holds is None
    assert "not judged" in speed.target


def test_the_cost_of_checkpoints_in_tokens_a_second_is_a_speed() -> None:
    told = [event(COMMITTED, epoch=epoch, seconds=1.0) for epoch in range(10)]
    told.append(event("checkpoint-written", seconds=0.1))
    peer = cast("Peer", SimpleNamespace(told=lambda: told))
    report = Report()
    disk.cost(report, [peer], 10**6, 10**6, 1e9, judged=True)
    (cost,) = judged(report.rows, BUSY)
    assert cost.holds is None
    assert "not judged" in cost.target


def event(kind: str, **fields: float) -> Told:
    """An event of a daemon."""
    return Told("ends-0", 0.0, "info", "", kind, "", fields)


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


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("c0ffee", "c0ffee", "c0ffee"),
        ("c0ffee+", "c0ffee+", "c0ffee+"),
        ("c0ffee", "decade", "c0ffee..decade+"),
        ("c0ffee", "c0ffee+", "c0ffee..c0ffee+"),
        ("c0ffee+", "decade", "c0ffee+..decade+"),
    ],
)
def test_a_result_names_the_tree_of_its_beginning_and_says_that_it_changed(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    before: str,
    after: str,
    said: str,
) -> None:
    monkeypatch.setattr("benchmarks.report.commit", lambda: before)
    report = Report()
    monkeypatch.setattr("benchmarks.report.commit", lambda: after)
    report.write("-")
    assert json.loads(capsys.readouterr().out)["commit"] == said


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
