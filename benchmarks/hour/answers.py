"""How fast commands answer: processes of their own, from the shell's view, beside what Python alone takes."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.lab.fleet import REPOSITORY, Box
from benchmarks.report import Report

LIMIT_S = 0.2
TIMES = 15


def rows(report: Report, root: Path) -> None:
    """Medians of ``status``, ``peers`` and ``--help`` with a daemon that runs, and that what ``status`` says fits a screen."""
    box = Box(root)
    try:
        peer = box.peer("founder", "start", str(_manifest(box)))
        box.start(peer)
        load = os.getloadavg()[0]
        bare = statistics.median(_seconds(root, [sys.executable, "-c", "pass"]) for _ in range(TIMES))
        for words in (("status",), ("peers",), ("--help",)):
            command = [sys.executable, "-m", "cli", "--home", str(peer.home), *words]
            times = sorted(_seconds(root, command) for _ in range(TIMES))
            said = f"python alone {bare:.3f} s, fastest {times[0]:.3f} s, load {load:.1f}"
            median = statistics.median(times)
            report.add(f"6 {' '.join(words)}, median of {TIMES}", median, "s", said, f"{LIMIT_S} s", holds=median <= LIMIT_S)
        shown = box.tutti("status", home="founder", COLUMNS="80", LINES="24").stdout.splitlines()
        wide = max((len(line) for line in shown), default=0)
        fits = 0 < len(shown) < 24 and wide <= 80
        report.add("6 status, rows and columns", f"{len(shown)} x {wide}", "", "", "24 x 80", holds=fits)
    finally:
        box.clean_up()


def _manifest(box: Box) -> Path:
    made = box.root / "swarm.toml"
    done = box.tutti(
        "swarm", "init", str(made), "--set", "training.epochs=100000", "--set", "training.min_replicas=1", home="founder"
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return made


def _seconds(root: Path, command: list[str]) -> float:
    begin = time.perf_counter()
    subprocess.run(command, cwd=REPOSITORY, env={**os.environ, "NO_COLOR": "1"}, capture_output=True, timeout=60, check=False)
    return time.perf_counter() - begin
