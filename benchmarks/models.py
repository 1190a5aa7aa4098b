"""Models that have a name: what of them can be trained, and whether it is the same model here.

    python -m benchmarks.models --json -
    python -m benchmarks.models --only 1

Rows are named after what was asked for: 1 directories of Hugging Face, from import to export,
2 adapters (LoRA) beside PEFT, 3 data larger than the disk, 4 memory, and what is computed again
instead of kept, 5 a device that runs out of memory, 6 a large stage joined over slow lines, and its
commit, 7 the guide, every command of it on three machines, 8 parameters in bf16.
"""

import argparse
import sys

from benchmarks.lab.parts import run_parts
from benchmarks.report import Report, chosen

PARTS = {
    "1": ("shapes", "directories"),
    "2": ("adapters",),
    "3": ("streamed",),
    "4": ("memory", "daemon_memory"),
    "5": ("short",),
    "6": ("joined", "committed"),
    "7": ("guide",),
    "8": ("halves",),
}
"""Number to modules of `benchmarks.given`; each has ``rows(report, root)``."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS), help="some of the numbers above")
    parser.add_argument("--json", metavar="FILE", help="write the object there; - for stdout")
    asked = parser.parse_args()
    report = Report()
    run_parts(report, "benchmarks.given", PARTS, chosen(parser, asked.only, PARTS))
    return report.end(asked.json)


if __name__ == "__main__":
    sys.exit(main())
