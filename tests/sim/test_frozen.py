"""A leader, or a member, that stands still, dies or is cut off at any moment costs its cell at most
ten seconds, and finds its place again."""

import pytest

from node.coordinator.messenger import BROKEN_S, Unheard
from protos import training_pb2 as pb
from tests.sim.struck import DEEDS, SHAPES, StruckSwarm

pytestmark = pytest.mark.usefixtures("silence")

BOUND_S = 10.0
"""Bound in s of the time between the fault and the cell's next commit."""


def within(name: str, deed: str, *, leads: bool, seed: int, moments: int) -> None:
    """Strike a swarm `moments` times; asserts that each figure is within the bound."""
    swarm = StruckSwarm(SHAPES[name], seed)
    for moment in range(moments):
        took = DEEDS[deed](swarm, leads=leads)
        assert took <= BOUND_S, f"moment {moment} of seed {seed}: {took:.1f} s"
    assert not swarm.watch.counts["bans"], "nobody is blamed"
    assert not swarm.watch.counts["digests-disputed"]
    if deed == "frozen" and leads:
        assert swarm.watch.counts["stood-still"] == moments, "each one that woke says so"


@pytest.mark.parametrize("seed", range(2))
def test_a_frozen_leader_of_four(seed: int) -> None:
    within("four", "frozen", leads=True, seed=seed, moments=6)


@pytest.mark.parametrize("name", ["seven", "two cells"])
def test_a_cell_commits_while_its_leader_is_frozen(name: str) -> None:
    within(name, "frozen", leads=True, seed=0, moments=4)


@pytest.mark.parametrize("name", SHAPES)
def test_a_cell_commits_while_a_member_is_frozen(name: str) -> None:
    within(name, "frozen", leads=False, seed=7, moments=4)


@pytest.mark.parametrize("leads", [True, False], ids=["leader", "member"])
@pytest.mark.parametrize("deed", ["killed", "cut off"])
def test_a_peer_that_is_gone(deed: str, leads: bool) -> None:
    within("four", deed, leads=leads, seed=11, moments=4)


def test_a_leader_that_only_the_next_one_reaches() -> None:
    within("four", "half cut", leads=True, seed=13, moments=5)


def test_a_connection_that_broke_long_ago_shortens_no_wait() -> None:
    swarm = StruckSwarm(SHAPES["four"], 0)
    frozen, *others = (p for p in swarm.live() if p not in swarm.leaders())
    asks = others[0]
    took = []
    frozen.loop.frozen = True

    async def ask() -> None:
        began = swarm.world.now
        with pytest.raises(Unheard):
            await asks.training.messenger.send_with_retry(frozen.name, pb.Note(), 10.0)
        took.append(swarm.world.now - began)

    for wait_s in (10.0, BROKEN_S):
        swarm.world.run(swarm.world.now + wait_s, None)
        asking = asks.loop.create_task(ask())
        swarm.world.run(swarm.world.now + 30.0, None)
        asking.result()
    soon, late = took
    assert soon < late
