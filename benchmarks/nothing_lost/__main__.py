"""Nothing is lost: a stop keeps the work, a crowd gets in, a first hour holds.

    python -m benchmarks.nothing_lost --json -          # everything, two hours on two cores
    python -m benchmarks.nothing_lost --only 1,2 --quick

1  processes that end at seeded moments: epochs lost, the loss curve afterwards
2  cost of writing checkpoints, and their size on the disk
3  a crowd that joins one founder
4  a frozen leader
5  faults that a first hour met, each with the test that shows it
6  the parts that wait for a GPU, rehearsed
7  quiet speed beside an earlier commit
"""

import argparse
import importlib
import sys

from benchmarks.report import Report, chosen
from testbed.daemons.fleet import Hang, folder

PARTS = {
    "1": "moments",
    "2": "disk",
    "3": "crowd",
    "4": "frozen",
    "5": "points",
    "6": "rehearsal",
    "7": "speed",
}
"""Number to module of `benchmarks.nothing_lost`; each has ``rows(report, root, quick)``."""


def main() -> int:
    """Run the parts; exit 0 when every target holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS), help="which of the seven")
    parser.add_argument("--quick", action="store_true", help="fewer moments, smaller models")
    parser.add_argument("--json", metavar="FILE", help="write the object there; - for stdout")
    asked = parser.parse_args()
    report = Report()
    parts = chosen(parser, asked.only, PARTS)
    for number, name in PARTS.items():
        if number not in parts:
            continue
        with folder() as root:
            try:
                module = importlib.import_module(f"benchmarks.nothing_lost.{name}")
                module.rows(report, root, asked.quick)
            except (Hang, RuntimeError, TimeoutError, ModuleNotFoundError) as e:
                report.add(f"{number} did not come to its end: {e}"[:300], 0, "", holds=False)
    return report.end(asked.json)


if __name__ == "__main__":
    sys.exit(main())
