"""A pretrained model of 135 M parameters, and the data that people have.

    python -m benchmarks.real --json -
    python -m benchmarks.real --only 5

3  generate: tokens a second beside transformers, several texts, a stage that dies
4  serve: the client of the OpenAI API beside transformers, 32 clients at once
5  export: files equal to those given, logits, adapters, merged weights, GGUF

The model is SmolLM2-135M-Instruct (`benchmarks.lab.real`). Where it cannot be had, the rows say so
and do not hold.
"""

import argparse
import sys

from benchmarks.lab.parts import run_parts
from benchmarks.report import Report, chosen

PARTS = {
    "3": ("generated",),
    "4": ("served",),
    "5": ("exported",),
}
"""Number to modules of `benchmarks.actual`; each has ``rows(report, root)``."""


def main() -> int:
    """Run the parts; exit 0 when every target holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(PARTS), help="some of the numbers above")
    parser.add_argument("--json", metavar="FILE", help="write the object there; - for stdout")
    asked = parser.parse_args()
    report = Report()
    run_parts(report, "benchmarks.actual", PARTS, chosen(parser, asked.only, PARTS))
    return report.end(asked.json)


if __name__ == "__main__":
    sys.exit(main())
