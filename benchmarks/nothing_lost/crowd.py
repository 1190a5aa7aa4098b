"""A crowd that joins one founder: the rows of `benchmarks.crowd`."""

from pathlib import Path

from benchmarks import crowd
from benchmarks.report import Report

QUICK_PEERS = 16


def rows(report: Report, root: Path, quick: bool) -> None:
    """Row 3; ``quick``: a smaller crowd."""
    peers = QUICK_PEERS if quick else crowd.PEERS
    crowd.tell(report, crowd.run(root, peers))
