"""A voter that signs two results of every attempt: it is found out, and the others go on."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from node.consensus.equivocation import DoubleVote
from node.consensus.votes import Vote, names, signing_domain
from node.coordinator import notes
from node.core.errors import PeerFault, WireError
from node.core.ids import NO_CELL, PeerId
from node.core.journey import Version
from node.sim.process import SimPeer, SimSigner
from node.sim.setup import LinkProfile, Setup, WorkTimes
from node.sim.swarm import MachineFactory, SimSwarm
from protos import training_pb2 as pb

pytestmark = pytest.mark.usefixtures("silence")

LIAR = PeerId("s01-001")
SETUP = Setup(
    ends=2,
    epochs=100_000,
    replicas=3,
    links=LinkProfile(0.002, 0.002),
    work=WorkTimes(ends_s=0.05, forward_s=0.15, step_s=0.05),
)


def votes_twice(peer: SimPeer) -> None:
    """LIAR tells the leader of another digest too, once the first is there, from epoch 4 on."""
    if peer.name != LIAR:
        return
    training = peer.training
    true = training.tell_leader

    async def tell(plan: Any, note: Any) -> bool:
        heard = await true(plan, note)
        if note.WhichOneof("say") != "committed" or plan.epoch < 4:
            return heard
        other = "f" * 64
        attempt = note.committed.attempt
        voted = training.leader is None and _vote(training, plan, attempt, other)
        note.committed.digest = other
        note.committed.vote = voted or b""
        try:
            await training.messenger.send(plan.leader, note, 2.0)
        except PeerFault:
            await asyncio.sleep(0)
        return heard

    setattr(training, "tell_leader", tell)  # noqa: B010 - a liar is planted


def _vote(training: Any, plan: Any, attempt: int, digest: str) -> bytes:
    voters = names(plan.electorate.voters)
    at = training.member.at
    vote = Vote(plan.cell_id, plan.term, attempt, at, voters, training.kit.stage, digest)
    domain = signing_domain("vote", training.kit.facts.run_id)
    return SimSigner(training.kit.me).sign(vote.said(), domain)


def test_a_peer_that_votes_twice_is_barred_and_votes_no_more() -> None:
    swarm = SimSwarm(replace(SETUP), 3, MachineFactory(services=votes_twice))
    swarm.world.run(60.0, None)
    others = [p for p in swarm.live() if p.name != LIAR]
    assert all(LIAR in p.training.admission.trust.doubles for p in others), (
        "the leader tells the rest"
    )
    plan = others[0].member.plan
    assert plan.epoch > 20
    assert LIAR not in plan.electorate.voters
    assert set(plan.electorate.voters) == {p.name for p in others}
    assert not any(p.name in q.training.admission.trust.doubles for p in others for q in others)


def _proof(of: PeerId, forged: bool = False) -> DoubleVote:
    votes = [Vote(NO_CELL, 2**20, 0, Version(12, c * 32), "v", 1, "d") for c in "ab"]
    domain = signing_domain("vote", SimSwarm(SETUP, 3).manifest.run_id)
    by = SimSigner(PeerId("somebody") if forged else of)
    one, other = (by.sign(v.said(), domain) for v in votes)
    return DoubleVote(of, *votes, (one, other))


def test_what_one_member_can_prove_all_learn() -> None:
    swarm = SimSwarm(SETUP, 3)
    swarm.world.run(20.0, None)
    first, *others = [p for p in swarm.live() if p.name != LIAR and p.training.leader is None]
    assert first.training.admission.trust.doubles.shown(_proof(LIAR))
    swarm.world.run(40.0, None)
    assert all(LIAR in p.training.admission.trust.doubles for p in others)


def test_a_forged_proof_is_the_fault_of_who_shows_it() -> None:
    swarm = SimSwarm(SETUP, 3)
    swarm.world.run(10.0, None)
    leader = next(p for p in swarm.live() if p.training.leader is not None)
    other = next(p for p in swarm.live() if p is not leader and p.name != LIAR)
    word = notes.ready_note(
        other.training.reporting.own.heartbeat(), doubles=(_proof(LIAR, forged=True),)
    )
    read = pb.Note.FromString(word.SerializeToString())
    hear = leader.training._hear(other.name, read)
    with pytest.raises(WireError, match="prove"):
        hear.send(None)
    assert LIAR not in leader.training.admission.trust.doubles
