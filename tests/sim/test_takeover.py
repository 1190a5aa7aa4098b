"""Leaders that die in the middle of an epoch: the others commit it without beginning again."""

from dataclasses import replace

import pytest

from node.coordinator.credit.record import EpochRecord
from node.core.ids import ENDS
from node.epoch import events as ev
from node.sim.faults import Fault, strike
from node.sim.process import SimPeer
from node.sim.setup import Setup, WorkTimes, toy_parts
from node.sim.swarm import MachineFactory, SimSwarm
from node.sim.world.network import Wall
from testbed.swarms.receipts import SwarmBooks
from testbed.swarms.tapes import Tapes

pytestmark = pytest.mark.usefixtures("silence")

SETUP = Setup(
    ends=3,
    stages=2,
    replicas=2,
    parts=toy_parts(2, 3),
    epochs=100_000,
    work=WorkTimes(ends_s=0.06, forward_s=0.2, step_s=0.06),
)
DEATHS = 6
LATE_S = 0.7
"""Seconds of an epoch after which its leader dies."""
SOON_S = 2.0
"""Bound in s of the time from which most voters take a peer for the leader to its takeover. A
heartbeat that is not answered holds others up for longer."""


def facts_of(swarm: SimSwarm, monkeypatch: pytest.MonkeyPatch) -> list[ev.RecordFact]:
    """The facts that leaders of this swarm report from now on."""
    said: list[ev.RecordFact] = []
    watch = swarm.watch
    report = watch.report

    def look(peer: SimPeer, fact: ev.RecordFact) -> None:
        said.append(fact)
        report(peer, fact)

    monkeypatch.setattr(watch, "report", look)
    return said


def die_late(swarm: SimSwarm) -> None:
    """Let the leader die in the middle of an epoch, and a newcomer come in its place."""
    commits = len(swarm.watch.commits)
    while len(swarm.watch.commits) == commits:
        swarm.world.run(swarm.world.now + 0.05, None)
    swarm.world.run(swarm.world.now + LATE_S, None)
    strike(swarm, Fault(0.0, "kill-leader", 0))
    swarm.add(0)


@pytest.mark.parametrize("seed", range(2))
def test_an_epoch_outlives_its_leader(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    swarm = SimSwarm(SETUP, seed)
    said = facts_of(swarm, monkeypatch)
    swarm.world.run(15.0, None)
    for _ in range(DEATHS):
        die_late(swarm)
        swarm.world.run(swarm.world.now + 12.0, None)
    assert sum(kind == "kill-leader" for _, kind, *_ in swarm.struck) == DEATHS
    taken = [f.facts for f in said if f.kind == "epoch-taken-over"]
    ended = {f.facts["hash"]: f.facts for f in said if f.kind == "epoch-committed"}
    assert len(taken) >= DEATHS - 1
    for begun in taken:
        done = ended[begun["hash"]]
        assert done["dropped"] == begun["dropped"] > 0
        assert done["counted"] > 0
    assert not swarm.watch.counts["bans"]


def test_receipts_and_recordings_of_a_taken_over_epoch_hold(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    books = SwarmBooks()
    tapes = Tapes()
    make = books.factory()
    both = MachineFactory(services=make.services, recorder=tapes.factory().recorder)
    swarm = SimSwarm(SETUP, 3, both)
    said = facts_of(swarm, monkeypatch)
    swarm.world.run(15.0, None)
    die_late(swarm)
    swarm.world.run(swarm.world.now + 12.0, None)
    (taken,) = (f.facts["epoch"] for f in said if f.kind == "epoch-taken-over")
    for peer, played in tapes.replay():
        assert played.difference is None, (peer, played.difference)
    run = books.audit()
    for account in run.accounts:
        assert account.sums() == dict.fromkeys(account.stages, account.tokens)
    (of_two_leaders,) = (a for a in run.accounts if a.epoch == taken)
    chief = swarm.chief()
    assert chief is not None
    mine = [EpochRecord.parse(r) for r in books.books[chief.name].records]
    (of_the_new_leader,) = (r for r in mine if r.plan.epoch == taken)
    members = {m.peer for m in of_the_new_leader.plan.members}
    signers = {signed.peer for signed in of_the_new_leader.signed}
    assert signers == members - {of_the_new_leader.plan.leader}
    assert 0 < of_two_leaders.tokens < max(a.tokens for a in run.accounts)
    assert sum(of_two_leaders.receipts.values()) > 0.9 * of_two_leaders.tokens * 3


def test_nobody_waits_for_a_peer_that_woke_up_between_two_leaders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first leader found it dead, and it runs the plan when the second one takes over."""
    swarm = SimSwarm(replace(SETUP, ends=4, micro_batches=96), 1)
    said = facts_of(swarm, monkeypatch)
    swarm.world.run(15.0, None)
    first = swarm.chief()
    assert first is not None
    sleeper = max(
        (p for p in swarm.live() if p.stage == ENDS and p is not first), key=lambda p: p.name
    )
    commits = len(swarm.watch.commits)
    while len(swarm.watch.commits) == commits:
        swarm.world.run(swarm.world.now + 0.05, None)
    swarm.world.run(swarm.world.now + 10.0, None)
    sleeper.loop.frozen = True
    while not any(f.kind == "peer-lost" and sleeper.name in str(f.facts) for f in said):
        swarm.world.run(swarm.world.now + 0.05, None)
    plan = first.member.plan
    sleeper.loop.thaw()
    swarm.world.run(swarm.world.now + 0.5, None)
    strike(swarm, Fault(0.0, "kill-leader", 0))
    swarm.world.run(swarm.world.now + 60.0, None)
    assert plan is not None
    (taken,) = (f.facts for f in said if f.kind == "epoch-taken-over")
    assert taken["hash"] == plan.hash[:12]
    assert set(taken["dead"]) == {first.name, sleeper.name}
    assert taken["hash"] in {f.facts["hash"] for f in said if f.kind == "epoch-committed"}


def test_a_heartbeat_to_the_former_leader_holds_no_takeover_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A peer without a connection to the leader waits for its answer when the leader dies; the
    others, whose connections break, turn to that peer."""
    swarm = SimSwarm(replace(SETUP, micro_batches=48), 1)
    said = facts_of(swarm, monkeypatch)
    swarm.world.run(15.0, None)
    commits = len(swarm.watch.commits)
    while len(swarm.watch.commits) == commits:
        swarm.world.run(swarm.world.now + 0.05, None)
    swarm.world.run(swarm.world.now + 4.0, None)
    first = swarm.chief()
    assert first is not None
    assert first.member.plan is not None
    voters = first.member.plan.electorate.voters
    second = next(p for v in voters for p in swarm.live(ENDS) if p.name == v and p is not first)
    pair = frozenset({first.name, second.name})
    swarm.links.walls.append(Wall(pair, pair))
    swarm.world.run(swarm.world.now + 1.0, None)
    strike(swarm, Fault(0.0, "kill-leader", 0))
    while second.leader is None:
        swarm.world.run(swarm.world.now + 0.05, None)
    swarm.world.run(swarm.world.now + SOON_S, None)
    assert "epoch-taken-over" in {f.kind for f in said}
