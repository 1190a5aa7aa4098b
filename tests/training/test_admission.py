"""Which plan a peer follows, and why it refuses another: every ground once, in order."""

from dataclasses import replace

import pytest

from node.consensus.admission import (
    LARGE_PLAN,
    OTHER_LEADER,
    Admission,
    Ground,
    Here,
    Holdings,
    Received,
    Refusal,
    unfollowable,
)
from node.consensus.rules import ChangeStatus, Rules, mark
from node.consensus.tally import VOTES, VoteTally
from node.consensus.terms import STEP, Terms
from node.consensus.trust import Trust, Warrant
from node.consensus.voters import Commitment
from node.consensus.votes import Vote, names, signing_domain
from node.core.ids import NO_CELL, CellId, PeerId
from node.core.journey import PlanMember, Version
from tests.training.test_double_votes import proof
from tests.training.test_votes import HERE as AT
from tests.training.test_votes import (
    NEXT,
    RUN,
    VOTERS,
    A,
    B,
    C,
    D,
    certificate,
    checks,
    plan,
    signed,
    supporters,
)

OURS = CellId("00000000000000aa")
THEIRS = CellId("00000000000000bb")
CAME = Received(A, heeded=True)
STANDS = Here(NO_CELL, AT, A, committed=False, heard=None, now=1.0, wall=1000.0)


def admission(change: Rules | None = None) -> Admission:
    """Admission at a member that follows A and has seen a plan of term 20."""
    terms = Terms()
    terms.saw(20, 1000.0)
    changes = ChangeStatus(Rules())
    if change is not None:
        changes.follows(A, change)
    trust = Trust(RUN, checks, changes.revokes)
    trust.learns(certificate(AT, VOTERS), 0.0)
    return Admission(terms, trust, changes, lambda peer: peer != C)


def test_an_acceptable_plan_is_admitted() -> None:
    assert admission().admit(plan(A, AT), CAME, STANDS) is None


UNDONE = replace(STANDS, at=NEXT, follows=B, committed=True)
FORGED = Warrant(doubles=(replace(proof(C), peer=B),))
REFUSED = {
    "sent-by-another": (plan(A, AT), replace(CAME, sender=B), STANDS, Ground.FAULT),
    "numbers": (plan(A, AT), replace(CAME, numbers="too many"), STANDS, Ground.FAULT),
    "term": (plan(A, AT, term=21 + STEP), CAME, STANDS, Ground.FAULT),
    "unheeded": (plan(A, AT), replace(CAME, heeded=False), STANDS, Ground.ELSEWHERE),
    "cell": (plan(A, AT), CAME, replace(STANDS, cell=OURS), Ground.ELSEWHERE),
    "founds-nothing": (
        replace(plan(A, AT), parent=OURS),
        CAME,
        replace(STANDS, cell=OURS),
        Ground.ELSEWHERE,
    ),
    "work": (plan(A, AT), replace(CAME, work="no stage"), STANDS, Ground.FAULT),
    "undoes": (plan(A, AT), CAME, UNDONE, Ground.OUTDATED),
    "proves-nothing": (plan(A, AT), replace(CAME, warrant=FORGED), STANDS, Ground.FAULT),
    "unsupported": (plan(B, AT), replace(CAME, sender=B), STANDS, Ground.UNSUPPORTED),
}


@pytest.mark.parametrize("name", REFUSED)
def test_every_ground_refuses_a_plan(name: str) -> None:
    refused, came, here, ground = REFUSED[name]
    found = admission().admit(refused, came, here)
    assert isinstance(found, Refusal)
    assert found.ground is ground
    assert found.reason


def test_an_older_change_is_refused_unless_the_plan_ends_the_run() -> None:
    works = replace(plan(A, AT), outer=3)
    found = admission(Rules(revision=2, change="2")).admit(works, CAME, STANDS)
    assert isinstance(found, Refusal)
    assert found.ground is Ground.OUTDATED
    assert "change 2" in found.reason
    assert admission(Rules(revision=2)).admit(plan(A, AT), CAME, STANDS) is None


def test_a_leader_that_knows_the_commit_does_not_undo_it() -> None:
    known = replace(UNDONE, heard=(A, NEXT))
    warrant = Warrant(supporters=supporters(A, VOTERS))
    assert admission().admit(plan(A, AT), replace(CAME, warrant=warrant), known) is None


def test_a_commit_is_undone_only_by_another_leader_that_lacks_it() -> None:
    warrant = Warrant(supporters=supporters(A, VOTERS))
    backed = replace(CAME, warrant=warrant)
    for here in (
        replace(UNDONE, committed=False),
        replace(UNDONE, follows=A),
        replace(UNDONE, at=AT),
    ):
        assert admission().admit(plan(A, AT), backed, here) is None
    for heard in ((B, NEXT), (A, AT)):
        found = admission().admit(plan(A, AT), backed, replace(UNDONE, heard=heard))
        assert found is not None
        assert found.ground is Ground.OUTDATED


def test_the_highest_term_that_can_have_been_reached_is_admitted() -> None:
    assert admission().admit(plan(A, AT, term=20 + STEP), CAME, STANDS) is None


def test_every_proof_of_a_double_vote_is_kept_also_beside_a_forged_one() -> None:
    made = admission()
    came = replace(CAME, warrant=Warrant(doubles=(FORGED.doubles[0], proof(C), proof(D))))
    found = made.admit(plan(A, AT), came, STANDS)
    assert found is not None
    assert found.ground is Ground.FAULT
    assert made.trust.doubles.peers == {C, D}


def test_a_leader_is_told_the_proofs_that_its_last_plan_did_not_carry() -> None:
    made = admission()
    assert made.untold(A) == ()
    assert made.admit(plan(A, AT), replace(CAME, warrant=Warrant(doubles=(proof(C),))), STANDS) is (
        None
    )
    assert made.trust.doubles.shown(proof(D))
    assert made.untold(A) == (proof(D),)
    assert made.untold(B) == (proof(C), proof(D))


def test_who_voted_twice_or_is_revoked_or_is_not_admitted_may_not_lead() -> None:
    made = admission()
    assert [made.may_lead(peer) for peer in (A, B, C)] == [True, True, False]
    assert made.trust.doubles.shown(proof(A))
    made.changes.learns(Rules(revision=1, change="1", revoked=frozenset({mark(B)})))
    assert [made.may_lead(peer) for peer in (A, B, D)] == [False, False, True]


def test_a_plan_that_founds_a_cell_comes_from_its_parent() -> None:
    founds = replace(plan(A, AT), cell_id=THEIRS, parent=OURS)
    assert admission().admit(founds, CAME, replace(STANDS, cell=OURS)) is None


@pytest.mark.parametrize(
    ("sender", "heeded", "nbytes", "holds", "ground"),
    [
        (A, True, LARGE_PLAN + 1, True, None),
        (A, True, 1, False, Ground.FAULT),
        (C, True, 1, True, Ground.ELSEWHERE),
        (A, False, LARGE_PLAN + 1, True, Ground.ELSEWHERE),
        (A, False, LARGE_PLAN, False, None),
    ],
    ids=["large", "unsigned", "may-not-lead", "strangers-large", "strangers-small"],
)
def test_a_sender_is_admitted_before_its_plan_is_parsed(
    sender: PeerId, heeded: bool, nbytes: int, holds: bool, ground: Ground | None
) -> None:
    found = admission().admit_sender(sender, heeded, nbytes, lambda: holds)
    assert (found and found.ground) == ground
    if not heeded and ground is not None:
        assert found == Refusal(ground, OTHER_LEADER)


HELD = Holdings(NEXT, AT, (Version(3, "c" * 32),), 20, "digest")
MINE = replace(plan(A, NEXT), members=(PlanMember(B, 1),), digests={1: "digest"})


@pytest.mark.parametrize(
    ("taken", "why"),
    [
        (MINE, ""),
        (replace(MINE, term=20), "term 20 is over"),
        (replace(MINE, members=()), "not in the plan"),
        (replace(MINE, digests={1: "other"}), "not those of the cell"),
        (replace(MINE, digests={2: "other"}), ""),
        (replace(MINE, epoch=AT.epoch, lineage=AT.lineage), ""),
        (replace(MINE, epoch=3, lineage="c" * 32), ""),
        (replace(MINE, epoch=4), "epoch 4 of that history is not here"),
        (replace(MINE, epoch=4, stood={1: Version(3, "c" * 32)}), ""),
        (replace(MINE, epoch=4, stood={1: NEXT}), ""),
        (replace(MINE, epoch=4, stood={1: Version(2, "c" * 32)}), "epoch 4 of that history"),
        (replace(MINE, epoch=4, stood={2: NEXT}), "epoch 4 of that history is not here"),
        (replace(MINE, epoch=4, members=(PlanMember(B, 1, 0.0, False),)), ""),
    ],
    ids=[
        "base",
        "old-term",
        "no-member",
        "other-digest",
        "digest-of-another-stage",
        "undo",
        "checkpoint",
        "elsewhere",
        "stood",
        "stands",
        "stood-at-another",
        "another-stage-stood",
        "listener",
    ],
)
def test_a_member_takes_a_plan_whose_base_it_can_put_in_place(taken, why: str) -> None:
    found = unfollowable(taken, B, HELD)
    assert why in found
    assert bool(found) == bool(why)


def test_parameters_of_unknown_digest_are_taken_for_the_cells() -> None:
    assert unfollowable(MINE, B, replace(HELD, digest="")) == ""


# ------------------------------------------------------------ votes become a certificate


def vote(attempt: int = 0, term: int = 20) -> Vote:
    return Vote(NO_CELL, term, attempt, NEXT, names(VOTERS), 1, "digest")


def cast(tally: VoteTally, peer: PeerId, one: Vote) -> None:
    tally.cast(peer, one, signed(peer, one.said(), signing_domain("vote", RUN)))


def commit(*by: PeerId) -> Commitment:
    return Commitment(NO_CELL, 20, NEXT, VOTERS, tuple((p, 1, 0, "digest") for p in by))


def test_a_certificate_has_the_votes_that_the_commit_names() -> None:
    tally = VoteTally(Trust(RUN, checks))
    for peer in (A, B, C):
        cast(tally, peer, vote())
    tally.certify(commit(A, B))
    assert tally.certificate(NEXT) == certificate(NEXT, (A, B))
    tally.certify(commit(A, B, C))
    assert tally.certificate(NEXT) == certificate(NEXT, (A, B)), "it is made once"
    assert tally.certificate(AT) is None


def test_without_a_vote_there_is_no_certificate() -> None:
    tally = VoteTally(Trust(RUN, checks))
    tally.cast(A, vote(), b"")
    cast(tally, B, vote(attempt=1))
    tally.certify(commit(A, B, C))
    assert tally.certificate(NEXT) is None


def test_no_version_has_no_certificate() -> None:
    assert VoteTally(Trust(RUN, checks)).certificate(None) is None


def test_a_certificate_of_another_cell_is_not_believed() -> None:
    trust = Trust(RUN, checks)
    shown = certificate(NEXT, VOTERS, cell=OURS)
    assert not trust.shown(shown, THEIRS, 1.0)
    assert trust.certificate is None
    assert trust.shown(shown, OURS, 1.0)
    assert trust.certificate == shown
    assert trust.shown(shown, OURS, 2.0), "it may be shown again"


def test_a_new_term_drops_the_votes_of_the_one_before() -> None:
    tally = VoteTally(Trust(RUN, checks))
    cast(tally, A, vote())
    cast(tally, B, vote(term=21))
    tally.certify(commit(A, B))
    assert tally.certificate(NEXT) is None


def test_votes_of_one_peer_and_of_earlier_terms_take_no_memory() -> None:
    tally = VoteTally(Trust(RUN, checks))
    for attempt in range(9 * VOTES):
        cast(tally, A, vote(attempt))
    assert len(tally._votes[A]) == VOTES
    cast(tally, B, vote(term=21))
    assert set(tally._votes) == {B}
