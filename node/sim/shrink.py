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
    wanted, best, faults = outcome.violation.id, outcome, outcome.schedule.faults
    candidates = _smaller(faults, max(1, len(faults) // 2), 0)
    for _ in range(most):
        faults, size, start = next(candidates, (None, 0, 0))
        if faults is None:
            break
        tried = run(setup, replace(best.schedule, faults=faults), make)
        if tried.violation is not None and tried.violation.id == wanted:
            best, candidates = tried, _smaller(faults, size, start)
    return best


def _smaller(
    faults: tuple[Fault, ...], size: int, begin: int
) -> Iterator[tuple[tuple[Fault, ...], int, int]]:
    """Without ``size`` of them from ``begin`` on, then without fewer, then with one of them
    plainer; and where to go on from there."""
    while size:
        for start in range(begin, len(faults), size):
            yield faults[:start] + faults[start + size :], size, start
        size, begin = size // 2, 0
    for i, fault in enumerate(faults):
        for plainer in _plainer(fault):
            if plainer != fault:
                changed = (*faults[:i], plainer, *faults[i + 1 :])
                yield tuple(sorted(changed, key=lambda f: f.at)), 1, 0


def _plainer(fault: Fault) -> Iterator[Fault]:
    """The same fault with one thing plainer, or as it is."""
    for digits in (0, 1):
        yield replace(fault, at=round(fault.at, digits))
        yield replace(fault, seconds=round(fault.seconds, digits))
    yield replace(fault, seconds=round(fault.seconds / 2, 1))
    for who in range(min(4, fault.who)):
        yield replace(fault, who=who)
