"""How fast commands answer: processes of their own, from the shell's view, beside what Python alone
takes."""

import contextlib
import os
import pty
import re
import statistics
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Report
from node.core.errors import ExitCode
from testbed.daemons.fleet import REPOSITORY, START_S, Box

LIMIT_S = 0.2
TIMES = 15
ANSWERED = (ExitCode.OK, ExitCode.DEGRADED)
"""Exit codes of a command that has answered: ``status`` says by the second that the daemon
waits."""


def rows(report: Report, root: Path) -> None:
    """Medians of ``status``, ``peers`` and ``--help`` with a daemon that waits, and that what
    ``status`` says fits a screen."""
    box = Box(root)
    try:
        # It waits for the ends: beside a swarm that trains on every core no machine is a quiet one.
        peer = box.peer("founder", "start", str(_manifest(box)), "--role", "stage", "--stage", "1")
        peer.start()
        box.wait(
            "the daemon to host its stage", lambda: bool(peer.status().layers), START_S, (peer,)
        )
        load = os.getloadavg()[0]
        bare = statistics.median(_seconds([sys.executable, "-c", "pass"]) for _ in range(TIMES))
        for words in (("status",), ("peers",), ("--help",)):
            command = [sys.executable, "-m", "cli", "--home", str(peer.home), *words]
            times = sorted(_seconds(command) for _ in range(TIMES))
            said = f"python alone {bare:.3f} s, fastest {times[0]:.3f} s, load {load:.1f}"
            median = statistics.median(times)
            report.add(
                f"6 {' '.join(words)}, median of {TIMES}",
                median,
                "s",
                said,
                f"{LIMIT_S} s",
                holds=median <= LIMIT_S,
            )
        shown = _on_a_terminal([sys.executable, "-m", "cli", "--home", str(peer.home), "status"])
        wide = max((len(line) for line in shown), default=0)
        fits = 0 < len(shown) < 24 and wide <= 80
        report.add(
            "6 status, rows and columns", f"{len(shown)} x {wide}", "", "", "24 x 80", holds=fits
        )
    finally:
        box.clean_up()


def _on_a_terminal(command: Sequence[str]) -> list[str]:
    """The lines that a command writes to a terminal of 24 rows and 80 columns."""
    ours, its = pty.openpty()
    termios.tcsetwinsize(its, (24, 80))
    environment = {k: v for k, v in os.environ.items() if k not in ("LINES", "COLUMNS")} | {
        "NO_COLOR": "1",
        "TERM": "xterm",
    }
    process = subprocess.Popen(
        command, cwd=REPOSITORY, stdin=its, stdout=its, stderr=its, env=environment
    )
    os.close(its)
    said = bytearray()
    # Reading a terminal without a writer ends in an error.
    with contextlib.suppress(OSError):
        while piece := os.read(ours, 1 << 16):
            said += piece
    os.close(ours)
    process.wait()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", said.decode()).splitlines()


def _manifest(box: Box) -> Path:
    made = box.root / "swarm.toml"
    done = box.tutti(
        "swarm",
        "init",
        str(made),
        "--set",
        "training.epochs=100000",
        "--set",
        "training.min_replicas=1",
        home="founder",
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return made


def _seconds(command: list[str]) -> float:
    """The time of a command. Raises RuntimeError if it ends with an error: a refusal is soon
    there."""
    begin = time.perf_counter()
    done = subprocess.run(
        command,
        cwd=REPOSITORY,
        env={**os.environ, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    seconds = time.perf_counter() - begin
    if done.returncode not in ANSWERED:
        raise RuntimeError(f"{command[-1]} ended with {done.returncode}: {done.stderr[-300:]}")
    return seconds
