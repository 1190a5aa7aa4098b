"""Signed statements of members, which anybody may pass on and check: votes on the version that an
epoch made (enough of them are a quorum certificate), and support for a leader. Pure. Enters: facts
about a plan. Leaves: the bytes that are signed. Never: a check of a signature.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from node.consensus.proposal import Proposal
from node.core.ids import CellId, PeerId
from node.core.journey import Version

CheckSignature = Callable[[PeerId, bytes, bytes, str], bool]
"""``(peer, data, signature, domain)``: True if the peer signed the data."""


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


def vote_on(plan: Proposal, version: Version, attempt: int, stage: int, digest: str) -> Vote:
    """The vote of a member of ``stage`` for the ``version`` that this plan made."""
    voters = names(plan.electorate.voters)
    return Vote(plan.cell_id, plan.term, attempt, version, voters, stage, digest)


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


def proof(certificate: Certificate) -> Hashable:
    """The part of a certificate that proves its version. Two certificates with an equal proof prove
    the same, in whichever order their ballots are."""
    c = certificate
    return c.cell, c.term, c.version, c.voters, frozenset(c.agreeing())


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
