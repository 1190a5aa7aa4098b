"""Schedules that must hold: played until they end, with no invariant broken."""

from collections.abc import Callable

from node.sim.faults import Schedule
from node.sim.process import SimPeer
from node.sim.run import ScheduleOutcome, run
from node.sim.setup import Setup
from node.sim.swarm import MachineFactory, SimSwarm


def held(setup: Setup, schedule: Schedule, make: MachineFactory | None = None) -> ScheduleOutcome:
    outcome = run(setup, schedule, make)
    assert outcome.violation is None, (
        f"seed {schedule.seed}: {outcome.violation}\n{schedule.to_json()}"
    )
    return outcome


def finished(
    setup: Setup, schedule: Schedule, make: MachineFactory | None = None
) -> ScheduleOutcome:
    """Play a schedule that must hold, to the last epoch of the run."""
    outcome = held(setup, schedule, make)
    assert outcome.finished
    return outcome


class PlayedSwarm(SimSwarm):
    """A simulated swarm whose time a test advances and whose peers it kills."""

    def until(self, what: Callable[[], bool], most_s: float) -> bool:
        """Let time pass until `what()` is true, at most `most_s` seconds; returns `what()`."""
        end = self.world.now + most_s
        while not what() and self.world.now < end:
            self.world.run(self.world.now + 1.0, None)
        return what()

    def loses(self, *peers: SimPeer) -> None:
        for peer in peers:
            self.watch.one_fault.fault("kill")
            peer.kill()
