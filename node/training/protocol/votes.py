"""What members sign, so that others need not believe who tells them of it: votes on what an epoch
made, which together are a certificate, support for who leads, and two votes of one peer of which it
may cast one; and when enough of the voters agree. Pure. Enters: signed words of peers, a function
that checks a signature. Leaves: which of them count, and why a plan is not followed. Never: who
votes; that is :mod:`node.training.leader.voting`.

Two sides of a parted network cannot both have enough. Nor can the voters of one plan and those of
the next part from each other: a plan needs enough of both.

A member follows a plan of whom it followed before when it starts from what it made itself, or from
a version with a certificate. A plan of anybody else needs the support of those who voted last.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from node.core.ids import CellId, PeerId
from node.core.journey import Electorate, Plan, Version
from node.core.newest import Newest

CheckSignature = Callable[[PeerId, bytes, bytes, str], bool]
"""``(peer, data, signature, domain)``: whether the peer signed that."""
FRESH_S = 300.0
"""Support given so long ago, by two clocks that may differ, is no support any more, unless whoever
gave it had followed as new a plan as the member that checks it."""
FORGET_S = 60.0
"""Without a new certificate for so long, the voters of the last one are not what counts: who was
away, or was left alone, starts from what others have certified since."""
ALONE_S = 30.0
"""Who goes on without a majority has waited for it longer than this: a member that knows of a
certificate as young as that follows nobody who does."""
RIPE = 10
"""Epochs of a history before its voters are what counts: peers that start together may begin as two
swarms, and each gives up its own for the other's."""
TRUSTED_S = 5.0
"""A certificate for what a member has made itself, under the leader it follows, is checked once in
so long: a signature costs about a tenth of a millisecond, and a small epoch takes a few."""


BELIEVED = 2
"""Of so few voters one is enough: a majority of two would be lost with either."""
MOST_COMPARED = 512
"""Votes of one certificate that are compared with others."""
KEPT = 4096
"""Votes that are compared with later ones: of a few epochs where hundreds vote, of many where few
do. Of two votes that are further apart the second proves nothing here."""
MOST_PROVEN = 256
"""Peers that are known to have voted twice. A key costs nothing, but to vote takes ten epochs."""
MOST_TOLD = 8
"""Proofs in one message, the newest."""


def most(voters: Sequence[PeerId], among: Collection[PeerId]) -> bool:
    """More than half of them; of exact halves the one with the first. Of nobody that is nobody."""
    here = sum(p in among for p in voters)
    if len(voters) <= BELIEVED:
        return here > 0 or not voters
    return 2 * here > len(voters) or (2 * here == len(voters) and voters[0] in among)


def decide(e: Electorate, among: Collection[PeerId]) -> bool:
    """Whether these can commit what such a plan makes."""
    return most(e.voters, among) and (e.orphan or most(e.elders, among))


def vote_domain(run_id: str) -> str:
    """What a signature under a vote is for."""
    return f"tutti/vote/1/{run_id}"


def support_domain(run_id: str) -> str:
    """What a signature under a word of support is for."""
    return f"tutti/support/1/{run_id}"


def names(voters: Sequence[PeerId]) -> str:
    """32 hex digits for these voters in this order."""
    return hashlib.sha256("/".join(voters).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Vote:
    """The attempt of this term made ``version``, and the stage has parameters of this digest.
    ``voters``: :func:`names` of those of the plan. The version names the plan and what of it does
    not count, because its lineage is their hash."""

    cell: CellId
    term: int
    attempt: int
    version: Version
    voters: str
    stage: int
    digest: str

    def said(self) -> bytes:
        """The bytes that are signed."""
        v = self.version
        body = [self.cell, self.term, self.attempt, v.epoch, v.lineage, self.voters]
        return json.dumps([*body, self.stage, self.digest]).encode()


@dataclass(frozen=True, slots=True)
class Ballot:
    """A vote as a certificate has it: what differs from one voter to the next."""

    peer: PeerId
    stage: int
    attempt: int
    digest: str
    signature: bytes


@dataclass(frozen=True)
class Certificate:
    """``voters`` of the plan that made ``version``, in their order, and the ballots of those, or of
    the voters before them, who have committed it."""

    cell: CellId
    term: int
    version: Version
    voters: tuple[PeerId, ...]
    ballots: tuple[Ballot, ...]

    def vote(self, b: Ballot) -> Vote:
        """What a ballot is the signature of."""
        return Vote(self.cell, self.term, b.attempt, self.version, self._voters, b.stage, b.digest)

    @cached_property
    def _voters(self) -> str:
        return names(self.voters)

    def agreeing(self) -> list[Ballot]:
        """One of each peer, of those that say what most say of their stage."""
        once = {b.peer: b for b in self.ballots}.values()
        said: dict[int, Counter[str]] = {}
        for b in once:
            said.setdefault(b.stage, Counter())[b.digest] += 1
        agreed = {stage: max(sorted(of), key=of.__getitem__) for stage, of in said.items()}
        return [b for b in once if b.digest == agreed[b.stage]]


def support_said(cell: CellId, leader: PeerId, term: int, at: int) -> bytes:
    """What a peer signs that takes ``leader`` for the leader of its cell. ``term``: of the newest
    plan it has followed; ``at``: Unix time, whole seconds, by its clock."""
    return json.dumps([cell, leader, term, at]).encode()


@dataclass(frozen=True, slots=True)
class Supporter:
    """Who has signed :func:`support_said`, and the signature."""

    peer: PeerId
    term: int
    at: int
    signature: bytes


@dataclass(frozen=True, slots=True)
class DoubleVote:
    """Two votes of ``peer``, with its signatures under them."""

    peer: PeerId
    one: Vote
    other: Vote
    signatures: tuple[bytes, bytes]

    @property
    def contradicts(self) -> bool:
        """Whether the two are of one attempt, and differ."""
        a, b = self.one, self.other
        return (a.cell, a.term, a.attempt) == (b.cell, b.term, b.attempt) and a != b


class DoubleVotes:
    """Peers that have voted for two results of one attempt, which no honest one does: its
    signatures under both prove it to everybody. ``is_signed(vote, peer, signature)`` is asked only
    where two votes differ."""

    def __init__(self, is_signed: Callable[[Vote, PeerId, bytes], bool]) -> None:
        self._is_signed = is_signed
        self._cast: Newest[tuple[PeerId, CellId, int, int], tuple[Vote, bytes]] = Newest(KEPT)
        self._proofs: Newest[PeerId, DoubleVote] = Newest(MOST_PROVEN)
        self._news: list[DoubleVote] = []

    def __contains__(self, peer: object) -> bool:
        """Whether it is proven of this peer, whose votes do not count then."""
        return peer in self._proofs

    def told(self) -> tuple[DoubleVote, ...]:
        """For others: the newest proofs."""
        return tuple(self._proofs.values())[-MOST_TOLD:]

    def news(self) -> list[DoubleVote]:
        """What was proven since the last call."""
        found, self._news = self._news, []
        return found

    def saw(self, vote: Vote, peer: PeerId, signature: bytes) -> None:
        """A vote came by; whether it is signed is not known yet."""
        if peer in self._proofs:
            return
        key = (peer, vote.cell, vote.term, vote.attempt)
        known = self._cast.get(key)
        if known is None:
            self._cast[key] = vote, signature
        elif known[0] != vote and self._is_signed(vote, peer, signature):
            proof = DoubleVote(peer, known[0], vote, (known[1], signature))
            if self._is_signed(known[0], peer, known[1]):
                self._keep(proof)
            else:
                self._cast[key] = vote, signature

    def shown(self, proof: DoubleVote) -> bool:
        """Whether what somebody shows is a proof; it is kept."""
        if proof.peer in self._proofs:
            return True
        votes = zip((proof.one, proof.other), proof.signatures, strict=True)
        holds = proof.contradicts and all(self._is_signed(v, proof.peer, s) for v, s in votes)
        if holds:
            self._keep(proof)
        return holds

    def _keep(self, proof: DoubleVote) -> None:
        self._proofs[proof.peer] = proof
        self._news.append(proof)


@dataclass(frozen=True)
class Warrant:
    """What comes with a plan: why it may be followed. ``certificate``: of the version it starts
    from, None where the leader has none. ``doubles``: whose votes do not count, and why."""

    certificate: Certificate | None = None
    supporters: tuple[Supporter, ...] = ()
    doubles: tuple[DoubleVote, ...] = ()


NO_WARRANT = Warrant()


class Trust:
    """Who voted last, as far as this peer has seen a certificate; nobody before the first one,
    which is taken as it comes."""

    def __init__(self, run_id: str, check: CheckSignature) -> None:
        self._check, self._run = check, run_id
        self.doubles = DoubleVotes(self.vote_is_signed)
        self.voters: tuple[PeerId, ...] = ()
        self.version = Version(0)
        self.term = 0
        self.certificate: Certificate | None = None
        """The newest of what was believed, or of what was made here."""
        self._at = self._checked = float("-inf")

    def forget(self) -> None:
        """This peer belongs to another cell from now on; who voted twice did so wherever it
        was."""
        doubles = self.doubles
        self.__init__(self._run, self._check)
        self.doubles = doubles

    def vote_is_signed(self, vote: Vote, peer: PeerId, signature: bytes) -> bool:
        """Whether ``peer`` has cast it."""
        return self._check(peer, vote.said(), signature, vote_domain(self._run))

    def holds(self, now: float) -> bool:
        """Whether the voters of the last certificate are what counts at this moment."""
        return self.version.epoch >= RIPE and now - self._at <= FORGET_S

    def learns(self, c: Certificate, now: float) -> None:
        """This one is believed, or was made here, by who has checked the votes one by one."""
        self.voters, self.version, self.term, self.certificate = c.voters, c.version, c.term, c
        self._at = self._checked = now

    def shown(self, certificate: Certificate, cell: CellId, now: float) -> bool:
        """Whether a certificate that somebody has is believed; what is learned from it is kept."""
        self._compare(certificate)
        believed = certificate.cell == cell and self._believes(certificate, now)
        if believed:
            self.learns(certificate, now)
        return believed

    def doubts(
        self, version: Version, holders: Collection[PeerId], here: Collection[PeerId], now: float
    ) -> bool:
        """Whether too few of those who voted last can have committed a version of which no
        certificate is here: those who do not hold it have not, of those who are not here anybody
        may have."""
        if version == self.version or not self.holds(now):
            return False
        return not most(self.voters, {p for p in self.voters if p in holders or p not in here})

    def objection(
        self,
        plan: Plan,
        warrant: Warrant,
        follows: PeerId | None,
        at: Version,
        now: float,
        wall: float,
    ) -> str:
        """Why this plan is not followed; empty where it may be. ``follows``: whose plan was
        followed last; ``at``: the version in place. What is learned from its certificate is
        kept."""
        c = warrant.certificate
        if c is not None:
            self._compare(c)
        if c is not None and (c.version != plan.base or c.cell != (plan.parent or plan.cell_id)):
            return "its certificate is not of the version that the plan starts from"
        if plan.electorate.orphan:
            young = self.holds(now) and now - self._at < ALONE_S
            return (
                "it goes on without a majority of the voters, who are known to be there"
                if young
                else ""
            )
        same = follows == plan.leader
        if c is not None and same and plan.base == at and self._known(c, now):
            self._at, self.certificate = now, c
            return ""
        held, certified = self.holds(now), c is not None and self._believes(c, now)
        if certified and c is not None:
            self.learns(c, now)
        if not held:
            return ""
        if same and (certified or plan.base == self.version):
            return ""
        if most(self.voters, self._supporting(plan, warrant.supporters, wall)):
            return ""
        return (
            f"no majority of the {len(self.voters)} voters supports its leader"
            if certified or not same
            else "no majority of the voters has certified the version that it starts from"
        )

    def _compare(self, c: Certificate) -> None:
        """With the votes seen before, of those who vote here or are said to."""
        voters = {*self.voters, *c.voters}
        for b in [b for b in c.ballots if b.peer in voters][:MOST_COMPARED]:
            self.doubles.saw(c.vote(b), b.peer, b.signature)

    def _known(self, c: Certificate, now: float) -> bool:
        """Whether a certificate for what this peer has made itself need not be checked: the last
        one was a moment ago, and the same peers vote."""
        return c.voters == self.voters and now - self._checked < TRUSTED_S

    def _believes(self, c: Certificate, now: float) -> bool:
        """Whether enough of those who voted last have signed it. Before the first certificate, of
        those it names itself."""
        if self.holds(now) and (c.version.epoch, c.term) < (self.version.epoch, self.term):
            return False  # it was one once: whoever saw a newer one goes back for no old one
        voters = self.voters if self.holds(now) else c.voters
        known, signed = frozenset(voters), set[PeerId]()
        for b in c.agreeing():
            if b.peer in self.doubles:
                continue
            if b.peer in known and self.vote_is_signed(c.vote(b), b.peer, b.signature):
                signed.add(b.peer)
                if 2 * len(signed) >= len(voters) and most(voters, signed):
                    return True
        return False

    def _supporting(self, plan: Plan, supporters: Sequence[Supporter], wall: float) -> set[PeerId]:
        cell, found = plan.parent or plan.cell_id, set[PeerId]()
        for s in supporters:
            fresh = s.term >= self.term or abs(wall - s.at) <= FRESH_S
            if s.peer not in self.voters or s.peer in self.doubles or s.peer in found or not fresh:
                continue
            said = support_said(cell, plan.leader, s.term, s.at)
            if self._check(s.peer, said, s.signature, support_domain(self._run)):
                found.add(s.peer)
                if most(self.voters, found):
                    break
        return found
