"""What a machine cannot measure is no success: the exit code of the benchmark says so."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from benchmarks import chaos, soak
from benchmarks.chaos import Outcome
from benchmarks.firsthour import damage
from benchmarks.installed import image, pythons, service, shells
from benchmarks.report import UNJUDGED, Report
from benchmarks.shared.parts import run_part
from testbed.daemons.fleet import Box
from testbed.daemons.limits import Unavailable
from testbed.swarms.arena import Arena
from testbed.swarms.scenarios import Scenario, Strike

Rows = Callable[[Report, Path], object]


class Whole:
    """A swarm at full strength, which nothing can be done to."""

    def heal(self) -> float:
        return 0.0

    def books(self) -> "Whole":
        return self

    def losses(self) -> None: ...


def skipped(report: Report, root: Path) -> None:
    def strike(a: Arena) -> Strike:
        raise Unavailable("no control groups")

    scenario = Scenario("disk-full", "a disk is full", strike)
    outcome: Outcome = chaos.run(cast("Arena", Whole()), scenario)
    chaos.judge(report, scenario, outcome)


def untold(report: Report, root: Path) -> None:
    soak.tell(report, {"ends-0": soak.Series()})


def python(report: Report, root: Path) -> None:
    pythons._runs(report, "3.99", root)


@pytest.mark.parametrize(
    "part", [skipped, untold, service.rows, shells.rows, image.rows, python, damage.full_disk]
)
def test_a_row_that_cannot_be_measured_here_shows_in_the_exit_code(
    part: Rows, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    @contextlib.contextmanager
    def no_disk(root: Path) -> Iterator[None]:
        raise PermissionError("only root may mount")
        yield

    monkeypatch.setattr(damage, "small_disk", no_disk)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr(shells, "installed", lambda: SimpleNamespace(program=tmp_path / "tutti"))
    monkeypatch.setattr(image, "_lint", lambda report: None)
    monkeypatch.setattr(pythons, "_interpreter", lambda version: None)
    report = Report()
    part(report, tmp_path)
    assert report.rows
    assert all("not judged: " in row.target for row in report.rows)
    assert report.end(None) == UNJUDGED


def test_an_error_on_a_full_disk_is_no_disk_that_cannot_be_mounted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @contextlib.contextmanager
    def disk(root: Path) -> Iterator[None]:
        root.mkdir(parents=True)
        yield

    def filled(report: Report, box: Box) -> None:
        raise FileNotFoundError(2, "No such file", "epoch-12/manifest.json")

    monkeypatch.setattr(damage, "small_disk", disk)
    monkeypatch.setattr(damage, "filled", filled)
    report = Report()
    run_part(report, "4 damage", lambda report, root: damage.full_disk(report, root / "full"))
    (row,) = report.rows
    assert row.holds is False
    assert "epoch-12/manifest.json" in row.name
