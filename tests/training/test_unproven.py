"""Versions that a leader is told of and has not made: the choice of the one it goes on from."""

from dataclasses import replace
from typing import Any

import pytest

from node.consensus.trust import Trust
from node.consensus.voters import FORGET_S
from node.consensus.votes import Ballot, Certificate
from node.core.ids import NO_CELL, CellId, PeerId
from node.core.journey import Electorate, Plan, Version
from node.core.samples import SampleClass
from node.epoch import events as ev
from node.epoch.leader.leader import Leader
from node.epoch.leader.proofs import PROOF_AGAIN_S
from node.epoch.plan_context import PastPlan, PlanContext
from tests.training.briefed import BriefedLeader
from tests.training.run_facts import facts
from tests.training.test_leader import S1, S2, T1, T2, E, heard, kinds, tell, the_plan
from tests.training.test_votes import RUN, certificate, checks

F = PeerId("ends2")
VOTERS = (E, S1, S2, F, T1)
OURS = Version(12, "aa" * 16)
THEIRS = Version(13, "bb" * 16)
OTHERS = (F, T1, T2)


def proof(by: tuple[PeerId, ...], voters: tuple[PeerId, ...] = VOTERS, **about: Any) -> Certificate:
    """Quorum certificate of THEIRS, unless `about` names another version."""
    return certificate(**{"of": THEIRS, "term": 21, "by": by, "voters": voters, **about})


def told(
    others: tuple[PeerId, ...] = OTHERS,
    ours: tuple[PeerId, ...] = (E, S1, S2),
    saved: tuple[Version, ...] = (OURS, THEIRS),
) -> BriefedLeader:
    """A leader that knows a quorum certificate of OURS, and hears from `others` that they hold
    THEIRS, with more tokens. `saved`: versions that its checkpoints know."""
    trust = Trust(RUN, checks)
    assert trust.shown(proof((E, S1, S2), of=OURS, term=20), NO_CELL, 0.0)
    here = PlanContext((SampleClass(0, 0, 96),), {}, 1000)
    followed = Plan(
        12, 20, E, (), (), {}, lineage=OURS.lineage, electorate=Electorate(VOTERS), tokens=1000
    )
    machine = Leader(E, facts(late_s=1e9), term=20, history=PastPlan(followed))
    leader = BriefedLeader(machine, trust, dict.fromkeys(saved, here))
    tell(leader, [heard(peer, OURS, 1000, term=20) for peer in ours], 0.0)
    tell(leader, [heard(peer, THEIRS, 1100, term=20) for peer in others], 0.0)
    return leader


def base(actions: list[Any]) -> Version | None:
    plan = the_plan(actions)
    return plan.base if plan else None


FORGED = {
    "none": None,
    "few": proof((F, T1)),
    "strangers": proof((F, T1, T2)),
    "their-own-voters": proof(OTHERS, OTHERS),
    "replayed": proof((E, S1, S2), of=OURS, term=20),
    "of-a-lower-term": proof((E, S1, S2), of=OURS, term=19),
    "another-cell": proof(VOTERS, cell=CellId("0" * 15 + "1")),
    "moved": replace(proof(VOTERS, of=OURS, term=20), version=THEIRS),
    "unsigned": replace(
        proof(()), ballots=tuple(Ballot(p, 1, 0, "digest", b"s" * 32) for p in VOTERS)
    ),
}


@pytest.mark.parametrize("shown", FORGED.values(), ids=FORGED)
def test_a_claimed_version_without_proof_is_passed_over(shown: Certificate | None) -> None:
    leader = told()
    asked = leader.handle(ev.ClockTick(), 2.0)
    assert [a for a in asked if isinstance(a, ev.Recall)] == [ev.Recall(THEIRS, OTHERS, True)]
    assert the_plan(asked) is None, "nothing is planned before somebody has answered"
    done = leader.recalled(ev.Recalled(THEIRS), shown, 2.5)
    assert (base(done), "version-unproven" in kinds(done)) == (OURS, True)


def test_silence_about_a_claimed_version_proves_nothing() -> None:
    leader = told()
    leader.handle(ev.ClockTick(), 2.0)
    assert base(leader.handle(ev.ClockTick(), 2.0 + leader.facts.waits.recall_s)) == OURS


def test_a_certified_version_is_gone_on_from_and_shown() -> None:
    leader = told()
    shown = proof((S1, F, T1))
    leader.handle(ev.ClockTick(), 2.0)
    done = leader.recalled(ev.Recalled(THEIRS), shown, 2.5)
    (sent,) = [a for a in done if isinstance(a, ev.SendPlan)]
    assert (sent.plan.base, sent.certified) == (THEIRS, True)
    assert leader.tally.certificate(THEIRS) == shown


@pytest.mark.parametrize("others", [(F, T1, T2, S1), OTHERS], ids=["most-hold-it", "absent"])
def test_what_enough_voters_hold_needs_no_certificate(
    others: tuple[PeerId, ...],
) -> None:
    leader = told(others, (E, S2))
    assert base(leader.handle(ev.ClockTick(), 2.0)) == THEIRS


def test_claims_hold_the_next_plan_up_once_a_minute() -> None:
    leader = told()
    leader.handle(ev.ClockTick(), 2.0)
    assert base(leader.handle(ev.Recalled(THEIRS), 2.5)) == OURS
    leader.handle(ev.Declined(leader.plan.hash, "again"), 3.0)
    claimed = [Version(13, f"c{n}" * 16) for n in range(3)]
    claims = [heard(p, v, 1100, term=20) for v in claimed for p in OTHERS]
    done = tell(leader, claims, 4.0) + leader.handle(ev.ClockTick(), 5.0)
    assert not [a for a in done if isinstance(a, ev.Recall)]
    assert base(done) == OURS
    assert PROOF_AGAIN_S >= FORGET_S, "then nobody's word is needed any more"


def test_a_version_once_unproven_is_asked_for_again() -> None:
    leader = told(saved=(OURS,))
    leader.handle(ev.ClockTick(), 2.0)
    leader.handle(ev.Resigning(True), 2.0)  # so that it plans nothing meanwhile
    leader.handle(ev.Recalled(THEIRS), 2.5)
    leader.handle(ev.Resigning(False), 2.5)
    assert leader.handle(ev.ClockTick(), 3.0 + FORGET_S) == [ev.Recall(THEIRS, OTHERS)]


def test_a_late_certificate_counts_still() -> None:
    leader = told()
    leader.handle(ev.ClockTick(), 2.0)
    assert base(leader.handle(ev.Recalled(THEIRS), 2.5)) == OURS
    leader.recalled(ev.Recalled(THEIRS), proof((S1, F, T1)), 2.6)
    done = leader.handle(ev.Declined(leader.plan.hash, "again"), 3.0)
    assert base(done + leader.handle(ev.ClockTick(), 5.0)) == THEIRS


def test_without_a_recent_certificate_tokens_count() -> None:
    leader = told()
    for peer, at, tokens in ((E, OURS, 1000), (S1, OURS, 1000), (F, THEIRS, 1100)):
        leader.handle(heard(peer, at, tokens, term=20), FORGET_S)
    assert base(leader.handle(ev.ClockTick(), FORGET_S + 1)) == THEIRS
