"""A run of one cell beside an earlier commit: the losses of its plain twin bit for bit, and tokens
a second of the demo, in turns. Needs the repository's history."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.report import ROOT, Report

BASE = "b65c514"
"""The last commit without cells that lead themselves."""
PAIRS = 5
EPOCHS = 60
LOSSES = 40
LEAST = 0.98
LONGEST_S = 420.0
TWIN = f"""
import json, sys, tempfile
from pathlib import Path
import torch
torch.set_num_threads(1)
from testbed.reference.swarm import Reference
from node.manifest import Manifest
with tempfile.TemporaryDirectory() as home:
    twin = Reference(Manifest.default_demo(), Path(home))
    print(json.dumps([epoch.loss.hex() for epoch in twin.train({LOSSES})]))
"""


def rows(report: Report, root: Path, base: str = BASE, pairs: int = PAIRS) -> None:
    """Two rows. Raises RuntimeError where ``base`` is not in the history, or a demo fails."""
    with _checkout(root / "base", base) as before:
        losses = [_said(where, [sys.executable, "-c", TWIN]) for where in (ROOT, before)]
        equal = sum(a == b for a, b in zip(*losses, strict=True))
        report.add(
            f"1 reference losses equal to those of {base}, bit for bit",
            equal,
            f"of {LOSSES} epochs",
            "the demo's run in one process, on this machine",
            str(LOSSES),
            holds=equal == LOSSES,
        )
        found: list[tuple[float, float]] = []
        for i in range(pairs):
            speeds = {where: _demo(where) for where in ((ROOT, before), (before, ROOT))[i % 2]}
            found.append((speeds[ROOT], speeds[before]))
    ratios = [now / then for now, then in found]
    report.add(
        f"1 tokens a second of the demo, over those of {base}",
        median(ratios),
        f"ratio, median of {pairs} interleaved pairs",
        "; ".join(f"{now:.0f} over {then:.0f}" for now, then in found),
        f"at least {LEAST}",
        holds=median(ratios) >= LEAST,
    )


@contextlib.contextmanager
def _checkout(where: Path, commit: str) -> Iterator[Path]:
    git = ["git", "-C", str(ROOT), "worktree"]
    made = subprocess.run(
        [*git, "add", "--detach", str(where), commit], capture_output=True, text=True, check=False
    )
    if made.returncode:
        raise RuntimeError(f"no checkout of {commit}: {made.stderr.strip()}")
    try:
        yield where
    finally:
        subprocess.run([*git, "remove", "--force", str(where)], check=False)


def _demo(where: Path) -> float:
    command = [sys.executable, "-m", "cli", "demo", "--json", "--epochs", str(EPOCHS)]
    return float(_said(where, command)["tokens_per_s"])


def _said(where: Path, command: list[str]) -> Any:
    """The JSON in the last line that a program of this checkout prints."""
    done = subprocess.run(
        command,
        cwd=where,
        env={**os.environ, "PYTHONPATH": str(where), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LONGEST_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:4])}: {done.stderr.strip()[-300:]}")
    return json.loads(done.stdout.splitlines()[-1])
