"""The process that forks daemons (:mod:`testbed.daemons.forks`), for daemons that go on without a
majority of their voters after seconds, not a minute. A test of a parted network need not wait
longer.
"""

import sys

from node.epoch.leader import voting
from testbed.daemons import forks

MODULE = "testbed.daemons.parted"
ALONE_S = 15.0

if __name__ == "__main__":
    voting.ALONE_S = ALONE_S
    sys.exit(forks.main())
