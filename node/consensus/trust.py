"""Trust of one peer in the voters of its cell: the newest quorum certificate that it believes, and
the plans that certificate and support allow. Pure. Enters: certificates, warrants of plans, a
function that checks a signature. Leaves: the statements that count, the reason why a plan is not
followed. Never: the choice of voters; that is the leader's.

A member follows a plan of the leader that it followed before if the plan starts from the version of
the newest certificate, or brings the certificate of the version that it starts from, also if the
member made that version itself. A plan of any other leader needs the support of a majority of the
last voters.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from node.consensus.equivocation import DoubleVote, DoubleVotes
from node.consensus.proposal import Proposal
from node.consensus.voters import Quorum, is_majority
from node.consensus.votes import (
    Certificate,
    CheckSignature,
    Supporter,
    Vote,
    signing_domain,
    support_said,
)
from node.core.ids import CellId, PeerId
from node.core.journey import Version

FRESH_S = 300.0
"""Seconds after which support no longer counts, by the signer's clock against ours, unless the
signer had followed as new a plan as the member that checks it."""
ALONE_S = 30.0
"""Seconds after its last certificate before a member follows a plan that goes on without a
majority. A leader waits longer than this for its voters before it makes such a plan."""
ALONE_EPOCHS = 2.5
"""The same limit in epochs, by the forecast of the plan in force; the longer one counts."""
MOST_EPOCH_S = 3600.0
"""Longest forecast of an epoch, in seconds, that is believed: without a bound a leader could bind
the members to its voters for good."""
TRUSTED_S = 5.0
"""Seconds between two checks of a certificate for a version that the member made itself, under the
leader it follows: a signature costs about 0.1 ms, and a small epoch takes a few ms."""
MOST_COMPARED = 512
"""Votes of one certificate that are compared with others."""


@dataclass(frozen=True)
class Warrant:
    """Evidence sent with a plan to show that it may be followed. ``certificate``: certificate of
    the version that the plan starts from, None if the leader has none. ``doubles``: proofs of
    double votes; the votes of these peers do not count."""

    certificate: Certificate | None = None
    supporters: tuple[Supporter, ...] = ()
    doubles: tuple[DoubleVote, ...] = ()


NO_WARRANT = Warrant()


class Trust:
    """The voters of the newest certificate that this peer has seen, and the checks that follow from
    them. The first certificate is accepted without earlier voters to check it against.
    ``revoked(peer)``: True if the owner of the run has put that peer out."""

    def __init__(
        self,
        run_id: str,
        check: CheckSignature,
        revoked: Callable[[PeerId], bool] = lambda peer: False,
    ) -> None:
        self._check = check
        self._revoked = revoked
        self._run = run_id
        self.doubles = DoubleVotes(self.vote_is_signed)
        self.voters: tuple[PeerId, ...] = ()
        self.version = Version(0)
        self.term = 0
        self.certificate: Certificate | None = None
        """The newest certificate that was believed, or made here."""
        self._at = self._checked = float("-inf")
        self._epoch_s = 0.0

    def expects(self, epoch_s: float) -> None:
        """Take over the forecast of the plan in force: seconds of an epoch, 0 for unknown."""
        self._epoch_s = min(epoch_s, MOST_EPOCH_S)

    def forget(self) -> None:
        """This peer belongs to another cell from now on. Proofs of double votes are kept: they
        count in every cell."""
        doubles = self.doubles
        self.__init__(self._run, self._check, self._revoked)
        self.doubles = doubles

    def vote_is_signed(self, vote: Vote, peer: PeerId, signature: bytes) -> bool:
        """Return True if ``peer`` has signed this vote."""
        return self._check(peer, vote.said(), signature, signing_domain("vote", self._run))

    def counts(self, peer: PeerId) -> bool:
        """Return True if votes and support of this peer count: it has not voted twice, and is not
        revoked. Such a voter stays in the number of which a majority is needed: without it a
        minority could become a majority."""
        return peer not in self.doubles and not self._revoked(peer)

    @property
    def quorum(self) -> Quorum:
        """The newest certificate, for the leader of this peer."""
        return Quorum(self.voters, self.version, self._at, self._epoch_s)

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
        plan: Proposal,
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
            alone_s = max(ALONE_S, ALONE_EPOCHS * self._epoch_s)
            if self.holds(now) and now - self._at < alone_s:
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
            if not self.counts(b.peer):
                continue
            if b.peer in known and self.vote_is_signed(c.vote(b), b.peer, b.signature):
                signed.add(b.peer)
                if 2 * len(signed) >= len(voters) and is_majority(voters, signed):
                    return True
        return False

    def _supporting(
        self, plan: Proposal, supporters: Sequence[Supporter], wall: float
    ) -> set[PeerId]:
        cell = plan.parent or plan.cell_id
        found = set[PeerId]()
        for s in supporters:
            fresh = s.term >= self.term or abs(wall - s.at) <= FRESH_S
            if s.peer not in self.voters or s.peer in found or not fresh:
                continue
            if not self.counts(s.peer):
                continue
            said = support_said(cell, plan.leader, s.term, s.at)
            if self._check(s.peer, said, s.signature, signing_domain("support", self._run)):
                found.add(s.peer)
                if is_majority(self.voters, found):
                    break
        return found
