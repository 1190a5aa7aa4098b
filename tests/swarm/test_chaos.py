"""Real faults between real hosts: eight daemons in network namespaces, a kill, a pause and a parted
network.

One swarm, one fault after the other, each from full strength. The assertions must hold however busy
the machine is.
"""

import time
from collections.abc import Iterator

import pytest

from testbed.daemons import parted
from testbed.daemons.fleet import Box
from testbed.daemons.forks import Forks
from testbed.networks.wan import why_not
from testbed.swarms.arena import Arena, arena
from testbed.swarms.scenarios import NODES, SCENARIOS, SHAPE, Scenario

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]
BY_NAME = {s.name: s for s in SCENARIOS}


@pytest.fixture(scope="module")
def swarm() -> Iterator[Arena]:
    if reason := why_not():
        pytest.skip(reason)
    with pytest.MonkeyPatch.context() as patch:
        # Peers that do not answer are looked for every four seconds, not every thirty.
        patch.setenv("TUTTI_DIRECTORY_REJOIN_MAX_S", "4")
        with arena(NODES, forks=Forks(parted.MODULE), **SHAPE) as made:
            yield made


@pytest.fixture
def box(swarm) -> Box:
    """Box of the swarm; a failed test prints the output of its daemons."""
    return swarm.box


@pytest.mark.parametrize(
    "scenario", [BY_NAME["kill-leader"], BY_NAME["partition"]], ids=lambda s: s.name
)
def test_the_swarm_comes_through(swarm: Arena, box: Box, scenario: Scenario) -> None:
    swarm.heal()
    before = swarm.books().losses()
    strike = scenario.do(swarm)
    strike.hold()
    strike.undo()
    keys = {swarm.key(label) for label in strike.victims}
    notice = swarm.wait(
        "anybody to notice",
        lambda: swarm.books().first_notice(strike.at, strike.victims, keys),
        60.0,
    )
    swarm.wait(
        "a commit after it", lambda: swarm.books().next_commit(notice.at, strike.apart), 60.0
    )
    swarm.heal()
    swarm.epochs(2, 60.0)
    assert swarm.box.agree()

    books = swarm.books()
    lost = books.losses().since(before)
    assert books.accounted(strike.at, swarm.sequence) == (0.0, 0.0), (
        "every sample is counted once or handed back"
    )
    assert books.counted_twice(strike.at, swarm.sequence) == 0.0
    assert not [e for e in books.events if e.kind == "digest-mismatch" and e.at >= strike.at]
    if scenario.again is not None:
        assert lost.again <= scenario.again, "what was committed stays"
    else:
        sides = {
            e.who
            for e in books.events
            if e.kind == "epoch-committed" and strike.at <= e.at <= time.time()
        }
        assert len(sides) == 2, "each half went on by itself"
        assert lost.again > 0, "and one of the two histories was given up"
