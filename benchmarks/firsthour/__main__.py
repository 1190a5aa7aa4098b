"""The first hour of a newcomer and an operator: deadlines, idle cost, caps, damage, errors,
strangers, kernels.

    python -m benchmarks.firsthour --json -          # everything
    python -m benchmarks.firsthour --only 4,6

Rows are named after their question: 1 a run of 0.5B parameters on two cores, 2 many daemons on two
cores, 3 caps and forecasts, 4 damaged files, 5 error texts and `tutti doctor`, 6 the time in which
commands answer, 7 strangers in an open run, 8 kernels.
"""

import argparse
import importlib
import sys

from benchmarks.report import Report, chosen
from testbed.daemons.fleet import Hang, folder

PARTS = {
    "1": "large",
    "2": "crowd",
    "3": "caps",
    "4": "damage",
    "5": "advice",
    "6": "answers",
    "7": "strangers",
    "8": "matrices",
}
"""Number to module of `benchmarks.firsthour`; each has ``rows(report, root)``."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS), help="which of the eight")
    parser.add_argument("--json", metavar="FILE", help="write the object there; - for stdout")
    asked = parser.parse_args()
    report = Report()
    parts = chosen(parser, asked.only, PARTS)
    for number, name in PARTS.items():
        if number in parts:
            with folder() as root:
                try:
                    importlib.import_module(f"benchmarks.firsthour.{name}").rows(report, root)
                except (Hang, RuntimeError, TimeoutError, ModuleNotFoundError) as e:
                    report.add(f"{number} did not come to its end: {e}"[:300], 0, "", holds=False)
    return report.end(asked.json)


if __name__ == "__main__":
    sys.exit(main())
