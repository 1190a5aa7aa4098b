"""The partitioned matrix optimizer, all figures in one run: planner, kernels, cells, exactness,
memory.

    python -m benchmarks.optimizer [--json -] [--only 1,2,3] [--svg FILE.svg | --png FILE.png]

  1  the published ratios, reproduced             (benchmarks.partition)
  2  makespan over ideal beside simpler planners  (benchmarks.partition)
  3  a peer leaves or joins                       (benchmarks.partition)
  4  one step beside the public Muons             (benchmarks.kernels)
  5  a round in a cell, beside replicated and round-robin ownership (benchmarks.exchange); over
     local devices (benchmarks.local)
  6  partitioned and single-process steps compared (benchmarks.exactness)
  7  optimizer state per peer                     (benchmarks.exactness)
  8  owners by operations and by measured seconds (benchmarks.measured)

1, 2, 3, 6 and 7 read no clock. Items 4 and 5 want a quiet machine; 8 reads processor time.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks import exactness, exchange, kernels, local, measured, partition
from benchmarks.report import Report, chosen
from node.telemetry import pictures

ITEMS: dict[str, tuple[Callable[[Report], object], ...]] = {
    "1": (partition.parity,),
    "2": (partition.better,),
    "3": (partition.churn,),
    "4": (kernels.speed,),
    "5": (exchange.distributed, local.local),
    "6": (exactness.exactness,),
    "7": (exactness.memory,),
    "8": (measured.measured,),
}


def main() -> int:
    """Print all; exit 0 when every target holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default=",".join(ITEMS), metavar="ITEMS", help="numbers, separated by commas"
    )
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - for stdout")
    parser.add_argument(
        "--svg",
        "--png",
        dest="picture",
        metavar="FILE",
        type=Path,
        help="the picture of item 5's sweep of C_max",
    )
    args = parser.parse_args()
    if args.picture is not None:
        pictures.check(args.picture)
    report = Report()
    for item in chosen(parser, args.only, ITEMS):
        for measure in ITEMS[item]:
            if measure is exchange.distributed:
                exchange.distributed(report, picture=args.picture)
            else:
                measure(report)
    return report.end(args.json)


if __name__ == "__main__":
    sys.exit(main())
