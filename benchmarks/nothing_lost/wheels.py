"""Size of the packages that are carried to a machine with a GPU and without a package index."""

from pathlib import Path

from benchmarks.gpu.wheels import MOST, PYTHON, fetch
from benchmarks.report import Report
from node.core.errors import LocalFault


def rows(report: Report, root: Path) -> None:
    """Row 6: fetch the packages from the package index, and add up their sizes."""
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
