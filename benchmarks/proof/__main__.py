"""The product beside bounds, peers and published figures: averaging, goodput, lost momentum, liars,
weights of cells, a day of volunteers, everything at once, plans of paths and the directory.

    python -m benchmarks.proof --json -
    python -m benchmarks.proof --only 10 --quick

2   floor: averaging beside the same bytes over gRPC and TLS with nothing done to them, beside
    hivemind without its matchmaking, and beside gloo (four minutes)
3   goodput while peers die: in virtual time (four minutes of one core), and of twelve daemons on
    slow lines (twelve minutes; --quick seven in all). Needs root for network namespaces
4   churn: loss of a tuned run with deaths, with copies of optimizer state and without
    (twelve minutes of one core, --quick one)
5   liars: peers that send false tensors in a pipeline, epochs until they are out, honest peers that
    are banned, cost and loss (ten minutes, --quick two)
6   helps: weights of cells by agreement, beside equal weights and held-out losses (three minutes
    of one core)
8   day: 1,000 volunteers for an hour, with a day of a published trace in it, and 10,000 for two
    minutes: processor time, tokens over the ideal, losses by cause (half an hour of one core,
    --quick one minute; --picture FILE draws where the compute went)
9   everything: SmolLM2 behind routers with all techniques, deaths, arrivals, a slow line, a damaged
    disk and a reader of texts, beside the same run in peace (root; an hour, --quick adapters alone)
10  plans: 1,000 peers in seconds of one core, twenty kinds of swarms beside a proven lower bound,
    six slots at the ends of a published setting (six minutes, --quick two)
11  directory: 500 nodes in one machine while a tenth of them leaves every minute, beside hivemind's
    DHT (four minutes, --quick one)
"""

import sys

from benchmarks.shared.parts import run_asked

PARTS = {
    "2": ("floor",),
    "3": ("virtual", "goodput"),
    "4": ("churn",),
    "5": ("liars",),
    "6": ("helps",),
    "8": ("day",),
    "9": ("everything",),
    "10": ("plans",),
    "11": ("directory",),
}
"""Number to modules of this package; each has ``rows(report, root)``."""


def main() -> int:
    quick = ("3", "4", "5", "8", "9", "10", "11")
    return run_asked(__doc__, "benchmarks.proof", PARTS, quick, drawn=("8",))


if __name__ == "__main__":
    sys.exit(main())
