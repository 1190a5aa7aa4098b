"""Rows of the benchmarks: each states its target, and whether the value meets it."""

import ast
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import simulator
from benchmarks.report import Report
from benchmarks.shared.points import exists

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
IN_PARTS = sorted(p.stem for p in BENCHMARKS.glob("*.py") if '"--only"' in p.read_text())
NAMED = re.compile(r"[\w/]+/test_\w+:test_\w+")
"""A test's name in the tables of faults."""
COLUMNS = ("name", "value", "unit", "peer", "target", "holds")


def rows(source: str) -> Iterator[dict[str, str]]:
    """Source text of the columns of every row that is written out at its `report.add`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "report.add":
            given = [*zip(COLUMNS, node.args, strict=False)]
            given += [(k.arg or "", k.value) for k in node.keywords]
            if not any(isinstance(value, ast.Starred) for _, value in given):
                yield {"target": "''", "holds": "None"} | {k: ast.unparse(v) for k, v in given}


def test_a_row_that_can_hold_says_what_was_asked():
    wrong = []
    count = 0
    for path in sorted(BENCHMARKS.rglob("*.py")):
        for row in rows(path.read_text()):
            count += 1
            asked = row["target"] != "''"
            judged = row["holds"] != "None"
            # rows of benchmarks that did not reach their end
            if asked != judged and row["holds"] != "False":
                wrong.append(f"{path.relative_to(BENCHMARKS)}: {row['name']}")
    assert count > 100
    assert not wrong


def test_the_tests_that_rows_name_are_there():
    named = set[str]()
    for path in BENCHMARKS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                named.update([node.value] if NAMED.fullmatch(node.value) else [])
    assert len(named) > 150
    assert not [test for test in sorted(named) if not exists(test)]


def test_the_simulator_fails_when_a_row_does_not_hold(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["simulator", "--sizes", ""])
    monkeypatch.setattr(simulator, "_planted", lambda report: True)
    for holds, code in ((True, 0), (False, 1)):

        def schedules(report: Report, *_: int, holds: bool = holds) -> bool:
            return bool(report.add("3 schedules", 7, "", "", ">= 10000", holds))

        monkeypatch.setattr(simulator, "_schedules", schedules)
        assert simulator.main() == code


@pytest.mark.parametrize("name", IN_PARTS)
def test_a_part_that_is_not_there_is_refused(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--only", "nothing"])
    with pytest.raises(SystemExit) as end:
        sys.exit(importlib.import_module(f"benchmarks.{name}").main())
    assert end.value.code == 2
    assert "--only nothing: there are " in capsys.readouterr().err
