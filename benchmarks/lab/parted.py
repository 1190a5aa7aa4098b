"""The process that forks daemons (:mod:`benchmarks.lab.forks`), for daemons that go on without a
majority of their voters after seconds, not a minute. A test of a parted network need not wait
longer.
"""

import sys

from benchmarks.lab import forks
from node.epoch.leader import starting_point

MODULE = "benchmarks.lab.parted"
ALONE_S = 15.0

if __name__ == "__main__":
    starting_point.ALONE_S = ALONE_S
    sys.exit(forks.main())
