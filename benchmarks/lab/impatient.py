"""The command line of ``tutti``, with less patience for addresses at which nobody gives a sign of
life: a test of what is said at the end need not wait a minute for it.

    python -m benchmarks.lab.impatient ARGUMENT...
"""

import sys

import cli
from node.control import retries

MODULE = "benchmarks.lab.impatient"
SILENT_S = 5.0

if __name__ == "__main__":
    retries.SILENT_S = SILENT_S
    sys.exit(cli.main())
