"""Signed statements of members, which anybody may pass on and check: votes on the version that an
epoch made (enough of them are a certificate), support for a leader, and proofs that a peer voted
twice. Also: when enough voters agree. Pure. Enters: signed statements, a function that checks a
signature. Leaves: which of them count, and why a plan is not followed. Never: who votes; that is
:mod:`node.training.leader.starting_point`.

Two sides of a partitioned network cannot both have enough voters. Nor can the voters of one plan
and those of the next decide apart from each other: a plan needs a majority of both.

A member follows a plan of the leader that it followed before if the plan starts from the version
that the member made itself, or from one with a certificate. A plan of any other leader needs the
support of those who voted last.
"""

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
"""Support that is older than this, the signer's clock against ours, does not count, unless the
signer had followed as new a plan as the member that checks it."""
FORGET_S = 60.0
"""After this long without a new certificate a member no longer insists on the voters of its last
one: it was away or alone, and starts from what others have certified since."""
ALONE_S = 30.0
"""A member whose last certificate is younger than this follows no plan that goes on without a
majority: a leader waits longer than this for its voters before it makes such a plan."""
RIPE = 10
"""Certificates bind a member from this epoch of a history on: peers that start together may begin
as two swarms, and each may give up its history for the other's."""
TRUSTED_S = 5.0
"""A certificate for a version that the member made itself, under the leader it follows, is checked
once in so many seconds: a signature costs about 0.1 ms, and a small epoch takes a few ms."""


BELIEVED = 2
"""Of at most so many voters one is enough: if both were needed, losing either would stop the
cell."""
MOST_COMPARED = 512
"""Votes of one certificate that are compared with others."""
KEPT = 4096
"""Newest votes that later ones are compared with: those of a few epochs where hundreds vote, of
many where few do. Two contradicting votes that are further apart go unnoticed here."""
MOST_PROVEN = 256
"""Peers that are known to have voted twice. A key costs nothing, but to vote takes ten epochs."""
MOST_TOLD = 8
"""Proofs in one message, the newest."""


def is_majority(voters: Sequence[PeerId], among: Collection[PeerId]) -> bool:
    """Whether ``among`` has a majority of ``voters``: more than half of them, or exactly half with
    the first one; of at most :data:`BELIEVED` any one. True without voters."""
    here = sum(p in among for p in voters)
    if len(voters) <= BELIEVED:
        return here > 0 or not voters
    return 2 * here > len(voters) or (2 * here == len(voters) and voters[0] in among)


def decide(e: Electorate, among: Collection[PeerId]) -> bool:
    """Whether these voters can commit the version that a plan with this electorate makes."""
    return is_majority(e.voters, among) and (e.orphan or is_majority(e.elders, among))


def signing_domain(what: str, run_id: str) -> str:
    """What a signature under a plan, a vote or a word of support is for: it means nothing under
    anything else, or in another run."""
    return f"tutti/{what}/1/{run_id}"


def names(voters: Sequence[PeerId]) -> str:
    """32 hex digits for these voters in this order."""
    return hashlib.sha256("/".join(voters).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class Vote:
    """States that this attempt of this term made ``version``, and that the stage's parameters then
    have ``digest``. ``voters``: :func:`names` of the plan's voters. The lineage in ``version`` is a
    hash of the plan and of its dropped micro-batches, so the vote covers these too."""

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
        """The ballots for the most common digest of their stage, one for each peer."""
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
    """Peers that voted for two results of one attempt, which no honest peer does; its signatures
    under both votes are the proof. ``is_signed(vote, peer, signature)`` is called only when two
    votes differ."""

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
        """Compare a vote, whose signature was not checked yet, with earlier ones."""
        if peer in self._proofs:
            return
        key = (peer, vote.cell, vote.term, vote.attempt)
        known = self._cast.get(key)
        if known is None:
            self._cast[key] = vote, signature
        elif known[0] != vote and self._is_signed(vote, peer, signature):
            if self._is_signed(known[0], peer, known[1]):
                self._keep(DoubleVote(peer, known[0], vote, (known[1], signature)))
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
    """What comes with a plan to show that it may be followed. ``certificate``: of the version that
    the plan starts from, None when the leader has none. ``doubles``: proofs of double votes; the
    votes of these peers do not count."""

    certificate: Certificate | None = None
    supporters: tuple[Supporter, ...] = ()
    doubles: tuple[DoubleVote, ...] = ()


NO_WARRANT = Warrant()


class Trust:
    """The voters of the newest certificate that this peer has seen, and what follows from them.
    The first certificate is accepted without earlier voters to check it against."""

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
        return self._check(peer, vote.said(), signature, signing_domain("vote", self._run))

    def holds(self, now: float) -> bool:
        """Whether plans are held to the voters of the last certificate now: it is recent, and its
        history is past the first :data:`RIPE` epochs."""
        return self.version.epoch >= RIPE and now - self._at <= FORGET_S

    def learns(self, c: Certificate, now: float) -> None:
        """Take over a certificate whose votes were checked, or that was made here."""
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
        """Whether too few of the last voters can have committed ``version``, for which there is no
        certificate here. A voter that is ``here`` and no holder has not committed it; an absent one
        may have."""
        return (
            version != self.version
            and self.holds(now)
            and not is_majority(
                self.voters, {p for p in self.voters if p in holders or p not in here}
            )
        )

    def objection(
        self,
        plan: Plan,
        warrant: Warrant,
        follows: PeerId | None,
        at: Version,
        now: float,
        wall: float,
    ) -> str:
        """Why this plan is not followed; "" if it may be. ``follows``: the leader of the plan
        followed last; ``at``: the version in place. A certificate that comes with the plan and is
        believed is kept, also when the plan is not followed."""
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
        if (
            not held
            or (same and (certified or plan.base == self.version))
            or is_majority(self.voters, self._supporting(plan, warrant.supporters, wall))
        ):
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
        """Whether the signatures of a certificate for this peer's own version need no check: the
        last check was less than :data:`TRUSTED_S` ago, and the voters are the same."""
        return c.voters == self.voters and now - self._checked < TRUSTED_S

    def _believes(self, c: Certificate, now: float) -> bool:
        """Whether enough of those who voted last have signed it. Before the first certificate, of
        those it names itself."""
        if self.holds(now) and (c.version.epoch, c.term) < (self.version.epoch, self.term):
            return False  # outdated: this peer has seen a newer certificate
        voters = self.voters if self.holds(now) else c.voters
        known, signed = frozenset(voters), set[PeerId]()
        for b in c.agreeing():
            if b.peer in self.doubles:
                continue
            if b.peer in known and self.vote_is_signed(c.vote(b), b.peer, b.signature):
                signed.add(b.peer)
                if 2 * len(signed) >= len(voters) and is_majority(voters, signed):
                    return True
        return False

    def _supporting(self, plan: Plan, supporters: Sequence[Supporter], wall: float) -> set[PeerId]:
        cell, found = plan.parent or plan.cell_id, set[PeerId]()
        for s in supporters:
            fresh = s.term >= self.term or abs(wall - s.at) <= FRESH_S
            if s.peer not in self.voters or s.peer in self.doubles or s.peer in found or not fresh:
                continue
            said = support_said(cell, plan.leader, s.term, s.at)
            if self._check(s.peer, said, s.signature, signing_domain("support", self._run)):
                found.add(s.peer)
                if is_majority(self.voters, found):
                    break
        return found
