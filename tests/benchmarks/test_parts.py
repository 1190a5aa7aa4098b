"""A part of a benchmark that fails costs its own row, and no other."""

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.report import Report
from benchmarks.shared.parts import run_part
from node.app.launch import Child
from node.core.errors import TimedOut
from testbed.daemons.fleet import Box, Hang, Peer

SLEEPS = [sys.executable, "-c", "import time; time.sleep(600)"]
FAILURES = [
    Hang("no epoch"),
    OSError("no space left"),
    RuntimeError("no manifest"),
    TimedOut("no answer", "ask again"),
    subprocess.CalledProcessError(1, "ip"),
    subprocess.TimeoutExpired("tutti stop", 200.0),
]


@pytest.mark.parametrize("error", FAILURES, ids=lambda error: type(error).__name__)
def test_a_part_that_fails_leaves_a_row_that_does_not_hold(error: Exception) -> None:
    def part(report: Report, root: Path) -> None:
        report.add("measured before", 1, "", target="1", holds=True)
        raise error

    report = Report()
    run_part(report, "1 moments", part)
    before, failed = report.rows
    assert before.holds
    assert failed.holds is False
    assert failed.name.startswith("1 moments did not come to its end: ")
    assert report.end(None) == 1


def test_a_daemon_or_a_command_that_does_not_end_hangs(tmp_path: Path) -> None:
    box = Box(tmp_path)
    with pytest.raises(Hang, match="tutti status has not ended"):
        box.tutti("status", timeout=0.0)
    child = Child("ends-0", tmp_path / "ends-0", ())
    peer = Peer("ends-0", tmp_path / "ends-0", child)
    child.process = subprocess.Popen(SLEEPS)
    try:
        with pytest.raises(Hang, match="ends-0 has not ended"):
            peer.wait(0.0)
    finally:
        child.process.kill()
        child.process.wait()
