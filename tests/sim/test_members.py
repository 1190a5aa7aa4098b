"""Members that do not do their part, or lie about it, cost the others little."""

import pytest

from node.core.ids import PeerId
from node.sim.faults import Fault, Schedule, strike
from node.sim.setup import Setup
from tests.sim.outcomes import PlayedSwarm, finished

pytestmark = pytest.mark.usefixtures("silence")

QUIET_S, WATCHED_S = 20.0, 60.0
LONG = Setup(epochs=10_000, extra=1)
"""The first stage can spare a peer without becoming slower."""


def epochs_between(swarm: PlayedSwarm, start: float, end: float) -> int:
    return sum(start < c.at <= end for c in swarm.watch.commits)


@pytest.mark.parametrize(("kind", "who"), [("silent", 0), ("silent", 2), ("overstep", 1)])
def test_a_minute_with_one_such_member_has_nine_tenths_of_the_epochs(kind: str, who: int) -> None:
    swarm = PlayedSwarm(LONG, seed=who)
    swarm.world.run(QUIET_S)
    quiet = epochs_between(swarm, QUIET_S / 2, QUIET_S) / (QUIET_S / 2)
    strike(swarm, Fault(QUIET_S, kind, who, stage=1, seconds=10 * WATCHED_S))
    swarm.world.run(QUIET_S + WATCHED_S)
    watched = epochs_between(swarm, QUIET_S, QUIET_S + WATCHED_S) / WATCHED_S
    assert swarm.liars
    assert watched > 0.9 * quiet, f"{watched:.2f} of {quiet:.2f} epochs a second"
    assert swarm.watch.counts["epoch-abandoned"] == 0
    assert swarm.watch.counts["bans-of-honest"] == 0
    swarm.world.close()


@pytest.mark.parametrize("seed", range(4))
def test_a_frozen_member_is_neither_banned_nor_left_out_for_long(seed: int) -> None:
    """It is killed by nobody, and takes part again soon after it goes on."""
    swarm = PlayedSwarm(LONG, seed)
    swarm.world.run(8.0 + 0.17 * seed)
    victim = next(p for p in swarm.live(1) if p.leader is None)
    victim.loop.frozen = True
    swarm.watch.one_fault.fault("pause")
    swarm.world.run(swarm.world.now + 30.0)
    victim.loop.thaw()

    def takes_part() -> bool:
        plan = victim.member.plan
        chief = swarm.chief()
        newest = chief.leader.plan if chief is not None and chief.leader is not None else None
        me = newest.member(victim.name) if newest is not None else None
        return plan is not None and me is not None and me.current

    assert swarm.until(takes_part, 20.0)
    assert swarm.watch.counts["bans"] == 0
    swarm.world.close()


@pytest.mark.parametrize("seed", range(4))
def test_of_two_replicas_a_liar_costs_a_bounded_number_of_epochs(seed: int) -> None:
    setup = Setup(replicas=2, epochs=150)
    swarm = PlayedSwarm(setup, seed)
    swarm.world.run(8.0)
    victim = swarm.peers[PeerId(f"s01-00{seed % 2}")]
    swarm.liars.add(victim.name)
    swarm.watch.one_fault.fault("lie")
    victim.lie = "digest"
    assert swarm.until(lambda: bool(swarm.watch.ended), 600.0)
    assert swarm.watch.counts["epoch-abandoned"] <= 8
    assert swarm.watch.counts["digests-disputed"] == 0
    swarm.world.close()


def test_a_member_that_is_silent_for_a_while_takes_part_again() -> None:
    setup = Setup(epochs=60)
    outcome = finished(setup, Schedule(1, (Fault(8.0, "silent", 1, stage=2, seconds=8.0),)))
    assert outcome.counts["peer-left-out"] >= 1
    assert outcome.counts["bans"] == 0
