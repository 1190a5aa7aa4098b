"""Fuzzes every parser of foreign bytes (``testbed/fuzzing/parsers.py``): mutated valid messages,
and random bytes.

A parser returns or raises one of its typed errors. Beside :data:`BASE_BYTES` it allocates no more
for each byte that it was given, and makes no more calls, than :class:`Parser` says. The growth of
the process over the messages of protobuf bounds the memory that Python does not see.

    python -m benchmarks.fuzzing --seconds 600
"""

import sys

from benchmarks.report import Report, chosen, command_line
from testbed.fuzzing.fuzzer import (
    run,
)
from testbed.fuzzing.parsers import PARSERS

MOST_GROWTH = 256 << 20
"""Bytes by which the process may grow over a run. The largest plan of empty lists takes a quarter
of these by itself; tracemalloc keeps another quarter, and mutated messages have up to 8 MiB."""


def main() -> int:
    """Run, and report in the way of all benchmarks."""
    parser = command_line(__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default=",".join(PARSERS), help="parsers, separated by commas")
    given = parser.parse_args()
    report = Report()
    found = run(given.seconds, given.seed, chosen(parser, given.only, PARSERS))
    for failure in found.failures:
        print(failure, file=sys.stderr)
    report.add("examples", found.examples, "", f"seed {given.seed}")
    report.add("refused", found.refused, "")
    report.add("parsed", found.nbytes / 1e6, "MB")
    report.add(
        "parsers that broke their promise",
        len({f.parser for f in found.failures}),
        "",
        f"of {len(PARSERS)}",
        "0",
        holds=not found.failures,
    )
    growth = found.growth / (1 << 20)
    report.add(
        "growth of the process over the messages of protobuf",
        growth,
        "MiB",
        target=f"at most {MOST_GROWTH >> 20}",
        holds=found.growth <= MOST_GROWTH,
    )
    return report.end(given.json)


if __name__ == "__main__":
    sys.exit(main())
