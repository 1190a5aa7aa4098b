"""Plans that the last voters stand behind."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node.core.errors import Refused, WireError
from node.core.ids import NO_CELL, CellId, PeerId
from node.core.journey import Electorate, Plan, PlanMember, Version
from node.identity.keys import is_signed
from node.sim.process import SimSigner
from node.telemetry.events import Journal
from node.training.protocol import notes
from node.training.protocol.votes import (
    ALONE_S,
    FORGET_S,
    FRESH_S,
    RIPE,
    TRUSTED_S,
    Ballot,
    Certificate,
    DoubleVote,
    Supporter,
    Trust,
    Vote,
    Warrant,
    names,
    signing_domain,
    support_said,
)
from node.training.service import SAY_AGAIN_S, Training
from node.training.state.ledger import VoteLedger
from protos import training_pb2 as pb
from testbed.fakes.clock import VirtualClock

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
    said = asks(trusting(), made, warrant)
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


def test_a_plan_that_is_not_followed_is_said_once_a_minute() -> None:
    clock = VirtualClock(0.0)
    journal = Journal()
    member: Any = object.__new__(Training)
    member.__dict__ |= {
        "member": SimpleNamespace(plan=plan(A, HERE), at=HERE),
        "trust": trusting(),
        "clock": clock,
        "journal": journal,
        "_learn": lambda doubles: None,
        "_bar": lambda: None,
        "_said_refused": -SAY_AGAIN_S,
    }
    note = pb.PlanNote(plan=plan(B, NEXT).canonical())
    for seconds in (0.0, SAY_AGAIN_S - 1, 1.0):
        clock.advance(seconds)
        assert member._distrusts(plan(B, NEXT), note)
    said = [event for event in journal.recent() if event.kind == "plan-refused"]
    assert len(said) == 2
    assert said[0].text.startswith(f"a plan of {B} is not followed: ")


def test_an_old_certificate_is_not_shown_a_second_time() -> None:
    trust = trusting()
    newer = certificate(NEXT, VOTERS, term=21)
    assert not asks(trust, plan(A, NEXT), Warrant(newer))
    again = certificate(HERE, VOTERS, term=20)
    assert "certified" in asks(trust, plan(A, HERE, term=30), Warrant(again))
    assert trust.version == NEXT


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


def test_one_stage_counts_with_one_digest() -> None:
    odd = [Ballot(p, 1, 0, digest, b"") for p, digest in zip(VOTERS, "xxxyy", strict=True)]
    found = Certificate(NO_CELL, 1, HERE, VOTERS, (*odd, Ballot(A, 1, 0, "x", b"")))
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
