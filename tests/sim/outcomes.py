"""Schedules that must hold: played until they end, with no invariant broken."""

from node.sim.faults import Schedule
from node.sim.run import ScheduleOutcome, run
from node.sim.setup import Setup
from node.sim.swarm import MachineFactory


def held(setup: Setup, schedule: Schedule, make: MachineFactory | None = None) -> ScheduleOutcome:
    outcome = run(setup, schedule, make)
    assert outcome.violation is None, (
        f"seed {schedule.seed}: {outcome.violation}\n{schedule.to_json()}"
    )
    return outcome


def finished(
    setup: Setup, schedule: Schedule, make: MachineFactory | None = None
) -> ScheduleOutcome:
    """The same, and the run came to its last epoch."""
    outcome = held(setup, schedule, make)
    assert outcome.finished
    return outcome
