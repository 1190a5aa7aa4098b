"""8: a Muon step beside the public ones where the processor is limited to older instructions.
Without a limit ``benchmarks.kernels`` measures it."""

import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.report import ROOT, Report, cpuinfo

LIMITS = {"AVX2": "avx2", "AVX512_CORE": "avx512bw", "AVX512_CORE_BF16": "avx512_bf16"}
"""Limits of oneDNN's instruction sets, and the flag of a processor that has them. oneDNN multiplies
bf16; fp32 belongs to MKL, which is not limited."""
LIMITED_MINUTES = 10.0
SLACK_S = 600.0
"""Seconds by which a limited table may end too late: neither a step nor a compilation is cut
short."""


def rows(report: Report, root: Path) -> None:
    """A short table for each limit."""
    flags = {word for line in cpuinfo() if line.startswith("flags") for word in line.split()}
    for limit, flag in LIMITS.items():
        if flag in flags:
            limited(report, root, limit)


def limited(report: Report, root: Path, limit: str) -> None:
    """The rows of a process of its own, because oneDNN reads its limit once."""
    out = root / f"{limit}.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.kernels",
        "--quick",
        "--minutes",
        str(LIMITED_MINUTES),
        "--json",
        str(out),
    ]
    environ = {**os.environ, "ONEDNN_MAX_CPU_ISA": limit}
    ran = subprocess.run(
        command,
        cwd=ROOT,
        env=environ,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60 * LIMITED_MINUTES + SLACK_S,
    )
    if not out.is_file():
        said = (ran.stderr.strip().splitlines() or ["nothing"])[-1]
        report.add(
            f"8 under {limit}: no table, exit code {ran.returncode}", 0, "", said, holds=False
        )
        return
    for row in json.loads(out.read_text())["results"]:
        report.add(**{**row, "name": f"8 under {limit}, {row['name'].removeprefix('4 ')}"})
