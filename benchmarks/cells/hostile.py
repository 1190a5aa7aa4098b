"""Cost of peers that mean harm: eight live daemons of an open run, and as many strangers as there
are stages, one of them with a key ground below all others."""

from pathlib import Path

from benchmarks.firsthour import strangers
from benchmarks.report import Report


def rows(report: Report, root: Path) -> None:
    """Four rows for each attack of :data:`benchmarks.firsthour.strangers.KINDS`."""
    strangers.rows(report, root, "6")
