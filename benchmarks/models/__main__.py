"""Models that have a name: the parts of them that can be trained, and their equality here.

    python -m benchmarks.models --json -
    python -m benchmarks.models --only 1

Rows are named after their question: 1 directories of Hugging Face, from import to export, 2
adapters (LoRA) beside PEFT, 3 data larger than the disk, 4 memory, and recomputation in place of
storage, 5 a device that runs out of memory, 6 a large stage joined over slow lines, and its commit,
7 the guide, every command of it on three machines, 8 parameters in bf16.
"""

import sys

from benchmarks.shared.parts import run_asked

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
"""Number to modules of this package; each has ``rows(report, root)``."""


def main() -> int:
    return run_asked(__doc__, "benchmarks.models", PARTS)


if __name__ == "__main__":
    sys.exit(main())
