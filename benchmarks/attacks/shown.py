"""Rows that need no live swarm: attacks that tests show, the table of limits, malformed messages,
quiet speed."""

import importlib
import importlib.util
from pathlib import Path

from benchmarks.kept import speed
from benchmarks.kept.points import Point, add
from benchmarks.report import Report

BASE = "02c3e92c"
"""The last commit before strangers were bounded."""
FUZZ_S, FUZZ_QUICK_S, SEED = 600.0, 30.0, 41
FUZZING = "benchmarks.fuzzing"

POINTS: dict[str, tuple[Point, ...]] = {}
"""By number: attacks that a direct check shows better than a minute of a live swarm."""
TABLE = (
    Point(
        "every RPC and every training message has a row",
        "bounds in many places, or none",
        "one table, compared with protos/ and docs/protocol.md",
        (
            "transport/test_limits:test_every_rpc_and_every_training_message_has_a_row",
            "transport/test_limits:test_the_documentation_shows_the_same_table",
        ),
    ),
)


def points(report: Report, root: Path, number: str) -> None:
    """The rows of one number."""
    add(report, root, number, POINTS[number])


def table(report: Report, root: Path, quick: bool) -> None:
    """Rows of the table of limits."""
    del quick
    add(report, root, "table", TABLE)


def fuzz(report: Report, root: Path, quick: bool) -> None:
    """Rows of the fuzzer."""
    del root
    if importlib.util.find_spec(FUZZING) is None:
        report.add("fuzz every parser", 0, "messages", "there is no fuzzer", "", holds=False)
        return
    found = importlib.import_module(FUZZING).run(FUZZ_QUICK_S if quick else FUZZ_S, SEED)
    report.add(
        "fuzz every parser",
        len(found.failures),
        "failures",
        f"{found.examples} messages",
        "0",
        holds=not found.failures,
    )


def quiet_speed(report: Report, root: Path, quick: bool) -> None:
    """The demo's speed beside the commit before."""
    del root, quick
    speed.beside(report, "speed", BASE)
