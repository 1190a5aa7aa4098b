"""Making a failing schedule small: fewer faults, then rounder times and shorter troubles, while the
same invariant breaks.

Delta debugging (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", IEEE
TSE 2002): chunks of faults are left out, smaller and smaller ones, as long as what is left still
fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from node.sim.faults import Fault
from node.sim.run import ScheduleOutcome, run
from node.sim.setup import Setup
from node.sim.swarm import MachineFactory

MOST_RUNS = 300


def shrink(
    setup: Setup,
    outcome: ScheduleOutcome,
    make: MachineFactory | None = None,
    most: int = MOST_RUNS,
) -> ScheduleOutcome:
    """The smallest outcome found that violates the same invariant; ``outcome`` itself when it
    violates none.

    At most ``most`` schedules are tried.
    """
    if outcome.violation is None:
        return outcome
    wanted, best, candidates = outcome.violation.id, outcome, _smaller(outcome.schedule.faults)
    for _ in range(most):
        faults = next(candidates, None)
        if faults is None:
            break
        tried = run(setup, replace(best.schedule, faults=faults), make)
        if tried.violation is not None and tried.violation.id == wanted:
            best, candidates = tried, _smaller(faults)
    return best


def _smaller(faults: tuple[Fault, ...]) -> Iterator[tuple[Fault, ...]]:
    """Without many of them, then without each, then with one of them plainer."""
    size = max(1, len(faults) // 2)
    while size:
        for start in range(0, len(faults), size):
            yield faults[:start] + faults[start + size :]
        size //= 2
    for i, fault in enumerate(faults):
        for plainer in _plainer(fault):
            if plainer != fault:
                yield tuple(sorted((*faults[:i], plainer, *faults[i + 1 :]), key=lambda f: f.at))


def _plainer(fault: Fault) -> Iterator[Fault]:
    """The same fault with one thing plainer, or as it is."""
    for digits in (0, 1):
        yield replace(fault, at=round(fault.at, digits))
        yield replace(fault, seconds=round(fault.seconds, digits))
    yield replace(fault, seconds=round(fault.seconds / 2, 1))
    for who in range(min(4, fault.who)):
        yield replace(fault, who=who)
