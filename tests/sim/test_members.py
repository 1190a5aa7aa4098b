"""Members that do not do their part, or lie about it, cost the others a few seconds."""

import pytest

from node.core.ids import PeerId
from node.sim.faults import Fault, strike
from node.sim.setup import Setup
from tests.sim.outcomes import PlayedSwarm

pytestmark = pytest.mark.usefixtures("silence")

QUIET_S = 6.0
WATCHED_S = 14.0
COST_S = 6.0
LONG = Setup(epochs=10_000, extra=1, round_timeout_s=30.0)
"""The first stage can spare a peer without becoming slower."""


def epochs_between(swarm: PlayedSwarm, start: float, end: float) -> int:
    return sum(start < c.at <= end for c in swarm.watch.commits)


@pytest.mark.parametrize("kind", ["silent", "overstep"])
def test_such_a_member_costs_a_few_seconds_and_is_on_probation(kind: str) -> None:
    swarm = PlayedSwarm(LONG, seed=1)
    swarm.world.run(QUIET_S)
    quiet = epochs_between(swarm, QUIET_S / 2, QUIET_S) / (QUIET_S / 2)
    strike(swarm, Fault(QUIET_S, kind, 1, stage=1, seconds=10 * WATCHED_S))
    swarm.world.run(QUIET_S + WATCHED_S)
    watched = epochs_between(swarm, QUIET_S, QUIET_S + WATCHED_S)
    assert swarm.liars
    assert WATCHED_S - watched / quiet < COST_S, f"{watched} epochs, {quiet:.2f} a second before"
    assert swarm.watch.counts["peer-on-probation"] == 1
    assert swarm.watch.counts["epoch-abandoned"] == 0
    assert swarm.watch.counts["bans-of-honest"] == 0
    swarm.world.close()


@pytest.mark.parametrize("liar", ["s01-000", "s01-001"])
def test_of_two_replicas_a_liar_costs_two_epochs(liar: str) -> None:
    swarm = PlayedSwarm(Setup(replicas=2, epochs=10_000), seed=1)
    swarm.world.run(QUIET_S)
    victim = swarm.peers[PeerId(liar)]
    swarm.liars.add(victim.name)
    swarm.watch.one_fault.fault("lie")
    victim.lie = "digest"
    swarm.world.run(QUIET_S + WATCHED_S)
    assert swarm.watch.counts["epoch-abandoned"] == 2
    assert swarm.watch.counts["peer-on-probation"] == 1
    assert swarm.watch.counts["digests-disputed"] == 0
    swarm.world.close()
