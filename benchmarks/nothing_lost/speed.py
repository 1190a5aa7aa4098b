"""Quiet speed beside a commit before, and the time of all tests."""

import sys
from pathlib import Path
from statistics import quantiles

from benchmarks.codebase import tree as source
from benchmarks.codebase import unchanged
from benchmarks.report import ROOT, Report

BASE = "c0c37c05"
"""The last commit before stops kept their work."""
PAIRS = 5
LEAST = 0.98
TESTS_S = 18 * 60


def rows(report: Report, root: Path, quick: bool) -> None:
    """Row 7; ``quick``: without the tests."""
    beside(report, "7", BASE)
    if not quick:
        unchanged.all_tests(report, item="7", limit_s=TESTS_S)


def beside(report: Report, number: str, base: str) -> None:
    """Add the ratio of the demo's tokens per second to their number at the commit `base`, in
    interleaved pairs."""
    ratios: list[float] = []
    with source.at_commit(ROOT, base) as before:
        trees = Path(before.root), ROOT
        for tree in trees:
            unchanged.compiled(tree)
            unchanged.demo_rate(tree)
        for pair in range(PAIRS):
            order = trees if pair % 2 else trees[::-1]
            rates = {tree: unchanged.demo_rate(tree) for tree in order}
            ratios.append(rates[trees[1]] / rates[trees[0]])
            print(f"pair {pair + 1} of {PAIRS}: {ratios[-1]:.3f}", file=sys.stderr, flush=True)
    low, ratio, high = quantiles(ratios)
    report.add(
        f"{number} demo, tokens per second over the commit before",
        ratio,
        "x",
        f"{base}; {PAIRS} pairs, half of them {low:.3f} to {high:.3f}",
        f"at least {LEAST}",
        holds=ratio >= LEAST,
    )
