"""Rows of the benchmarks: each states its target, and whether the value meets it."""

import ast
import importlib
import re
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks import simulator
from benchmarks.__main__ import main as benchmark_names
from benchmarks.__main__ import names
from benchmarks.report import Report, chosen
from benchmarks.shared.points import exists

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def source(name: str) -> Path:
    """File with the ``main`` of a benchmark."""
    module = BENCHMARKS / f"{name}.py"
    return module if module.is_file() else BENCHMARKS / name / "__main__.py"


ONLY = ('"--only"', "run_asked")
"""Either of these in a source shows that parts can be chosen."""
IN_PARTS = [name for name in names() if any(word in source(name).read_text() for word in ONLY)]
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


def started(name: str) -> int:
    """Run the ``main`` of a benchmark in this process."""
    package = "" if source(name).stem == name else ".__main__"
    return importlib.import_module(f"benchmarks.{name}{package}").main()


@pytest.mark.parametrize("name", names())
def test_a_benchmark_says_what_it_measures_and_writes_json(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as end:
        sys.exit(started(name))
    assert end.value.code == 0
    shown = capsys.readouterr().out
    assert f"python -m benchmarks.{name}" in shown
    assert "--json FILE" in shown


def test_no_command_is_run_for_an_unknown_benchmark(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["benchmarks", "pipelin"])
    assert benchmark_names() == 1
    assert capsys.readouterr() == ("", "no benchmark pipelin\n")


@pytest.mark.parametrize("name", IN_PARTS)
def test_a_part_that_is_not_there_is_refused(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--only", "nothing"])
    with pytest.raises(SystemExit) as end:
        sys.exit(started(name))
    assert end.value.code == 2
    assert "--only nothing: there are " in capsys.readouterr().err


PARTS = ("1a", "1b", "2", "2x", "12")


@pytest.mark.parametrize(
    ("words", "found"),
    [("1", ["1a", "1b"]), ("1b,12", ["1b", "12"]), ("2", ["2", "2x"]), ("2x", ["2x"])],
)
def test_a_number_names_all_parts_with_it_and_a_letter(words: str, found: list[str]) -> None:
    assert chosen(ArgumentParser(), words, PARTS) == found


@pytest.mark.parametrize("words", ["3", "1c", "x", ""])
def test_a_part_that_there_is_not_ends_the_program(words: str) -> None:
    with pytest.raises(SystemExit):
        chosen(ArgumentParser(), words, PARTS)
