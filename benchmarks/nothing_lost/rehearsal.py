"""The benchmark of a GPU: all of its parts on a CPU, the wheels to carry, and on a GPU if one is
here."""

import json
import subprocess
import sys
from pathlib import Path

import torch

from benchmarks.gpu.wheels import MOST, PYTHON, fetch
from benchmarks.report import ROOT, Report
from node.core.errors import LocalFault

PARTS_S = 660.0
"""Limit of one run of `benchmarks.gpu`, which ends its parts earlier by itself."""


def rows(report: Report, root: Path, quick: bool) -> None:
    """Rows 6; ``quick``: without the wheels, which are fetched from the package index."""
    _gpu(report, "--rehearse")
    if torch.cuda.is_available():
        _gpu(report)
    if not quick:
        _wheels(report, root)


def _gpu(report: Report, *flags: str) -> None:
    """Add the rows of one run. They have the number already, and a letter for their part."""
    command = [sys.executable, "-m", "benchmarks.gpu", *flags, "--json", "-"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PARTS_S)
    if not done.stdout.strip():
        raise RuntimeError(f"{' '.join(command[1:])} ended with {done.returncode}: {done.stderr}")
    for row in json.loads(done.stdout.splitlines()[-1])["results"]:
        report.add(**row)


def _wheels(report: Report, root: Path) -> None:
    """Fetch the packages that are carried to a machine without an index, and add up their sizes."""
    name = "6 wheels to carry"
    target = f"at most {MOST / 2**20:.0f}"
    try:
        wheels = fetch(root / "wheels", PYTHON)
    except LocalFault as fault:
        report.add(name, 0.0, "MiB", str(fault)[:300], target, holds=False)
        return
    total = sum(wheel.stat().st_size for wheel in wheels)
    listed = ", ".join(sorted("-".join(w.name.split("-")[:2]) for w in wheels))
    report.add(name, total / 2**20, "MiB", f"{len(wheels)}: {listed}", target, holds=total <= MOST)
