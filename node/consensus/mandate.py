"""The evidence for one leader's plans: votes for its epochs, the certificates made of them, and the
support that peers have signed for it. Pure. Enters: checked votes, commits, signed support, the
trust of the leader's peer. Leaves: the warrant of a plan. Never: the choice of voters."""

from node.consensus.tally import VoteTally
from node.consensus.trust import Trust, Warrant
from node.consensus.voters import Commitment
from node.consensus.votes import Certificate, Supporter, Vote
from node.core.ids import CellId, PeerId
from node.core.journey import Electorate, Version

MOST_SUPPORT = 4096
"""Number of signed statements of support above which the statements of peers that do not vote are
dropped."""


class Mandate:
    """The mandate of one peer to lead. ``trust``: certificates and proofs that the peer has
    seen."""

    def __init__(self, trust: Trust) -> None:
        self.trust = trust
        self._tally = VoteTally(trust)
        self._support: dict[PeerId, Supporter] = {}
        """Signed support for this peer, including that of peers that have left since."""

    def begin(self) -> None:
        """The peer begins to lead: votes and certificates of an earlier lead are forgotten."""
        self._tally = VoteTally(self.trust)

    def forget_support(self) -> None:
        """The peer does not lead: forget the support for it."""
        self._support.clear()

    def supported(self, support: Supporter) -> None:
        """A peer has signed its support."""
        self._support[support.peer] = support

    def cast(self, peer: PeerId, vote: Vote, signature: bytes) -> None:
        """``peer`` has voted, and its signature was checked."""
        self._tally.cast(peer, vote, signature)

    def certify(self, commit: Commitment) -> None:
        """Make the certificate of a commit, once."""
        self._tally.certify(commit)

    def show(self, certificate: Certificate, cell: CellId, now: float) -> Version | None:
        """Another peer shows a certificate. Returns its version if it is believed."""
        return self._tally.show(certificate, cell, now)

    def warrant(self, electorate: Electorate, certified: Version | None, now: float) -> Warrant:
        """The warrant of a plan with these voters. ``certified``: the version whose certificate
        belongs to it, if there is one; its voters are trusted from now on."""
        certificate = self._tally.certificate(certified)
        if certificate is not None:
            self.trust.learns(certificate, now)
        doubles = self.trust.doubles.told()
        return Warrant(certificate, self._supporters(electorate), doubles)

    def _supporters(self, electorate: Electorate) -> tuple[Supporter, ...]:
        """Support signed by the voters and elders of a plan, and by the voters of the last
        certificate."""
        voters = {*electorate.voters, *electorate.elders, *self.trust.voters}
        if len(self._support) > MOST_SUPPORT:
            self._support = {p: s for p, s in self._support.items() if p in voters}
        return tuple(s for p, s in self._support.items() if p in voters)
