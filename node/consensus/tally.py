"""The votes that come to a leader, and the quorum certificates made of them. Pure. Enters: checked
votes with their signatures, commits as the epoch names them, certificates that other peers show.
Leaves: certificates. Never: the choice of the votes that count; that is the leader's."""

from node.consensus.trust import Trust
from node.consensus.voters import Commitment
from node.consensus.votes import Ballot, Certificate, Vote, names
from node.core.ids import CellId, PeerId
from node.core.journey import Version
from node.core.newest import Newest

VOTES = 4
"""Newest votes of one peer that are kept: of the attempts of one epoch."""
CERTIFICATES = 4
"""Newest certificates that are kept: plans start from the versions of these."""


class VoteTally:
    """Votes and certificates at the peer of one leader. ``trust``: its own."""

    def __init__(self, trust: Trust) -> None:
        self._trust = trust
        self._term = 0
        self._votes: dict[PeerId, Newest[Vote, bytes]] = {}
        self._certificates: Newest[Version, Certificate] = Newest(CERTIFICATES)

    def cast(self, peer: PeerId, vote: Vote, signature: bytes) -> None:
        """``peer`` has voted, and its signature was checked. Votes of earlier terms are dropped."""
        if vote.term != self._term:
            self._term = vote.term
            self._votes = {}
        if peer not in self._votes:
            self._votes[peer] = Newest(VOTES)
        self._votes[peer][vote] = signature

    def show(self, certificate: Certificate, cell: CellId, now: float) -> Version | None:
        """Another peer shows a certificate. Returns its version if this peer believes it.
        Without known voters it believes none: one peer could name voters of its own, and plans
        would show them to all members."""
        known = self._trust.holds(now)
        if not known or not self._trust.shown(certificate, cell, now):
            return None
        self._certificates[certificate.version] = certificate
        return certificate.version

    def certify(self, commit: Commitment) -> None:
        """Make the certificate of a commit, once."""
        if commit.version in self._certificates:
            return
        voters = names(commit.voters)
        ballots = list[Ballot]()
        for peer, stage, attempt, digest in commit.votes:
            vote = Vote(commit.cell, commit.term, attempt, commit.version, voters, stage, digest)
            signature = self._votes.get(peer, {}).get(vote)
            if signature:
                ballots.append(Ballot(peer, stage, attempt, digest, signature))
        if ballots:
            self._certificates[commit.version] = Certificate(
                commit.cell, commit.term, commit.version, commit.voters, tuple(ballots)
            )

    def certificate(self, version: Version | None) -> Certificate | None:
        """The certificate of ``version``, if it was made here or shown."""
        if version is None:
            return None
        return self._certificates.get(version)
