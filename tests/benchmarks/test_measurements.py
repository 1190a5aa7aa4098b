"""The page of measurements is what the results of the benchmarks say."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.__main__ import names
from tools import measurements


def test_the_page_is_written_from_the_results():
    page = measurements.page(measurements.kept())
    assert measurements.PAGE.read_text() == page, "run  make bench"


def test_each_result_is_of_a_benchmark_and_of_a_committed_tree():
    for name, result in measurements.kept().items():
        assert name.partition(".")[0] in names()
        assert not result["commit"].endswith("+"), f"{name} was measured with changes"
        assert result["results"]


def test_each_result_is_of_a_commit_of_this_history(root: Path):
    def git(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=60)

    if git("rev-parse", "--is-shallow-repository").stdout.strip() != "false":
        pytest.skip("the history is not here")
    for name, result in measurements.kept().items():
        found = git("merge-base", "--is-ancestor", result["commit"], "HEAD")
        assert found.returncode == 0, f"{name} was measured at {result['commit']}, which is gone"


def result_of(*rows: dict[str, Any]) -> dict[str, Any]:
    """The kept result of a benchmark with these rows, beside programs that took half the cores."""
    return {
        "arguments": [],
        "commit": "c0ffee",
        "date": "2026-01-02",
        "machine": "a machine",
        "load": {"others": 0.5, "stolen": 0.0},
        "results": list(rows),
    }


def test_a_row_that_does_not_hold_is_shown_as_such():
    row = {
        "name": "1 speed",
        "value": 0.51234,
        "unit": "x",
        "peer": "a | b",
        "target": "at least 1",
    }
    result = result_of({**row, "holds": False}, {**row, "target": "", "holds": None})
    result = json.loads(json.dumps(result))
    part = {**result, "arguments": ["--only", "3", "--quick"]}
    shown = measurements.page({"pipeline": result, "proof.10": part, "proof.3": part})
    assert "`python -m benchmarks.pipeline`" in shown
    assert shown.index("## proof, part 3") < shown.index("## proof, part 10")
    assert "`python -m benchmarks.proof --only 3 --quick`" in shown
    assert "| 1 speed | 0.5123 x | a \\| b | at least 1 | **no** |" in shown
    assert "0 of 1 rows hold" in shown
    assert "other programs took 50% of the cores" in shown


def test_a_part_that_did_not_come_to_its_end_counts_as_a_row_that_does_not_hold():
    row = {"name": "1", "value": 0, "unit": "", "peer": "", "target": "1", "holds": True}
    failed = {**row, "name": "2 did not come to its end", "target": "", "holds": False}
    assert "1 of 2 rows hold" in measurements.page({"pipeline": result_of(row, failed)})


WHOLE = '{"arguments": [], "commit": "", "machine": "", "date": "", "load": {}, "results": []}'


@pytest.mark.parametrize(
    ("name", "text"),
    [("pipeline", '{"commit": "c0f'), ("pipeline", "[]"), ("pipeline", "{}"), ("gone", WHOLE)],
)
def test_a_file_that_is_no_result_is_named(tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / f"{name}.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"{name}.json is not the result of a benchmark"):
        measurements.kept(tmp_path)
