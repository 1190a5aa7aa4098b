"""Plans that the last voters stand behind."""

import contextlib
import os
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node.consensus.admission import Admission, Ground, Here, Refusal
from node.consensus.equivocation import DoubleVote
from node.consensus.rules import ChangeStatus, Rules, mark
from node.consensus.terms import Terms
from node.consensus.trust import (
    ALONE_EPOCHS,
    ALONE_S,
    FRESH_S,
    MOST_EPOCH_S,
    TRUSTED_S,
    Trust,
    Warrant,
)
from node.consensus.voters import FORGET_EPOCHS, FORGET_S, RIPE
from node.consensus.votes import (
    Ballot,
    Certificate,
    Supporter,
    Vote,
    names,
    signing_domain,
    support_said,
    vote_on,
)
from node.coordinator import notes
from node.coordinator.ledger import VoteLedger
from node.coordinator.plan_inbox import SAY_AGAIN_S, PlanInbox
from node.core.errors import Refused, WireError
from node.core.ids import NO_CELL, CellId, PeerId
from node.core.journey import Electorate, Plan, PlanMember, Version
from node.epoch.bounds import Bounds
from node.identity.keys import is_signed
from node.sim.process import SimSigner
from node.telemetry.events import Journal
from protos import training_pb2 as pb

RUN = "run"
A, B, C, D, E, F, G = (PeerId(name) for name in "ABCDEFG")
VOTERS = (A, B, C, D, E)
STRANGERS = tuple(PeerId(f"x{i}") for i in range(9))
CELL = CellId("00000000000000aa")


def signed(peer: PeerId, said: bytes, domain: str) -> bytes:
    return SimSigner(peer).sign(said, domain)


checks = partial(is_signed, SimSigner(PeerId("me")))


def version(epoch: int, line: str = "a") -> Version:
    return Version(epoch, line * 32)


def certificate(
    of: Version,
    by: tuple[PeerId, ...],
    voters: tuple[PeerId, ...] = VOTERS,
    term: int = 20,
    cell: CellId = NO_CELL,
) -> Certificate:
    said = Vote(cell, term, 0, of, names(voters), 1, "digest").said()
    ballots = (Ballot(p, 1, 0, "digest", signed(p, said, signing_domain("vote", RUN))) for p in by)
    return Certificate(cell, term, of, voters, tuple(ballots))


def supporters(
    leader: PeerId, by: tuple[PeerId, ...], term: int = 20, at: int = 1000
) -> tuple[Supporter, ...]:
    said = support_said(NO_CELL, leader, term, at)
    return tuple(
        Supporter(p, term, at, signed(p, said, signing_domain("support", RUN))) for p in by
    )


def plan(leader: PeerId, base: Version, term: int = 21, orphan: bool = False) -> Plan:
    members = tuple(PlanMember(p, 1) for p in VOTERS)
    e = Electorate(VOTERS, VOTERS, orphan)
    return Plan(base.epoch, term, leader, members, (), {}, lineage=base.lineage, electorate=e)


HERE = version(RIPE)
NEXT = version(RIPE + 1, "b")


def trusting(now: float = 0.0) -> Trust:
    """Trust of a member that has seen a quorum certificate for HERE under leader A."""
    trust = Trust(RUN, checks)
    assert not asks(trust, plan(A, HERE), Warrant(certificate(HERE, (A, B, C))), now=now)
    assert trust.voters == VOTERS
    return trust


def asks(
    trust: Trust,
    of: Plan,
    warrant: Warrant,
    *,
    follows: PeerId | None = A,
    at: Version | None = None,
    now: float = 1.0,
    wall: float = 1000.0,
) -> str:
    return trust.objection(of, warrant, follows, at or version(RIPE, "z"), now, wall)


OLD = 1000 - int(FRESH_S) - 1
"""Unix time of support that is too old when it is checked at 1000."""
UNSIGNED = tuple(Ballot(p, 1, 0, "digest", b"s" * 32) for p in VOTERS)
CERTIFIED = certificate(NEXT, VOTERS, term=21)
FORGED = {
    "none": None,
    "few": certificate(NEXT, (A, B)),
    "strangers": certificate(NEXT, STRANGERS),
    "their-own": certificate(NEXT, STRANGERS, STRANGERS),
    "unsigned": replace(certificate(NEXT, (A, B)), ballots=UNSIGNED),
    "moved": replace(certificate(HERE, VOTERS), version=NEXT),
    "term": replace(certificate(NEXT, VOTERS), term=2**40),
    "voters": replace(certificate(NEXT, VOTERS), voters=(A, B, C)),
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_what_no_majority_has_signed_is_not_gone_on_from(forged: Certificate | None) -> None:
    trust = trusting()
    assert "certified" in asks(trust, plan(A, NEXT), Warrant(forged))
    assert (trust.voters, trust.version) == (VOTERS, HERE)


def backed(
    by: tuple[PeerId, ...], proof: Certificate | None = None, leader: PeerId = B, **given: int
) -> Warrant:
    return Warrant(proof, supporters(leader, by, **given))


WHY = {
    "uncertified": (plan(A, NEXT), Warrant(), "certified"),
    "certified-last": (plan(A, HERE), Warrant(), ""),
    "another-version": (plan(A, NEXT), Warrant(certificate(HERE, VOTERS)), "certificate"),
    "another-cell": (plan(A, NEXT), Warrant(replace(CERTIFIED, cell=CELL)), "certificate"),
    "unsupported": (plan(B, NEXT), Warrant(CERTIFIED), "supports"),
    "few": (plan(B, NEXT), backed((B, C), CERTIFIED), "supports"),
    "strangers": (plan(B, NEXT), backed((B, C, *STRANGERS), CERTIFIED), "supports"),
    "for-another": (plan(B, NEXT), backed((B, C, D), CERTIFIED, C), "supports"),
    "a-majority": (plan(B, NEXT), backed((B, C, D), CERTIFIED), ""),
    "few-to-go-back": (plan(B, version(3)), backed((B, C)), "supports"),
    "a-majority-to-go-back": (plan(B, version(3)), backed((B, C, D)), ""),
    "old-of-the-newest-term": (plan(B, HERE), backed((B, C, D), term=20, at=OLD), ""),
    "old": (plan(B, HERE), backed((B, C, D), term=19, at=OLD), "supports"),
    "fresh": (plan(B, HERE), backed((B, C, D), term=19, at=999), ""),
}


@pytest.mark.parametrize(("made", "warrant", "why"), WHY.values(), ids=WHY)
def test_a_plan_needs_its_certificate_or_support(made: Plan, warrant: Warrant, why: str) -> None:
    """Whether the member made the version that the plan starts from or not."""
    for at in (None, made.base):
        said = asks(trusting(), made, warrant, at=at)
        assert why in said
        assert bool(said) is bool(why)


@pytest.mark.parametrize(
    ("made", "proof", "at", "until"),
    [
        (plan(B, HERE, orphan=True), None, None, ALONE_S),
        (
            plan(F, version(90, "c"), 100),
            certificate(version(90, "c"), (F, G), (F, G), 99),
            None,
            FORGET_S,
        ),
    ],
    ids=["alone", "parted"],
)
def test_what_is_refused_at_first_is_followed_later(
    made: Plan, proof: Certificate | None, at: Version | None, until: float
) -> None:
    """A remaining voter goes on alone only after a while, and a peer that was alone for long
    believes others."""
    trust = trusting()
    warrant = Warrant(proof)
    assert asks(trust, made, warrant, at=at, now=until - 1)
    assert not asks(trust, made, warrant, at=at, now=until + 1)
    assert trust.voters == (proof.voters if proof is not None else VOTERS)


def test_what_was_made_here_is_checked_once_in_a_while() -> None:
    trust = trusting()
    unsigned = replace(certificate(NEXT, ()), term=21)
    new_voters = replace(certificate(NEXT, (), (A, *STRANGERS)), term=21)
    assert asks(trust, plan(A, NEXT), Warrant(new_voters), at=NEXT), "they are checked at once"
    assert not asks(trust, plan(A, NEXT), Warrant(unsigned), at=NEXT, now=TRUSTED_S - 1)
    assert asks(trust, plan(A, NEXT), Warrant(unsigned), at=NEXT, now=TRUSTED_S + 1)


async def test_a_plan_that_is_not_followed_is_said_once_a_minute() -> None:
    at = SimpleNamespace(now=0.0)
    journal = Journal()
    clock: Any = SimpleNamespace(now=lambda: at.now, wall=lambda: 1000.0)
    admission = Admission(Terms(), trusting(), ChangeStatus(Rules()), lambda peer: True)
    statements: Any = SimpleNamespace(is_plan_of=lambda *about: True)
    work: Any = SimpleNamespace(objection=lambda plan: "", read=lambda change: Rules())
    inbox = PlanInbox(admission, statements, Bounds(NEXT.epoch, 0), work, clock, journal)
    note = pb.PlanNote(plan=plan(B, NEXT).canonical())
    for at.now in (0.0, SAY_AGAIN_S - 1, SAY_AGAIN_S):
        here = Here(NO_CELL, HERE, A, False, None, at.now, 1000.0)
        refused = await inbox.receive(B, note, True, lambda here=here: here)
        assert isinstance(refused, Refusal)
        assert refused.ground is Ground.UNSUPPORTED
    said = [event for event in journal.recent() if event.kind == "plan-refused"]
    assert len(said) == 2
    assert said[0].text.startswith(f"a plan of {B} is not followed: ")


def test_bounds_of_time_belong_to_what_they_allow() -> None:
    alone = plan(B, HERE, orphan=True)
    assert not asks(trusting(), alone, Warrant(), now=ALONE_S)
    own = Warrant(replace(certificate(NEXT, ()), term=21))
    assert asks(trusting(), plan(A, NEXT), own, at=NEXT, now=TRUSTED_S)
    at_last = 1000 - int(FRESH_S)
    assert not asks(trusting(), plan(B, HERE), backed((B, C, D), term=19, at=at_last))
    assert "supports" in asks(trusting(), plan(B, HERE), Warrant(), now=FORGET_S)


@pytest.mark.parametrize("epoch_s", [0.0, 120.0, MOST_EPOCH_S])
def test_voters_are_needed_for_as_long_as_epochs_last(epoch_s: float) -> None:
    alone_s = max(ALONE_S, ALONE_EPOCHS * epoch_s)
    forget_s = max(FORGET_S, FORGET_EPOCHS * epoch_s)
    for of, held_s in ((plan(B, HERE, orphan=True), alone_s), (plan(B, HERE), forget_s + 0.5)):
        for now, followed in ((held_s - 0.5, False), (held_s, True)):
            trust = trusting()
            trust.expects(epoch_s)
            assert (asks(trust, of, Warrant(), now=now) == "") is followed


def test_a_forecast_binds_nobody_for_good() -> None:
    trust = trusting()
    trust.expects(1e17)
    assert not trust.holds(FORGET_EPOCHS * MOST_EPOCH_S + 1)


def test_a_certificate_of_the_own_version_keeps_the_voters_in_force() -> None:
    trust = trusting()
    unsigned = replace(certificate(NEXT, ()), term=21)
    assert not asks(trust, plan(A, NEXT), Warrant(unsigned), at=NEXT, now=TRUSTED_S - 1)
    assert trust.certificate == unsigned, "it is shown to others"
    assert trust.quorum.at == TRUSTED_S - 1
    assert trust.holds(FORGET_S + 1)


def test_only_the_leader_followed_here_may_leave_its_certificate_unchecked() -> None:
    unsigned = Warrant(replace(certificate(NEXT, ()), term=21), supporters(B, (B, C)))
    assert asks(trusting(), plan(B, NEXT), unsigned, at=NEXT)
    assert asks(trusting(), plan(A, NEXT), unsigned, at=HERE)


def test_a_majority_of_many_voters_is_enough() -> None:
    many = tuple(PeerId(f"v{n}") for n in range(10))
    for signers, believed in ((many[:5], True), (many[1:6], False), (many[4:], True)):
        trust = Trust(RUN, checks)
        assert trust.shown(certificate(NEXT, signers, many), NO_CELL, 1.0) is believed


def test_a_founding_plan_is_vouched_for_in_its_parent() -> None:
    founds = replace(plan(A, NEXT), cell_id=CellId("00000000000000bb"), parent=CELL)
    of_parent = Warrant(certificate(NEXT, VOTERS, term=21, cell=CELL))
    assert not asks(trusting(), founds, of_parent)
    said = support_said(CELL, B, 20, 1000)
    signed_for = [(p, signed(p, said, signing_domain("support", RUN))) for p in (B, C, D)]
    by_parent = tuple(Supporter(p, 20, 1000, signature) for p, signature in signed_for)
    assert not asks(trusting(), replace(founds, leader=B), replace(of_parent, supporters=by_parent))


def test_another_cell_is_believed_from_its_first_certificate_on() -> None:
    trust = trusting()
    trust.forget()
    assert (trust.voters, trust.term, trust.certificate) == ((), 0, None)
    assert not trust.holds(1.0)
    assert not asks(trust, plan(F, NEXT), Warrant(), follows=None)


def test_an_old_certificate_is_not_shown_a_second_time() -> None:
    trust = trusting()
    newer = certificate(NEXT, VOTERS, term=21)
    assert not asks(trust, plan(A, NEXT), Warrant(newer))
    again = certificate(HERE, VOTERS, term=20)
    assert "certified" in asks(trust, plan(A, HERE, term=30), Warrant(again))
    assert trust.version == NEXT


def test_votes_and_support_of_the_revoked_do_not_count() -> None:
    changes = ChangeStatus(Rules())
    changes.learns(Rules(revision=1, change="c", revoked=frozenset({mark(A), mark(B)})))
    unsupported = plan(C, HERE)
    for forgets in (False, True):
        trust = Trust(RUN, checks, changes.revokes)
        if forgets:
            trust.forget()
        assert not trust.shown(certificate(HERE, (A, B, C)), NO_CELL, 0.0), "one of five"
        assert trust.shown(certificate(HERE, (C, D, E)), NO_CELL, 0.0)
        assert not trust.shown(certificate(NEXT, (A, C, D), term=21), NO_CELL, 1.0)
        assert "supports" in asks(trust, unsupported, backed((A, B, C, D), leader=C))
        assert not asks(trust, unsupported, backed((A, C, D, E), leader=C))


def test_a_young_history_binds_nobody() -> None:
    trust = Trust(RUN, checks)
    young = version(RIPE - 1)
    assert not asks(trust, plan(A, young), Warrant(certificate(young, VOTERS)))
    assert not asks(trust, plan(B, version(2, "c")), Warrant())


def test_voters_change_by_certificates_of_those_before() -> None:
    trust = trusting()
    voters = (A, F, G)
    handed = certificate(NEXT, (A, B, C), voters, term=21)
    assert not asks(trust, plan(A, NEXT), Warrant(handed))
    after = version(RIPE + 2, "c")
    assert not asks(trust, plan(A, after, 23), Warrant(certificate(after, (F, G), voters, 22)))
    assert trust.version == after


def test_a_vote_is_on_the_version_that_an_attempt_of_the_plan_made() -> None:
    made = replace(plan(A, HERE), cell_id=CELL)
    expected = Vote(CELL, 21, 2, NEXT, names(VOTERS), 1, "digest")
    assert vote_on(made, NEXT, 2, 1, "digest") == expected


def test_one_stage_counts_with_one_digest() -> None:
    for digests in ("xxxyy", "yyyxx"):
        odd = [Ballot(p, 1, 0, digest, b"") for p, digest in zip(VOTERS, digests, strict=True)]
        found = Certificate(NO_CELL, 1, HERE, VOTERS, (*odd, Ballot(A, 1, 0, digests[0], b"")))
        assert [b.peer for b in found.agreeing()] == [A, B, C]


ONE, OTHER = (Vote(NO_CELL, 21, 0, v, names(VOTERS), 1, "digest") for v in (HERE, NEXT))
DOUBLES = tuple(DoubleVote(p, ONE, OTHER, (b"s", b"t")) for p in (C, D))


@pytest.mark.parametrize(
    "sent", [Warrant(certificate(NEXT, (A, B)), supporters(A, (B, C)), DOUBLES), Warrant()]
)
def test_a_warrant_travels_whole(sent: Warrant) -> None:
    note = notes.plan_note(plan(A, NEXT), b"s", sent)
    assert notes.parse_warrant(pb.Note.FromString(note.SerializeToString()).plan) == sent


def test_a_warrant_that_is_none_is_refused() -> None:
    note = notes.plan_note(plan(A, NEXT), b"s", Warrant(certificate(NEXT, (A,)))).plan
    note.certificate.ballots[0].signature = b"x" * 65
    with pytest.raises(WireError, match="signature"):
        notes.parse_warrant(note)
    note.certificate.ballots[0].signature = b""
    note.certificate.cell = "../x"
    with pytest.raises(WireError, match="cell"):
        notes.parse_warrant(note)


def test_nobody_votes_twice_not_even_started_again(tmp_path: Path) -> None:
    path = tmp_path / "votes"
    first = VoteLedger(path)
    for attempt, said in ((0, b"this"), (0, b"this"), (1, b"that")):
        first.cast(NO_CELL, 5, attempt, said)
    for ledger in (first, VoteLedger(path)):
        assert ledger.term(NO_CELL) == 5
        for term, attempt, said in ((5, 0, b"this"), (5, 1, b"other"), (4, 9, b"x")):
            with pytest.raises(Refused, match="vote"):
                ledger.cast(NO_CELL, term, attempt, said)
        ledger.cast(NO_CELL, 5, 1, b"that")


def test_another_cell_has_votes_of_its_own(tmp_path: Path) -> None:
    ledger = VoteLedger(tmp_path / "votes")
    ledger.cast(NO_CELL, 50, 0, b"this")
    ledger.cast(CELL, 3, 0, b"that")
    again = VoteLedger(tmp_path / "votes")
    assert (again.term(CELL), again.term(NO_CELL)) == (3, 0)


def open_files() -> set[str]:
    """Paths of the files that this process has open."""
    found = set[str]()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{fd}"))
    return found


def test_a_ledger_keeps_no_file_open(tmp_path: Path) -> None:
    """A peer that changes its stage begins with a new one."""
    path = tmp_path / "votes"
    ledger = VoteLedger(path)
    ledger.cast(NO_CELL, 5, 0, b"this")
    assert str(path.resolve()) not in open_files()


@pytest.mark.parametrize("cut", [0, 1, 40, 80, 100])
def test_a_torn_row_leaves_the_one_before(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "votes"
    ledger = VoteLedger(path)
    for term in (7, 8):
        ledger.cast(NO_CELL, term, 0, b"x")
    raw = path.read_bytes()
    half = len(raw) // 2
    path.write_bytes(raw[: min(cut, half)] + bytes(max(0, half - cut)) + raw[half:])
    assert VoteLedger(path).term(NO_CELL) in (7, 8)
    path.write_bytes(b"nonsense")
    assert VoteLedger(path).term(NO_CELL) == 0


def test_a_disk_without_room_stops_no_vote(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    ledger = VoteLedger(blocked / "votes")
    ledger.cast(NO_CELL, 1, 0, b"x")
    assert ledger.term(NO_CELL) == 1
