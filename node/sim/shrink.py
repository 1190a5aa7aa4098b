"""Making a failing schedule small: fewer faults, then rounder times and shorter troubles, while the
same invariant breaks.

Delta debugging (Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", IEEE
TSE 2002): chunks of faults are left out, smaller and smaller ones, as long as what is left still
fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from node.sim.faults import Fault, Schedule
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
    wanted, best, left = outcome.violation.id, outcome, most

    def fails(schedule: Schedule) -> bool:
        nonlocal best, left
        if left <= 0:
            return False
        left -= 1
        tried = run(setup, schedule, make)
        if tried.violation is None or tried.violation.id != wanted:
            return False
        best = tried
        return True

    def drop() -> None:
        size = max(1, len(best.schedule.faults) // 2)
        while size:
            start = 0
            while start < len(best.schedule.faults):
                faults = best.schedule.faults
                if not fails(
                    replace(best.schedule, faults=faults[:start] + faults[start + size :])
                ):
                    start += size
            size //= 2

    drop()
    for i in range(len(best.schedule.faults)):
        for simpler in _simpler(best.schedule.faults[i]):
            faults = best.schedule.faults
            fails(
                replace(
                    best.schedule,
                    faults=tuple(
                        sorted((*faults[:i], simpler, *faults[i + 1 :]), key=lambda f: f.at)
                    ),
                )
            )
    drop()
    return best


def _simpler(fault: Fault) -> Iterator[Fault]:
    """The same fault with one thing plainer."""
    for digits in (0, 1):
        yield replace(fault, at=round(fault.at, digits))
    if fault.seconds:
        for seconds in (
            round(fault.seconds / 2, 1),
            float(round(fault.seconds)),
            round(fault.seconds, 1),
        ):
            yield replace(fault, seconds=seconds)
    if fault.who:
        for who in range(4):
            yield replace(fault, who=who)
