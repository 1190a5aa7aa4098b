"""A peer that votes for two results of one attempt: its treatment, and the fate of its votes."""

from dataclasses import replace
from typing import Any

import pytest

from node.consensus.equivocation import KEPT, MOST_TOLD, DoubleVote
from node.consensus.trust import MOST_COMPARED, Trust, Warrant
from node.consensus.votes import Ballot, Certificate, Vote, names, signing_domain
from node.coordinator import notes
from node.core.errors import WireError
from node.core.ids import NO_CELL, CellId, PeerId
from node.core.journey import Version
from node.epoch import events as ev
from node.epoch.leader.leader import Leader
from protos import training_pb2 as pb
from tests.training.briefed import BriefedLeader
from tests.training.run_facts import facts
from tests.training.test_damaged import taking_part
from tests.training.test_leader import S1, S2, T1, T2, E, heard, kinds, next_plan, reported, tell
from tests.training.test_votes import (
    HERE,
    NEXT,
    RUN,
    STRANGERS,
    VOTERS,
    A,
    B,
    C,
    D,
    asks,
    certificate,
    checks,
    plan,
    signed,
    supporters,
    trusting,
)

OTHER = Version(NEXT.epoch, "f" * 32)


def vote(of: Version = NEXT, term: int = 21, attempt: int = 0) -> Vote:
    return Vote(NO_CELL, term, attempt, of, names(VOTERS), 1, "digest")


def cast(peer: PeerId, v: Vote) -> bytes:
    return signed(peer, v.said(), signing_domain("vote", RUN))


def proof(peer: PeerId = C, one: Vote | None = None, other: Vote | None = None) -> DoubleVote:
    a = one or vote()
    b = other or vote(OTHER)
    return DoubleVote(peer, a, b, (cast(peer, a), cast(peer, b)))


def test_two_certificates_of_one_term_void_who_signed_both() -> None:
    trust = trusting()
    assert not asks(trust, plan(A, OTHER), Warrant(certificate(OTHER, (A, B, C), term=21)))
    asks(trust, plan(A, NEXT), Warrant(certificate(NEXT, (C, D, E), term=21)))
    (found,) = trust.doubles.news()
    assert (found.peer, found.contradicts) == (C, True)
    assert [p for p in VOTERS if p in trust.doubles] == [C]
    assert not trust.doubles.news(), "it is news once"


def test_neither_votes_nor_support_of_who_voted_twice_count() -> None:
    trust = trusting()
    assert trust.doubles.shown(proof(C))
    assert "certified" in asks(trust, plan(A, NEXT), Warrant(certificate(NEXT, (A, B, C), term=21)))
    assert not asks(trust, plan(A, NEXT), Warrant(certificate(NEXT, (A, B, C, D), term=21)))
    assert "supports" in asks(trust, plan(B, HERE), Warrant(None, supporters(B, (B, C, D))))
    assert not asks(trust, plan(B, HERE), Warrant(None, supporters(B, (A, B, C, D))))


@pytest.mark.parametrize(
    "shown",
    [
        proof(C, vote(), vote()),
        proof(C, vote(), vote(OTHER, term=22)),
        proof(C, vote(), vote(OTHER, attempt=1)),
        proof(C, vote(), replace(vote(OTHER), cell=CellId("00000000000000aa"))),
        replace(proof(C), peer=D),
        replace(proof(C), signatures=(proof(C).signatures[0], b"x" * 32)),
        replace(proof(C), signatures=(b"", proof(C).signatures[1])),
    ],
    ids=["same", "term", "attempt", "cell", "another-peer", "unsigned", "empty"],
)
def test_what_proves_nothing_condemns_nobody(shown: DoubleVote) -> None:
    trust = trusting()
    assert not trust.doubles.shown(shown)
    assert not [p for p in VOTERS if p in trust.doubles]
    assert not trust.doubles.news()


def test_a_proof_is_news_once_however_often_it_comes() -> None:
    trust = trusting()
    assert trust.doubles.shown(proof(C))
    assert trust.doubles.shown(proof(C))
    trust.doubles.saw(vote(), C, cast(C, vote()))
    trust.doubles.saw(vote(OTHER), C, cast(C, vote(OTHER)))
    assert trust.doubles.news() == [proof(C)]
    assert trust.doubles.peers == {C}


def test_the_newest_proofs_are_told_on() -> None:
    trust = trusting()
    peers = [PeerId(f"p{n}") for n in range(MOST_TOLD + 2)]
    assert all(trust.doubles.shown(proof(peer)) for peer in peers)
    assert [told.peer for told in trust.doubles.told()] == peers[2:]


def test_a_vote_that_comes_twice_proves_nothing() -> None:
    trust = trusting()
    for _ in range(2):
        trust.doubles.saw(vote(), C, cast(C, vote()))
    assert not trust.doubles.peers


def test_a_second_digest_or_stage_is_a_second_result() -> None:
    for other in (replace(vote(), digest="other"), replace(vote(), stage=2)):
        trust = trusting()
        trust.doubles.saw(vote(), C, cast(C, vote()))
        trust.doubles.saw(other, C, cast(C, other))
        assert C in trust.doubles


def test_junk_under_a_name_neither_condemns_nor_protects() -> None:
    trust = trusting()
    trust.doubles.saw(vote(Version(11, "e" * 32)), C, b"junk")
    trust.doubles.saw(vote(), C, cast(C, vote()))
    trust.doubles.saw(vote(Version(11, "d" * 32)), C, b"junk")
    assert C not in trust.doubles
    trust.doubles.saw(vote(OTHER), C, cast(C, vote(OTHER)))
    assert C in trust.doubles


def test_votes_that_are_kept_are_bounded() -> None:
    trust = trusting()
    ballots = tuple(Ballot(p, 1, n, "d", b"") for n in range(MOST_COMPARED) for p in STRANGERS)
    for term in range(30, 34):
        asks(trust, plan(A, NEXT), Warrant(Certificate(NO_CELL, term, NEXT, STRANGERS, ballots)))
    for term in range(KEPT + 9):
        trust.doubles.saw(vote(term=term), D, b"")
    assert len(trust.doubles._cast) == KEPT


def test_a_peer_that_voted_twice_did_so_in_every_cell() -> None:
    trust = trusting()
    assert trust.doubles.shown(proof(C))
    trust.forget()
    assert (C in trust.doubles, trust.voters) == (True, ())


def test_a_proof_travels_with_heartbeats() -> None:
    sent = notes.ready_note(heard(E), doubles=(proof(C),))
    note = pb.Note.FromString(sent.SerializeToString())
    assert notes.parse_doubles(note.ready.doubles) == (proof(C),)


def test_more_proofs_than_anybody_tells_are_refused() -> None:
    many = Warrant(None, (), (proof(C),) * (MOST_TOLD + 1))
    with pytest.raises(WireError, match="voted twice"):
        notes.parse_warrant(notes.plan_note(plan(A, NEXT), b"s", many).plan)
    note = notes.plan_note(plan(A, NEXT), b"s", Warrant(None, (), (proof(C),))).plan
    note.doubles[0].one.digest = "x" * 65
    with pytest.raises(WireError, match="digest"):
        notes.parse_warrant(note)


ALL = (E, S1, S2, T1, T2)


async def test_a_proof_about_another_peer_costs_nobody_its_vote(
    rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _ = await rig.trained("a", 1)
    t = taking_part(a)
    trust = t.admission.trust
    monkeypatch.setattr(trust, "_check", lambda *signed: True)
    votes = [vote(), vote(OTHER)]
    monkeypatch.setattr(t.leading, "vote_in", lambda event: votes.pop(0))
    assert trust.doubles.shown(proof(C)), "nobody was told of it here yet"
    word = ev.Committed(D, "plan", 0, "digest", voted=True)
    assert t._counts(word, b"signature")
    assert not t._counts(word, b"signature"), "its own second vote"
    assert trust.doubles.peers == {C, D}
    await t.close()


def committing(liars: tuple[PeerId, ...]) -> list[object]:
    """Actions of a leader after all five voters have committed and `liars` are proven to have voted
    twice."""
    trust = Trust(RUN, checks)
    leader = BriefedLeader(Leader(E, facts(late_s=1e9)), trust)
    tell(leader, map(heard, ALL), 0.0)
    first = next_plan(leader.handle(ev.ClockTick(), 2.0))
    assert set(first.electorate.voters) == set(ALL)
    reported(leader, first, 3.0)
    assert all(trust.doubles.shown(proof(peer)) for peer in liars)
    words = (
        ev.Committed(m.peer, first.hash, 0, f"digest {m.stage}", 1.0, True) for m in first.members
    )
    return tell(leader, words, 4.0), leader.commit


def test_a_leader_counts_no_vote_of_who_voted_twice() -> None:
    done, commit = committing((S1,))
    (sent,) = [a for a in done if isinstance(a, ev.SendPlan)]
    assert S1 not in sent.plan.electorate.voters
    assert sent.plan.member(S1) is not None, "it may work, and votes no more"
    assert (sent.certified, commit.version) == (True, sent.plan.base)
    assert {peer for peer, *_ in commit.votes} == {*ALL} - {S1}


def test_without_enough_other_votes_nothing_is_committed() -> None:
    done, commit = committing((S1, S2, T1))
    assert commit is None
    assert "epoch-uncertain" in kinds(done)
    assert not [a for a in done if isinstance(a, ev.SendPlan)]
