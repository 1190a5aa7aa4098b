"""The unit that the installed command writes, as systemd's own tools see it."""

import re
import shutil
from pathlib import Path

from benchmarks.installed.setting import ITEM, installed, ran
from benchmarks.report import Report

EXPOSURE = 3.0
"""Highest overall exposure that `systemd-analyze security` may find; 0 is none, 10 all."""
UNKNOWN_BEFORE_254 = ("RestartSteps", "RestartMaxDelaySec")


def rows(report: Report, root: Path) -> None:
    """Rows of `verify` and of `security`."""
    analyze = shutil.which("systemd-analyze")
    if analyze is None:
        name = f"{ITEM} service: systemd-analyze verify"
        report.unmeasured(name, "0", "no systemd-analyze here")
        return
    home = root / "home"
    home.mkdir()
    words = [installed().program, "--home", home, "service", "install", "--print"]
    unit = root / "tutti-wheel.service"
    unit.write_text(ran(words, root).good().out)
    runtime = root / "run"
    runtime.mkdir(mode=0o700)
    done = ran([analyze, "--user", "verify", unit], root, {"XDG_RUNTIME_DIR": str(runtime)})
    said = [s for s in done.err.splitlines() if not any(u in s for u in UNKNOWN_BEFORE_254)]
    report.add(
        f"{ITEM} service: systemd-analyze verify",
        len(said),
        "complaints",
        " ".join(said)[:200],
        "0",
        not said and not done.code,
    )
    done = ran([analyze, "security", "--offline=true", "--no-pager", unit], root)
    found = re.findall(r"Overall exposure level .*: ([0-9.]+)", done.out)
    exposure = float(found[0]) if found else 10.0
    report.add(
        f"{ITEM} service: systemd-analyze security",
        exposure,
        "of 10",
        "",
        f"<= {EXPOSURE:g}",
        exposure <= EXPOSURE,
    )
