"""The first hour of a newcomer and an operator: deadlines, idle cost, caps, damage, errors,
strangers, kernels.

    python -m benchmarks.firsthour --json -          # everything
    python -m benchmarks.firsthour --only 4,6

Rows are named after their question: 1 a run of 0.5B parameters on two cores, 2 many daemons on two
cores, 3 caps and forecasts, 4 damaged files, 5 error texts and `tutti doctor`, 6 the time in which
commands answer, 7 strangers in an open run, 8 kernels under older instruction sets.
"""

import sys

from benchmarks.shared.parts import run_asked

PARTS = {
    "1": ("large",),
    "2": ("crowd",),
    "3": ("caps",),
    "4": ("damage",),
    "5": ("advice",),
    "6": ("answers",),
    "7": ("strangers",),
    "8": ("matrices",),
}
"""Number to modules of this package; each has ``rows(report, root)``."""


def main() -> int:
    return run_asked(__doc__, "benchmarks.firsthour", PARTS)


if __name__ == "__main__":
    sys.exit(main())
