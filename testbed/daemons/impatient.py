"""The command line of ``tutti`` that gives up on silent addresses after seconds, not a minute.
A test of its last message need not wait longer.

    python -m testbed.daemons.impatient ARGUMENT...
"""

import sys

import cli
from node.control import retries

MODULE = "testbed.daemons.impatient"
SILENT_S = 5.0

if __name__ == "__main__":
    retries.SILENT_S = SILENT_S
    sys.exit(cli.main())
