"""Whole daemons with a leader that stands still: the others go on without it, and it finds its
place again."""

import random
from collections.abc import Iterator

import pytest

from testbed.daemons.fleet import Box
from testbed.daemons.forks import Forks
from testbed.swarms.frozen import SHAPES, FrozenSwarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]
COMMIT_S = 30.0
"""Bound in s of the wait for the next commit. An answer over a live connection may take as long;
nobody may wait that long for the frozen process."""


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory, forks: Forks) -> Iterator[FrozenSwarm]:
    made = FrozenSwarm(SHAPES[0], tmp_path_factory.mktemp("frozen"), forks)
    try:
        made.start()
        yield made
    finally:
        made.close()


@pytest.fixture
def box(swarm: FrozenSwarm) -> Box:
    """Box of the swarm; a failed test prints the output of its daemons."""
    return swarm.box


def test_the_cell_goes_on_each_time_that_its_leader_stands_still(
    swarm: FrozenSwarm, box: Box
) -> None:
    dice = random.Random(20)  # the leader freezes a few seconds after the next commit
    struck = [swarm.strike("leader", dice, COMMIT_S) for _ in range(3)]
    assert {s.who for s in struck} == {"ends-0", "ends-1"}, "who takes over is frozen next"
    assert not any(s.quiet for s in struck), "each one that woke says so"
    assert swarm.disturbances() == []
    assert swarm.again() == 0, "what was committed stays"
    assert not [p.label for p in swarm.peers if p.events("orphaned")]
