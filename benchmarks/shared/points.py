"""Faults as rows of a benchmark: before, now, and the tests that show it."""

import subprocess
import sys
import xml.etree.ElementTree as xml
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.report import ROOT, Report

TESTS_S = 1200.0
"""Bound of all tests of the table."""


@dataclass(frozen=True)
class Point:
    """A fault. ``tests``: file below ``tests/`` without its ending, a colon, the test; none where
    another row shows it."""

    name: str
    before: str
    now: str
    tests: tuple[str, ...]


def add(report: Report, root: Path, number: str, points: Sequence[Point]) -> None:
    """A row for every point; it holds when all tests of the point pass. Without tests it says
    neither."""
    tests = sorted({test for point in points for test in point.tests})
    found = passed(root / f"tests-{number}.xml", tests)
    for point in points:
        failed = [test for test in point.tests if not found.get(test)]
        names = ", ".join(failed or point.tests)
        report.add(
            f"{number} {point.name}",
            len(point.tests) - len(failed),
            "tests pass",
            f"before: {point.before}",
            f"{len(point.tests)}: {point.now}{'; failed' if failed else ''} ({names})",
            holds=not failed if point.tests else None,
        )


def exists(test: str) -> bool:
    """Return True if there is such a test. One unknown name would keep pytest from running any."""
    file, _, name = test.partition(":")
    path = ROOT / "tests" / f"{file}.py"
    return path.is_file() and f"def {name}(" in path.read_text()


def passed(file: Path, tests: Sequence[str]) -> dict[str, bool]:
    """Run tests. Returns True for each test that passed with all of its parameters, else False. A
    test that did not run is not in the answer. Raises TimeoutExpired after TESTS_S."""
    nodes = [f"tests/{test.replace(':', '.py::')}" for test in tests if exists(test)]
    command = [sys.executable, "-m", "pytest", "-q", f"--junit-xml={file}", *nodes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=TESTS_S)
    if not file.is_file():
        raise RuntimeError(f"the tests did not run: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    found: defaultdict[str, list[bool]] = defaultdict(list)
    for case in xml.parse(file).iter("testcase"):
        place = case.get("classname", "").removeprefix("tests.").replace(".", "/")
        name = case.get("name", "").partition("[")[0]
        fine = all(case.find(fault) is None for fault in ("failure", "error", "skipped"))
        found[f"{place}:{name}"].append(fine)
    return {test: all(outcomes) for test, outcomes in found.items()}
