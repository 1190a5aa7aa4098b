"""A device that never waits, fewer bytes between stages, boxes of several devices, tunnels, casts.

    python -m benchmarks.device --json -
    python -m benchmarks.device --only 1 --quick

1  links: tokens a second on slow lines, held-out loss, and cost of the codec, for int8 and int4
   beside bf16 (20 minutes, --quick 5; root)
2  the longest callback of a daemon's event loop
3  copies beside computations, with a double of a slow device
4  the optimizer's step over two ranks of a box
5  tunnels between peers behind routers, beside a direct pair (two minutes; root)
6  weights cast to bf16 once an epoch, beside autocast (a minute)
"""

import sys

from benchmarks.shared.parts import run_asked

PARTS = {
    "1": ("links",),
    "2": ("event_loop",),
    "3": ("overlap",),
    "4": ("ranks",),
    "5": ("tunnels",),
    "6": ("casts",),
}
"""Number to modules of this package; each has ``rows(report, root)``."""


def main() -> int:
    return run_asked(__doc__, "benchmarks.device", PARTS, quick=("1", "2", "3", "4", "6"))


if __name__ == "__main__":
    sys.exit(main())
