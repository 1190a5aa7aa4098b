"""Joiners that come at one moment, and stages without peers, in the simulated swarm."""

from collections import Counter
from dataclasses import replace

import pytest

from node.sim.faults import lay
from node.sim.setup import Setup, toy_parts
from node.sim.swarm import SimSwarm
from tests.sim.outcomes import finished

THREE = Setup(stages=3, replicas=0, parts=toy_parts(3, 2), epochs=40)


def come(swarm: SimSwarm, count: int, open_to: str = "auto") -> None:
    """Let `count` peers come at random times within the next second."""
    for _ in range(count):
        swarm.world.push(swarm.world.rng.random(), swarm.add, None, open_to)


def until(swarm: SimSwarm, epoch: int, seconds: float) -> bool:
    """Let at most `seconds` pass; returns True if `epoch` epochs are committed by then."""
    end = swarm.world.now + seconds
    swarm.world.run(end, lambda: len(swarm.watch.commits) >= epoch)
    return len(swarm.watch.commits) >= epoch


def counts(swarm: SimSwarm) -> Counter[int]:
    return Counter(peer.stage for peer in swarm.live())


@pytest.mark.parametrize("spread_s", [0.1, 1.0])
@pytest.mark.parametrize("count", [3, 14])
def test_a_swarm_begins_with_those_who_come_in_one_second(count: int, spread_s: float) -> None:
    swarm = SimSwarm(replace(THREE, ends=1, spread_s=spread_s), 0)
    swarm.world.run(2.0)
    come(swarm, count)
    swarm.world.run(30.0)
    found = counts(swarm)
    assert found.total() == count + 1
    assert max(found.values()) - min(found[s] for s in range(4)) <= 1, found
    assert until(swarm, 2, 20.0)
    assert not swarm.watch.counts.get("moves"), "nobody has built what it has to leave"


def test_a_leader_fetches_a_peer_for_a_stage_that_nobody_took() -> None:
    swarm = SimSwarm(Setup(ends=1, replicas=0), 3)
    for _ in range(3):
        swarm.add(1)
    assert until(swarm, 1, 40.0)
    assert swarm.watch.counts["moves"] == swarm.watch.counts["move-asked"] == 1
    assert sorted(counts(swarm).values()) == [1, 1, 2]


def test_nobody_is_moved_while_a_peer_joins_the_lacking_stage() -> None:
    swarm = SimSwarm(Setup(ends=1, replicas=0), 3)
    for _ in range(2):
        swarm.add(1)
    swarm.world.run(8.0)
    swarm.add(None, "stage")
    assert until(swarm, 1, 40.0)
    assert "moves" not in swarm.watch.counts
    assert counts(swarm) == {0: 1, 1: 2, 2: 1}


def test_all_that_is_missing_is_mended_one_after_the_other() -> None:
    swarm = SimSwarm(replace(THREE, ends=0), 5)
    for _ in range(4):
        swarm.add(2)
    assert until(swarm, 1, 120.0)
    assert (counts(swarm), swarm.watch.counts["moves"]) == ({0: 1, 1: 1, 2: 1, 3: 1}, 3)


def test_a_crowd_in_a_swarm_that_trains_under_faults() -> None:
    setup = Setup(epochs=20)
    for seed in range(3):
        finished(setup, lay(("crowd", "random"), setup, seed))
