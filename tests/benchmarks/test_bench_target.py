"""``make bench``: every benchmark runs, and the page is written, whatever the rows say."""

import shutil
import subprocess
from pathlib import Path

import pytest

STUB = """\
#!/bin/sh
case "$2" in
benchmarks) printf 'one\\ntwo\\n' ;;
*) echo "ran $2" ;;
esac
case "$2" in
benchmarks.one) exit {code} ;;
esac
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")
@pytest.mark.parametrize(("code", "others"), [(0, ["two"]), (1, ["two"]), (3, ["two"]), (130, [])])
def test_the_page_is_written_after_a_benchmark_that_fails(
    root: Path, tmp_path: Path, code: int, others: list[str]
) -> None:
    program = tmp_path / "bin/python"
    program.parent.mkdir()
    program.write_text(STUB.format(code=code))
    program.chmod(0o755)
    (tmp_path / ".ready").touch()
    done = subprocess.run(
        ["make", "bench", f"VENV={tmp_path}"], cwd=root, capture_output=True, text=True, timeout=60
    )
    ran = [line.removeprefix("ran ") for line in done.stdout.splitlines() if "ran " in line]
    benchmarks = [f"benchmarks.{name}" for name in others]
    assert ran == ["benchmarks.one", *benchmarks, "tools.measurements"]
    assert bool(done.returncode) == bool(code)
