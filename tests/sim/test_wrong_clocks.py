"""A clock that is an hour off for five minutes: the others train on, and the peer takes part again
once its clock is right."""

from dataclasses import replace

import pytest

from node.sim.setup import WorkTimes
from tests.sim.struck import FOUR, StruckSwarm

pytestmark = pytest.mark.usefixtures("silence")

HOUR_S = 3600.0
LASTS_S = 300.0
SLOW = replace(FOUR, work=WorkTimes(ends_s=0.3, forward_s=1.0, step_s=0.3))
"""Epochs of several seconds."""
SOON_S = 45.0
"""Bound of the time until the cell commits under another leader. Records expire first."""


@pytest.mark.parametrize(
    ("leads", "off_s"), [(False, HOUR_S), (True, -HOUR_S)], ids=["member ahead", "leader behind"]
)
def test_an_hour_off_for_five_minutes(leads: bool, off_s: float) -> None:
    swarm = StruckSwarm(SLOW, seed=5)
    victim = swarm.victim(leads=leads)
    swarm.watch.one_fault.fault("skew")
    victim.machine_clock.skew += off_s
    before = len(swarm.watch.commits)
    took = swarm.goes_on(victim)
    swarm.world.run(swarm.world.now + LASTS_S - took, None)
    made = len(swarm.watch.commits) - before
    assert took <= SOON_S
    assert made >= 20
    assert not swarm.watch.counts["bans"], "nobody is blamed"
    swarm.watch.one_fault.fault("over")
    victim.machine_clock.skew -= off_s
    swarm.comes_back(victim)
