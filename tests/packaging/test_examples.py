"""The programs of examples/: each runs by itself and prints what its page promises."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def printed(root: Path, name: str) -> list[str]:
    """Lines that an example prints."""
    done = subprocess.run(
        [sys.executable, str(root / "examples" / name)],
        env={**os.environ, "PYTHONPATH": str(root)},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_every_example_is_run_and_has_a_line_on_their_page(root: Path) -> None:
    files = {file.name for file in (root / "examples").glob("*.py")}
    assert files == {"strategy.py", "paths.py", "manifest.py"}
    page = (root / "examples" / "README.md").read_text()
    assert [name for name in files if f"| `examples/{name}` |" not in page] == []


def test_doubling_is_exact_after_as_many_rounds_as_places_have_bits(root: Path) -> None:
    _, *rows = printed(root, "strategy.py")
    found = {name: [*map(float, numbers)] for name, *numbers in map(str.split, rows)}
    assert {*found} == {"Butterfly", "Pairs", "Doubling"}
    assert found["Butterfly"][1] < 1e-30, "one group has the mean after one round"
    assert found["Doubling"][3] > 1e-3
    assert found["Doubling"][4] < 1e-30
    assert found["Pairs"][4] > 1e-6, "random pairs never have it"


def test_planned_paths_pass_the_slow_peer_by(root: Path) -> None:
    lines = printed(root, "paths.py")
    paths = [line.split()[1::3] for line in lines[1:9]]
    assert [len(path) for path in paths] == [3] * 8
    assert sorted(path[0] for path in paths) == ["0"] * 4 + ["1"] * 4
    passed = [path[2] for path in paths]
    assert passed.count("5") < passed.count("4"), "peer 5 is three times as slow"
    assert f"stage 2: peer 4 has {passed.count('4')}, peer 5 has {passed.count('5')}" in lines
    seconds = [float(line.split(" s")[0].split()[-1]) for line in lines[-2:]]
    assert seconds[0] < seconds[1], "the plan is shorter than round robin"


@pytest.mark.parametrize(
    "line",
    [
        "its owner   True",
        "same run    True",
        "another run True",
        "forged      the manifest's signature does not fit its content: it was changed after "
        "signing",
        'unknown     averaging.reducer = "average": allowed: one of mean, clipped-mean, median, '
        "trimmed-mean, centered-clip",
    ],
)
def test_a_manifest_is_written_read_and_refused(root: Path, line: str) -> None:
    assert line in printed(root, "manifest.py")
