"""From the first command of an installation to the first committed epoch of the demo."""

import contextlib
import json
import signal
import subprocess
import time
from pathlib import Path

from benchmarks.installed.setting import ITEM, Installed, clean, folder, installed, ran, release
from benchmarks.report import ROOT, Report
from testbed.daemons.books import COMMITTED

TARGET_S = 180.0
"""Longest time from the start of the installation to the first committed epoch, in seconds."""
DEMO_S = 300.0
"""Bound of the demo."""
END_S = 120.0
"""Bound of the demo's end."""
MODULES = """
import json, sys
import cli, node.app.daemon, node.app.demo, node.web.app, node.serve.app, node.tui, node.tools
files = [getattr(m, "__file__", None) for m in list(sys.modules.values())]
print(json.dumps(sorted({f for f in files if f})))
"""
"""Program that loads what the command line and a daemon need, and prints the files of it."""


def rows(report: Report, root: Path) -> None:
    """Rows of files, seconds, origin of modules, and the demo."""
    made = sorted(f.name for f in release().iterdir())
    report.add(f"{ITEM} wheel: files of the release", len(made), "files", ", ".join(made))
    there = installed()
    _packages(report, there)
    _origin(report, there, root)
    version = ran([there.program, "--version"], root)
    said = version.out.partition("\n")[0]
    report.add(
        f"{ITEM} wheel: tutti --version", version.code, "exit code", said, "0", not version.code
    )
    _demo(report, there)


def _packages(report: Report, there: Installed) -> None:
    listed = json.loads(
        ran([there.python, "-m", "pip", "list", "--format", "json"], folder()).good().out
    )
    names = {one["name"].lower(): one["version"] for one in listed}
    size = ran(["du", "-sm", there.environment], folder()).good().out.split()[0]
    said = f"torch {names['torch']}, fastecdsa {names['fastecdsa']}, {size} MB on the disk"
    report.add(f"{ITEM} wheel: packages installed", len(names), "packages", said)
    report.add(
        f"{ITEM} wheel: pip installs torch", round(there.torch_s, 1), "s", f"from {there.origin}"
    )
    report.add(
        f"{ITEM} wheel: pip installs the wheel and the rest",
        round(there.wheel_s, 1),
        "s",
        "with download",
    )


def _origin(report: Report, there: Installed, root: Path) -> None:
    """Where the modules come from that the command line and a daemon load."""
    found = json.loads(ran([there.python, "-c", MODULES], root).good().out)
    strange = [file for file in found if Path(file).is_relative_to(ROOT)]
    ours = [file for file in found if Path(file).is_relative_to(there.environment)]
    report.add(
        f"{ITEM} wheel: modules from the repository",
        len(strange),
        "modules",
        f"{len(ours)} of {len(found)} from the environment {' '.join(strange[:3])}".strip(),
        "0",
        not strange and len(ours) > 100,
    )


def _demo(report: Report, there: Installed) -> None:
    """Run the demo to its first committed epoch, and end it as a person would."""
    where = folder() / "person"
    where.mkdir()
    environment = clean() | {"HOME": str(where), "TMPDIR": str(where)}
    began = time.monotonic()
    with (where / "said").open("w") as said:
        demo = subprocess.Popen(
            [there.program, "demo"], cwd=where, env=environment, stdout=said, stderr=said
        )
    try:
        committed = _first_commit(demo, where, began)
    finally:
        demo.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            demo.wait(END_S)
        demo.kill()
    install = there.made_s + there.torch_s + there.wheel_s
    total = install + committed
    report.add(
        f"{ITEM} wheel: first epoch of the demo after install",
        round(total, 1),
        "s",
        f"environment {there.made_s:.1f}, torch {there.torch_s:.1f}, wheel {there.wheel_s:.1f}, "
        f"demo {committed:.1f} s",
        f"<= {TARGET_S:g}",
        total <= TARGET_S,
    )
    report.add(
        f"{ITEM} wheel: exit code of the demo after Ctrl-C",
        demo.returncode,
        "",
        "",
        "130",
        demo.returncode == 130,
    )


def _first_commit(demo: subprocess.Popen[bytes], where: Path, began: float) -> float:
    """Seconds until a daemon of the demo writes that an epoch is committed. Raises RuntimeError if
    the demo ends before, or after DEMO_S."""
    mark = f'"{COMMITTED}"'.encode()
    while time.monotonic() - began < DEMO_S:
        if demo.poll() is not None:
            break
        for file in where.glob("tutti-demo-*/ends-0/**/events*.jsonl"):
            with contextlib.suppress(OSError):
                if mark in file.read_bytes():
                    return time.monotonic() - began
        time.sleep(0.2)
    text = (where / "said").read_text()[-600:]
    raise RuntimeError(f"the demo committed no epoch in {time.monotonic() - began:.0f} s: {text}")
