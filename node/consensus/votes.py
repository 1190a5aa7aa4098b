"""Signed statements of members, which anybody may pass on and check: votes on the version that an
epoch made (enough of them are a certificate), support for a leader, and proofs that a peer voted
twice. Also: when enough voters agree. Pure. Enters: signed statements, a function that checks a
signature. Leaves: the statements that count, and the reason why a plan is not followed. Never: the
choice of voters; that is :mod:`node.epoch.leader.starting_point`.

Two sides of a partitioned network cannot both have enough voters. Nor can the voters of one plan
and of the next decide apart from each other: a plan needs a majority of both.

A member follows a plan of the leader that it followed before if the plan starts from the version
that the member made itself, or from one with a certificate. A plan of any other leader needs the
support of a majority of the last voters.
"""

import hashlib
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property

from node.core.ids import CellId, PeerId
from node.core.journey import Electorate, Plan, Version
from node.core.newest import Newest

CheckSignature = Callable[[PeerId, bytes, bytes, str], bool]
"""``(peer, data, signature, domain)``: True if the peer signed the data."""
FRESH_S = 300.0
"""Seconds after which support no longer counts, by the signer's clock against ours, unless the
signer had followed as new a plan as the member that checks it."""
FORGET_S = 60.0
"""Seconds without a new certificate after which a member no longer insists on the voters of its
last one: it was away or alone, and starts from newer certificates of other peers."""
ALONE_S = 30.0
"""Seconds after its last certificate before a member follows a plan that goes on without a
majority. A leader waits longer than this for its voters before it makes such a plan."""
RIPE = 10
"""Epoch of a history from which certificates bind a member: peers that start together may begin as
two swarms, and each may give up its history for the other's."""
TRUSTED_S = 5.0
"""Seconds between two checks of a certificate for a version that the member made itself, under the
leader it follows: a signature costs about 0.1 ms, and a small epoch takes a few ms."""


BELIEVED = 2
"""Number of voters up to which a single one is a majority: if two voters were both needed, losing
either would stop the cell."""
MOST_COMPARED = 512
"""Votes of one certificate that are compared with others."""
KEPT = 4096
"""Number of newest votes that later ones are compared with. They cover a few epochs in a cell of
hundreds of voters, and many in a small cell. Two contradicting votes that are further apart go
unnoticed here."""
MOST_PROVEN = 256
"""Peers that are remembered to have voted twice. A key costs nothing, but to vote takes ten
epochs."""
MOST_TOLD = 8
"""Proofs in one message, the newest."""


def is_majority(voters: Sequence[PeerId], among: Collection[PeerId]) -> bool:
    """Return True if ``among`` has a majority of ``voters``: more than half of them, or exactly
    half with the first one; any one of at most :data:`BELIEVED` voters. True without voters."""
    here = sum(p in among for p in voters)
    if len(voters) <= BELIEVED:
        return here > 0 or not voters
    return 2 * here > len(voters) or (2 * here == len(voters) and voters[0] in among)


def decide(e: Electorate, among: Collection[PeerId]) -> bool:
    """Return True if these voters can commit the version that a plan with this electorate makes."""
    return is_majority(e.voters, among) and (e.orphan or is_majority(e.elders, among))


def signing_domain(what: str, run_id: str) -> str:
    """Domain of a signature under a plan, a vote or a statement of support. The signature is not
    valid in another domain or another run."""
    return f"tutti/{what}/1/{run_id}"


def names(voters: Sequence[PeerId]) -> str:
    """Hash of these voters in this order, as 32 hex digits."""
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
    """A vote in a certificate: the fields that differ from one voter to the next."""

    peer: PeerId
    stage: int
    attempt: int
    digest: str
    signature: bytes


@dataclass(frozen=True)
class Certificate:
    """Quorum certificate of ``version``. ``voters``: the voters of the plan that made it, in their
    order; ``ballots``: from members that have committed it, being voters of this plan or of the one
    before."""

    cell: CellId
    term: int
    version: Version
    voters: tuple[PeerId, ...]
    ballots: tuple[Ballot, ...]

    def vote(self, b: Ballot) -> Vote:
        """The vote under a ballot's signature."""
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
    """The bytes that a peer signs to support ``leader`` as the leader of its cell. ``term``: term
    of the newest plan it has followed; ``at``: Unix time, whole seconds, by its clock."""
    return json.dumps([cell, leader, term, at]).encode()


@dataclass(frozen=True, slots=True)
class Supporter:
    """A supporter of a leader, with its signature under :func:`support_said`."""

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
        """True if both votes are of one attempt, and differ."""
        a = self.one
        b = self.other
        return (a.cell, a.term, a.attempt) == (b.cell, b.term, b.attempt) and a != b


class DoubleVotes:
    """Peers that voted for two results of one attempt, which no honest peer does (equivocation);
    the peer's signatures under both votes are the proof. ``is_signed(vote, peer, signature)`` is
    called only when two votes differ."""

    def __init__(self, is_signed: Callable[[Vote, PeerId, bytes], bool]) -> None:
        self._is_signed = is_signed
        self._cast: Newest[tuple[PeerId, CellId, int, int], tuple[Vote, bytes]] = Newest(KEPT)
        self._proofs: Newest[PeerId, DoubleVote] = Newest(MOST_PROVEN)
        self._news: list[DoubleVote] = []

    def __contains__(self, peer: object) -> bool:
        """Return True if this peer is proven to have voted twice; its votes do not count then."""
        return peer in self._proofs

    @property
    def peers(self) -> frozenset[PeerId]:
        """Peers that are proven to have voted twice."""
        return frozenset(self._proofs)

    def told(self) -> tuple[DoubleVote, ...]:
        """The newest proofs, for other peers."""
        return tuple(self._proofs.values())[-MOST_TOLD:]

    def news(self) -> list[DoubleVote]:
        """The proofs found since the last call."""
        found = self._news
        self._news = []
        return found

    def saw(self, vote: Vote, peer: PeerId, signature: bytes) -> None:
        """Compare a vote with earlier ones. Its signature need not have been checked."""
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
        """Return True if ``proof`` proves a double vote; it is kept then."""
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
    """Evidence sent with a plan to show that it may be followed. ``certificate``: certificate of
    the version that the plan starts from, None if the leader has none. ``doubles``: proofs of
    double votes; the votes of these peers do not count."""

    certificate: Certificate | None = None
    supporters: tuple[Supporter, ...] = ()
    doubles: tuple[DoubleVote, ...] = ()


NO_WARRANT = Warrant()


@dataclass(frozen=True)
class Quorum:
    """The newest certificate that a peer believes, as its leader needs it. ``at``: seconds of the
    own clock when the certificate was shown last."""

    voters: tuple[PeerId, ...] = ()
    version: Version = Version(0)
    at: float = -math.inf

    def holds(self, now: float) -> bool:
        """Return True if plans need these voters now: the certificate is recent, and its history is
        past the first :data:`RIPE` epochs."""
        return self.version.epoch >= RIPE and now - self.at <= FORGET_S

    def doubts(
        self, version: Version, holders: Collection[PeerId], here: Collection[PeerId], now: float
    ) -> bool:
        """Return True if too few of the voters can have committed ``version``, and the certificate
        is of another one. A voter in ``here`` that is no holder has not committed it; an absent one
        may have."""
        return (
            version != self.version
            and self.holds(now)
            and not is_majority(
                self.voters, {p for p in self.voters if p in holders or p not in here}
            )
        )


class Trust:
    """The voters of the newest certificate that this peer has seen, and the checks that follow from
    them. The first certificate is accepted without earlier voters to check it against."""

    def __init__(self, run_id: str, check: CheckSignature) -> None:
        self._check = check
        self._run = run_id
        self.doubles = DoubleVotes(self.vote_is_signed)
        self.voters: tuple[PeerId, ...] = ()
        self.version = Version(0)
        self.term = 0
        self.certificate: Certificate | None = None
        """The newest certificate that was believed, or made here."""
        self._at = self._checked = float("-inf")

    def forget(self) -> None:
        """This peer belongs to another cell from now on. Proofs of double votes are kept: they
        count in every cell."""
        doubles = self.doubles
        self.__init__(self._run, self._check)
        self.doubles = doubles

    def vote_is_signed(self, vote: Vote, peer: PeerId, signature: bytes) -> bool:
        """Return True if ``peer`` has signed this vote."""
        return self._check(peer, vote.said(), signature, signing_domain("vote", self._run))

    @property
    def quorum(self) -> Quorum:
        """The newest certificate, for the leader of this peer."""
        return Quorum(self.voters, self.version, self._at)

    def holds(self, now: float) -> bool:
        """Return True if plans need the voters of the last certificate now (:class:`Quorum`)."""
        return self.quorum.holds(now)

    def learns(self, c: Certificate, now: float) -> None:
        """Take over a certificate that was made here, or after its votes were checked."""
        self.voters = c.voters
        self.version = c.version
        self.term = c.term
        self.certificate = c
        self._at = self._checked = now

    def shown(self, certificate: Certificate, cell: CellId, now: float) -> bool:
        """Return True if another peer's certificate is believed; its voters and version are kept
        then."""
        self._compare(certificate)
        believed = certificate.cell == cell and self._believes(certificate, now)
        if believed:
            self.learns(certificate, now)
        return believed

    def objection(
        self,
        plan: Plan,
        warrant: Warrant,
        follows: PeerId | None,
        at: Version,
        now: float,
        wall: float,
    ) -> str:
        """The reason why this plan is not followed; "" if it may be. ``follows``: the leader of the
        plan followed last; ``at``: the version in place. A certificate that comes with the plan and
        is believed is kept, also when the plan is not followed."""
        c = warrant.certificate
        if c is not None:
            self._compare(c)
        if c is not None and (c.version != plan.base or c.cell != (plan.parent or plan.cell_id)):
            return "its certificate is not of the version that the plan starts from"
        if plan.electorate.orphan:
            if self.holds(now) and now - self._at < ALONE_S:
                return "it goes on without a majority of the voters, who are known to be there"
            return ""
        same = follows == plan.leader
        if c is not None and same and plan.base == at and self._known(c, now):
            self._at = now
            self.certificate = c
            return ""
        held = self.holds(now)
        certified = c is not None and self._believes(c, now)
        if certified and c is not None:
            self.learns(c, now)
        if (
            not held
            or (same and (certified or plan.base == self.version))
            or is_majority(self.voters, self._supporting(plan, warrant.supporters, wall))
        ):
            return ""
        if certified or not same:
            return f"no majority of the {len(self.voters)} voters supports its leader"
        return "no majority of the voters has certified the version that it starts from"

    def _compare(self, c: Certificate) -> None:
        """Compare the ballots of voters, of the last certificate or of this one, with the votes
        seen before."""
        voters = {*self.voters, *c.voters}
        for b in [b for b in c.ballots if b.peer in voters][:MOST_COMPARED]:
            self.doubles.saw(c.vote(b), b.peer, b.signature)

    def _known(self, c: Certificate, now: float) -> bool:
        """Return True if the signatures of a certificate for this peer's own version need no check:
        the last check was less than :data:`TRUSTED_S` ago, and the voters are the same."""
        return c.voters == self.voters and now - self._checked < TRUSTED_S

    def _believes(self, c: Certificate, now: float) -> bool:
        """Return True if a majority of the last voters has signed it. Before the first certificate
        the voters that it names itself count."""
        if self.holds(now) and (c.version.epoch, c.term) < (self.version.epoch, self.term):
            return False  # outdated: this peer has seen a newer certificate
        voters = self.voters if self.holds(now) else c.voters
        known = frozenset(voters)
        signed = set[PeerId]()
        for b in c.agreeing():
            if b.peer in self.doubles:
                continue
            if b.peer in known and self.vote_is_signed(c.vote(b), b.peer, b.signature):
                signed.add(b.peer)
                if 2 * len(signed) >= len(voters) and is_majority(voters, signed):
                    return True
        return False

    def _supporting(self, plan: Plan, supporters: Sequence[Supporter], wall: float) -> set[PeerId]:
        cell = plan.parent or plan.cell_id
        found = set[PeerId]()
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
