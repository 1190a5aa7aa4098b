"""Nothing is lost: a stop keeps the work, and a first hour holds.

    python -m benchmarks.nothing_lost --json -          # everything, 90 minutes on two cores
    python -m benchmarks.nothing_lost --only 1,2 --quick

1  processes that end at seeded moments: epochs lost, the loss curve afterwards
2  cost of writing checkpoints, and their size on the disk
5  faults that a first hour met, each with the test that shows it
6  size of the packages that are carried to a machine with a GPU

A crowd that joins is measured by ``benchmarks.crowd``, a frozen leader by ``benchmarks.frozen``,
quiet speed by ``benchmarks.codebase``, the parts that wait for a GPU by ``benchmarks.gpu``.
"""

import sys

from benchmarks.shared.parts import run_asked

PARTS = {
    "1": ("moments",),
    "2": ("disk",),
    "5": ("points",),
    "6": ("wheels",),
}
"""Number to modules of this package; each has ``rows(report, root)``."""


def main() -> int:
    return run_asked(__doc__, "benchmarks.nothing_lost", PARTS, quick=("1", "2"))


if __name__ == "__main__":
    sys.exit(main())
