"""Peers know which others live before records expire, and members know for whom their leader
waits."""

import pytest

from node.coordinator.vitals import Life
from node.epoch.waiting import Lack, Wait
from node.sim.process import SimPeer
from node.sim.setup import Setup
from tests.sim.outcomes import PlayedSwarm

pytestmark = pytest.mark.usefixtures("silence")

SOON_S = 12.0
"""Bound in s, below the 20 s after which a record expires."""


class Swarm(PlayedSwarm):
    """A training swarm of two ends peers and one peer at each block stage."""

    def __init__(self) -> None:
        super().__init__(Setup(ends=2, replicas=1, epochs=100_000), seed=3)
        assert self.until(lambda: len(self.watch.commits) > 5, 60.0)

    def others(self, gone: SimPeer) -> list[SimPeer]:
        return [p for p in self.live() if p is not gone]

    def shows(self, gone: SimPeer, life: Life) -> bool:
        """The leader shows the peer in this state, and nobody shows it as living."""
        shown = {p: p.training.standing_of(gone.name)[0] for p in self.others(gone)}
        leads = [life is found for p, found in shown.items() if p.leader is not None]
        return leads == [True] and Life.LIVES not in shown.values()

    def lives(self, peer: SimPeer) -> bool:
        seen = [p.training.standing_of(peer.name)[0] for p in self.others(peer)]
        return set(seen) == {Life.LIVES}


@pytest.mark.parametrize("how", ["frozen", "killed"])
def test_a_peer_is_lost_for_all_before_its_record_expires(how: str) -> None:
    swarm = Swarm()
    (gone,) = swarm.live(2)
    assert swarm.lives(gone)
    if how == "killed":
        swarm.loses(gone)
    else:
        swarm.watch.one_fault.fault("pause")
        gone.loop.frozen = True
    assert swarm.until(lambda: swarm.shows(gone, Life.LOST), SOON_S)
    # The leader has told every other peer the reason.
    wait = Wait(Lack.PEERS, stages=(2,))
    (chief,) = (p for p in swarm.others(gone) if p.leader is not None)

    def told() -> bool:
        members = [p for p in swarm.others(gone) if p is not chief]
        return all(
            p.training.reporting.contact.reply[:2] == (chief.name, str(wait)) for p in members
        )

    assert swarm.until(told, 20.0)
    assert chief.training.waiting() == wait
    if how == "frozen":
        gone.loop.thaw()
        assert swarm.until(lambda: swarm.lives(gone), 20.0)
        assert swarm.until(
            lambda: not any(p.training.reporting.contact.reply.waits_for for p in swarm.live()),
            20.0,
        )


def test_a_frozen_leader_is_silent_for_its_members_before_they_follow_another() -> None:
    swarm = Swarm()
    chief = swarm.chief()
    assert chief is not None
    swarm.watch.one_fault.fault("pause")
    chief.loop.frozen = True

    def silent() -> bool:
        seen = [p.training.standing_of(chief.name) for p in swarm.others(chief)]
        return all(life is not Life.LIVES for life, _ in seen)

    assert swarm.until(silent, SOON_S)
    chief.loop.thaw()
    assert swarm.until(lambda: swarm.lives(chief), 30.0)


def test_a_peer_that_leaves_is_never_shown_as_lost() -> None:
    swarm = Swarm()
    leaver = next(p for p in swarm.live(0) if p.leader is None)
    seen = set[Life]()

    def gone() -> bool:
        (chief,) = (p for p in swarm.others(leaver) if p.leader is not None)
        seen.add(chief.training.standing_of(leaver.name)[0])
        return not leaver.alive

    leaver.leave()
    assert swarm.until(gone, 60.0)
    swarm.until(lambda: gone() and False, 10.0)
    assert seen <= {Life.LIVES, Life.LEFT}
