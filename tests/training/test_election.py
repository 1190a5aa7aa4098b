"""The peer that is taken for the leader: the incumbent while it lives, then the smallest live ends
peer."""

from types import SimpleNamespace
from typing import Any

import pytest

from node.consensus.admission import Admission
from node.consensus.election import (
    CLAIM_S,
    DOUBT_S,
    GRACE_S,
    KEEP_S,
    LOOK_S,
    SAID_S,
    SHUN_S,
    Election,
    Sighting,
)
from node.consensus.rules import ChangeStatus, Rules, mark
from node.consensus.terms import Terms
from node.consensus.trust import Trust
from node.coordinator.candidacy import Candidacy
from node.core.ids import PeerId
from testbed.fakes.clock import VirtualClock

A, B, C, D = (PeerId(p) for p in "ABCD")
LATE = 100.0


def election(me: PeerId, **ends: Sighting) -> Election:
    e = Election(me, 0.0)
    e.see({PeerId(p): s for p, s in ends.items()})
    return e


LEADS = Sighting(1, leads=True)
HERE = Sighting(1)


@pytest.mark.parametrize(
    ("me", "ends", "able", "leads", "who"),
    [
        (B, {"A": HERE, "C": HERE}, True, False, A),
        (B, {"C": HERE}, True, False, B),
        (D, {"C": HERE}, False, False, C),
        (D, {}, False, False, None),
        (A, {"B": LEADS}, True, False, B),
        (B, {"A": HERE}, True, True, B),
        (C, {"A": HERE, "B": Sighting(9, leads=True)}, False, False, B),
        (B, {"A": LEADS}, True, True, A),
        (A, {"B": LEADS}, True, True, A),
        (D, {"A": LEADS, "B": LEADS}, False, False, A),
        (A, {"B": HERE}, False, True, B),
    ],
    ids=lambda value: str(value) if isinstance(value, str | bool) else None,
)
def test_an_incumbent_leads_else_the_smallest_that_is_able(
    me: PeerId, ends: dict[str, Sighting], able: bool, leads: bool, who: PeerId | None
) -> None:
    assert election(me, **ends).leader(LATE, able=able, leads=leads) == who


def test_a_peer_that_starts_among_others_listens_before_it_leads() -> None:
    e = election(A, B=Sighting(1))
    assert e.leader(LOOK_S / 2, able=True, leads=False) == B
    assert e.leader(LOOK_S, able=True, leads=False) == A
    assert election(A).leader(0.0, able=True, leads=False) == A, (
        "alone there is nobody to listen to"
    )


def test_a_peer_that_does_not_vote_lets_voters_take_over() -> None:
    newcomer = election(A, B=LEADS, C=HERE)
    assert newcomer.leader(LATE, able=True, leads=False) == B
    newcomer.shun(B, LATE + 1)
    assert newcomer.leader(LATE + 1, able=True, leads=False) == C
    assert newcomer.leader(LATE + LOOK_S, able=True, leads=False) == A, "no voter did"

    voter = election(D, B=LEADS, C=HERE)
    voter.see({B: LEADS, C: HERE}, order=(B, D))
    assert voter.leader(LATE, able=True, leads=False) == B
    voter.shun(B, LATE + 1)
    assert voter.leader(LATE + 1, able=True, leads=False) == D, "at once"


def test_who_may_no_longer_lead_is_not_the_leader_whatever_it_says() -> None:
    e = election(D, A=HERE, B=HERE, C=LEADS)
    e.says(A, LATE)
    e.answered(B, LATE)
    e.see({C: LEADS})
    for barred, leader in ((D, A), (A, B), (B, C)):
        e.keep(lambda peer, barred=barred: peer != barred)
        assert e.leader(LATE, able=False, leads=False) == leader


def test_a_silent_leader_returns_only_with_a_newer_record() -> None:
    e = election(C, A=Sighting(5, leads=True), B=Sighting(5))
    e.shun(A, LATE)
    assert e.leader(LATE, able=False, leads=False) == B
    e.see({A: Sighting(6, leads=True), B: Sighting(6)})
    assert e.leader(LATE + SHUN_S / 2, able=False, leads=False) == B, "its last words came late"
    assert e.leader(LATE + 10 * SHUN_S, able=False, leads=False) == B, (
        "what a dead peer leaves behind is its old record"
    )
    e.see({A: Sighting(7, leads=True), B: Sighting(6)})
    assert e.leader(LATE + 10 * SHUN_S, able=False, leads=False) == A
    e.shun(A, LATE)
    e.forgive(A)
    assert e.leader(LATE, able=False, leads=False) == A, "or with a plan"


def test_a_peer_that_denies_leading_comes_last_for_a_while() -> None:
    e = election(C, A=Sighting(5, leads=True), B=Sighting(5))
    e.doubt(A, LATE)
    assert e.leader(LATE, able=False, leads=False) == B
    assert e.leader(LATE, able=True, leads=False) == B
    assert e.leader(LATE + DOUBT_S, able=False, leads=False) == A
    alone = election(C, A=Sighting(5))
    alone.doubt(A, LATE)
    assert alone.leader(LATE, able=False, leads=False) == A, "there is nobody else"
    assert alone.leader(LATE + GRACE_S, able=True, leads=False) == C


def test_a_leader_that_takes_over_next_gets_time_to_find_out() -> None:
    e = election(B, A=HERE, C=HERE, D=LEADS)
    for later in (0.0, GRACE_S / 2):
        e.doubt(A, LATE + later)
        e.shun(D, LATE + later)
        assert e.leader(LATE + later, able=True, leads=False) == A, (
            "its leader is gone, and it asks"
        )
    assert e.leader(LATE + GRACE_S, able=True, leads=False) == B
    assert e.leader(LATE + GRACE_S, able=False, leads=False) == C


def test_a_peer_that_says_that_it_leads_counts_as_leading_until_its_record_says_so() -> None:
    e = election(C, A=HERE, B=HERE)
    e.doubt(B, LATE)
    e.says(B, LATE)
    assert e.leader(LATE, able=True, leads=False) == B
    assert e.leader(LATE + SAID_S, able=True, leads=False) == A
    e.says(B, LATE)
    e.shun(B, LATE + 1)
    assert e.leader(LATE + 1, able=True, leads=False) == A, "it does not answer"
    e.says(D, LATE)
    assert e.leader(LATE, able=True, leads=False) == A, "nobody has ever seen it"


def test_voters_that_have_lost_their_leader_show_it_together() -> None:
    e = election(B, A=LEADS)
    e.see({A: LEADS}, following=A, order=(A, B, C, D))
    assert not e.claims(C, LATE), "two of four are no majority"
    assert not e.claims(C, LATE + 1)
    assert not e.claims(PeerId("stranger"), LATE + 1)
    assert not e.claims(D, LATE + 1 + CLAIM_S), "the word of the other is too old"
    assert e.claims(C, LATE + 2 + CLAIM_S)


def test_a_silent_peer_is_one_that_did_not_answer_a_moment_ago() -> None:
    e = election(C, A=LEADS, B=HERE)
    e.answered(A, LATE)
    assert e.accepted
    e.shun(A, LATE)
    assert not e.accepted
    assert (e.is_silent(A, LATE), e.is_silent(B, LATE)) == (True, False)
    assert not e.is_silent(A, LATE + SHUN_S)
    assert e.shunned() == [A], "it has not shown that it is back"
    e.forgive(A)
    assert e.shunned() == []


def test_a_leader_that_answers_us_leads_despite_the_directory() -> None:
    e = election(C, A=Sighting(5), B=Sighting(5, leads=True))
    e.answered(B, LATE)
    e.see({A: Sighting(6)})
    assert e.leader(LATE + 1, able=False, leads=False) == B, (
        "its record came late, on a busy machine"
    )
    assert e.leader(LATE + 1, able=True, leads=False) == B
    assert e.leader(LATE + 2 * KEEP_S, able=False, leads=False) == A
    e.answered(B, LATE)
    e.doubt(B, LATE + 1)
    assert e.leader(LATE + 1, able=False, leads=False) == A, "it says that it does not lead"
    e.answered(B, LATE)
    e.shun(B, LATE + 1)
    assert e.leader(LATE + 1, able=False, leads=False) == A, "it does not answer"


def test_an_answer_counts_until_its_time_is_over() -> None:
    e = election(C, A=Sighting(5), B=Sighting(5))
    e.answered(B, LATE)
    assert e.leader(LATE + KEEP_S, able=False, leads=False) == B
    e.doubt(A, LATE)
    assert e.accepted, "it was another peer that denied to lead"
    e.doubt(B, LATE)
    assert not e.accepted


def test_a_silent_peer_that_went_out_of_sight_starts_anew() -> None:
    e = election(C, A=Sighting(5, leads=True), B=Sighting(5))
    e.shun(A, LATE)
    e.see({B: Sighting(5)})
    assert e.shunned() == []
    e.see({A: Sighting(5, leads=True), B: Sighting(5)})
    assert e.leader(LATE, able=False, leads=False) == A


def test_any_record_shows_that_a_peer_is_back_that_was_silent_before_its_first_one() -> None:
    e = election(C)
    e.shun(A, LATE)
    e.see({A: HERE, B: HERE})
    assert e.leader(LATE + SHUN_S, able=False, leads=False) == A


def test_denials_and_claims_of_several_peers_are_kept_apart() -> None:
    e = election(D, A=LEADS, B=LEADS, C=HERE)
    e.doubt(A, LATE)
    e.doubt(B, LATE + 1)
    assert e.leader(LATE + 1, able=False, leads=False) == C
    assert e.leader(LATE + DOUBT_S, able=False, leads=False) == A
    e = election(D, A=HERE, B=HERE, C=HERE)
    e.says(C, LATE)
    e.says(B, LATE + 1)
    assert e.leader(LATE + 1, able=False, leads=False) == B
    e.doubt(B, LATE + 2)
    assert e.leader(LATE + 2, able=False, leads=False) == C


def test_a_first_denial_long_ago_does_not_count_in_a_later_doubt() -> None:
    e = election(B, A=HERE)
    e.doubt(A, LATE)
    e.doubt(A, LATE + 10 * GRACE_S)
    assert e.leader(LATE + 10 * GRACE_S, able=True, leads=False) == A


def test_of_the_voters_the_one_that_voted_longest_takes_over() -> None:
    e = election(A)
    seen = {p: HERE for p in (B, C, D)}
    e.see(seen, order=(D, C, B, A))
    assert e.leader(LATE, able=True, leads=False) == D
    e.shun(D, LATE)
    assert e.leader(LATE, able=True, leads=False) == C
    e.see({B: HERE}, order=(D, C))
    assert e.leader(LATE, able=True, leads=False) == A, "neither of them votes"
    e.see({B: HERE}, order=(D, B))
    assert e.leader(LATE, able=True, leads=False) == B, "a voter comes before the smallest name"


def test_followers_that_the_owner_revokes_do_not_count() -> None:
    changes = ChangeStatus(Rules())
    trust = Trust("run", lambda *about: True, changes.revokes)
    admission = Admission(Terms(), trust, changes, lambda peer: True)
    follows = {PeerId("x"): A, PeerId("y"): A, C: B}
    view: Any = SimpleNamespace(ends={A: LEADS, B: LEADS}, follows=follows)
    colleagues = SimpleNamespace(all=frozenset())
    kit: Any = SimpleNamespace(
        me=D, stage=1, clock=VirtualClock(), work=SimpleNamespace(colleagues=colleagues)
    )
    following: Any = SimpleNamespace(member=SimpleNamespace(plan=None, leader=None))
    leading: Any = SimpleNamespace(leader=None)
    none: Any = None
    candidacy = Candidacy(kit, lambda: view, admission, none, following, leading)
    assert candidacy.leader_id() == A
    revoked = frozenset(map(mark, follows.keys() - {C}))
    changes.learns(Rules(revision=1, change="1", revoked=revoked))
    assert candidacy.leader_id() == B
