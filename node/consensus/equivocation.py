"""Equivocation: peers that voted for two results of one attempt. Pure. Enters: votes with their
signatures, proofs of other peers. Leaves: proofs. Never: a penalty; the receiver of a proof decides
about that.
"""

from collections.abc import Callable
from dataclasses import dataclass

from node.consensus.votes import Vote
from node.core.ids import CellId, PeerId
from node.core.newest import Newest

KEPT = 4096
"""Number of newest votes that later ones are compared with. They cover a few epochs in a cell of
hundreds of voters, and many in a small cell. Two contradicting votes that are further apart go
unnoticed here."""
MOST_PROVEN = 256
"""Peers that are remembered to have voted twice. A key costs nothing, but to vote takes ten
epochs."""
MOST_TOLD = 8
"""Proofs in one message, the newest."""


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
