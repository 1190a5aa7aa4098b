"""Versions that a leader is told of and has not made: which of them it goes on from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from node.core.ids import NO_CELL, CellId, PeerId
from node.core.journey import Electorate, Plan, Version
from node.core.samples import SampleClass
from node.training.leader.leader import PROOF_AGAIN_S, Leader
from node.training.protocol import events as ev
from node.training.protocol import notes
from node.training.protocol.plan_context import PlanContext
from node.training.protocol.votes import (
    FORGET_S,
    Ballot,
    Certificate,
    Trust,
    Vote,
    names,
    vote_domain,
)
from protos import training_pb2 as pb
from tests.training.run_facts import facts
from tests.training.test_votes import RUN, is_signed, signed

E, S1, S2, T1, T2 = (PeerId(p) for p in ("ends", "stage1a", "stage2a", "stage1b", "stage2b"))
F = PeerId("ends2")
VOTERS = (E, S1, S2, F, T1)
OURS, THEIRS = Version(12, "aa" * 16), Version(13, "bb" * 16)
OTHERS = (F, T1, T2)


def certificate(
    of: Version,
    by: tuple[PeerId, ...],
    term: int,
    voters: tuple[PeerId, ...] = VOTERS,
    cell: CellId = NO_CELL,
) -> Certificate:
    def ballot(peer: PeerId) -> Ballot:
        vote = Vote(cell, term, 0, of, names(voters), 1, "digest")
        return Ballot(peer, 1, 0, "digest", signed(peer, vote.said(), vote_domain(RUN)))

    return Certificate(cell, term, of, voters, tuple(map(ballot, by)))


def heard(peer: PeerId, at: Version, tokens: int) -> ev.Heartbeat:
    stage = 0 if peer.startswith("ends") else int(peer[5])
    return ev.Heartbeat(peer, stage, at, f"digest {stage} {at}", 1.0, tokens=tokens, term=20)


def told(others: tuple[PeerId, ...] = OTHERS, ours: tuple[PeerId, ...] = (E, S1, S2)) -> Leader:
    """A leader that knows a certificate of OURS, and hears of others that they hold THEIRS, with
    more tokens; the time is 2."""
    trust = Trust(RUN, is_signed)
    assert trust.shown(certificate(OURS, (E, S1, S2), 20), NO_CELL, 0.0)
    here = PlanContext((SampleClass(0, 0, 96),), {}, 1000)
    known = facts(late_s=1e9, recall=lambda v: here if v in (OURS, THEIRS) else None)
    followed = Plan(
        12, 20, E, (), (), {}, lineage=OURS.lineage, electorate=Electorate(VOTERS), tokens=1000
    )
    leader = Leader(E, known, term=20, history=followed, trust=trust)
    for peer in ours:
        leader.handle(heard(peer, OURS, 1000), 0.0)
    for peer in others:
        leader.handle(heard(peer, THEIRS, 1100), 0.0)
    return leader


def sent(actions: list[Any]) -> ev.SendPlan | None:
    return next((a for a in actions if isinstance(a, ev.SendPlan)), None)


def base(actions: list[Any]) -> Version | None:
    plan = sent(actions)
    return plan.plan.base if plan else None


def said(actions: list[Any]) -> list[str]:
    return [a.kind for a in actions if isinstance(a, ev.RecordFact)]


FORGED = {
    "none": None,
    "few": certificate(THEIRS, (F, T1), 21),
    "strangers": certificate(THEIRS, (F, T1, T2), 21),
    "their-own-voters": certificate(THEIRS, OTHERS, 21, OTHERS),
    "replayed": certificate(OURS, (E, S1, S2), 20),
    "of-a-lower-term": certificate(OURS, (E, S1, S2), 19),
    "another-cell": certificate(THEIRS, VOTERS, 21, cell=CellId("0" * 15 + "1")),
    "moved": replace(certificate(OURS, VOTERS, 20), version=THEIRS),
    "unsigned": replace(
        certificate(THEIRS, (), 21),
        ballots=tuple(Ballot(p, 1, 0, "digest", b"s" * 32) for p in VOTERS),
    ),
}


@pytest.mark.parametrize("shown", FORGED.values(), ids=FORGED)
def test_a_claimed_version_without_proof_is_passed_over(shown: Certificate | None) -> None:
    leader = told()
    asked = leader.handle(ev.ClockTick(), 2.0)
    assert [a for a in asked if isinstance(a, ev.Recall)] == [ev.Recall(THEIRS, OTHERS, True)]
    assert sent(asked) is None, "nothing is planned before somebody has answered"
    done = leader.handle(ev.Recalled(THEIRS, None, (), shown), 2.5)
    assert (base(done), "version-unproven" in said(done)) == (OURS, True)


def test_silence_about_a_claimed_version_proves_nothing() -> None:
    leader = told()
    leader.handle(ev.ClockTick(), 2.0)
    assert base(leader.handle(ev.ClockTick(), 2.0 + leader.facts.waits.recall_s)) == OURS


def test_a_certified_version_is_gone_on_from_and_shown() -> None:
    leader, proof = told(), certificate(THEIRS, (S1, F, T1), 21)
    leader.handle(ev.ClockTick(), 2.0)
    plan = sent(leader.handle(ev.Recalled(THEIRS, None, (), proof), 2.5))
    assert plan is not None
    assert (plan.plan.base, plan.certificate) == (THEIRS, proof)


def test_what_most_voters_hold_needs_no_certificate() -> None:
    leader = told((F, T1, T2, S1), (E, S2))
    assert base(leader.handle(ev.ClockTick(), 2.0)) == THEIRS


def test_absent_voters_may_have_committed_a_version() -> None:
    leader = told(OTHERS, (E, S2))
    assert base(leader.handle(ev.ClockTick(), 2.0)) == THEIRS


def test_claims_hold_the_next_plan_up_once_a_minute() -> None:
    leader = told()
    leader.handle(ev.ClockTick(), 2.0)
    assert base(leader.handle(ev.Recalled(THEIRS), 2.5)) == OURS
    leader.handle(ev.Declined(leader.plan.hash if leader.plan else "", "again"), 3.0)
    claimed = [Version(13, f"c{n}" * 16) for n in range(3)]
    done = [a for v in claimed for p in OTHERS for a in leader.handle(heard(p, v, 1100), 4.0)]
    done += leader.handle(ev.ClockTick(), 5.0)
    assert not [a for a in done if isinstance(a, ev.Recall)]
    assert base(done) == OURS
    assert PROOF_AGAIN_S >= FORGET_S, "then nobody's word is needed any more"


def test_a_late_certificate_counts_still() -> None:
    leader = told()
    leader.handle(ev.ClockTick(), 2.0)
    assert base(leader.handle(ev.Recalled(THEIRS), 2.5)) == OURS
    leader.handle(ev.Recalled(THEIRS, None, (), certificate(THEIRS, (S1, F, T1), 21)), 2.6)
    done = leader.handle(ev.Declined(leader.plan.hash if leader.plan else "", "again"), 3.0)
    done += leader.handle(ev.ClockTick(), 5.0)
    assert base(done) == THEIRS


def test_without_a_recent_certificate_tokens_count() -> None:
    leader = told()
    for peer, at, tokens in ((E, OURS, 1000), (S1, OURS, 1000), (F, THEIRS, 1100)):
        leader.handle(heard(peer, at, tokens), FORGET_S)
    assert base(leader.handle(ev.ClockTick(), FORGET_S + 1)) == THEIRS


def test_a_certificate_travels_with_what_is_remembered() -> None:
    proof = certificate(THEIRS, (S1, F), 21)
    note = notes.history_reply(None, (), [], proof)
    read = pb.HistoryReply.FromString(note.SerializeToString())
    assert notes.parse_history(THEIRS, read)[0].certificate == proof
