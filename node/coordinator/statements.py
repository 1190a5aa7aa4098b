"""Signed statements of this peer: votes, support for a leader, plans. Enters: what is to be signed.
Leaves: signatures, and whether those of others hold. Never: a decision about a vote; the ledger
only refuses a second one."""

from collections.abc import Callable
from functools import partial

from node.consensus.trust import Trust
from node.consensus.votes import Supporter, Vote, signing_domain, support_said
from node.coordinator.ledger import VoteLedger
from node.core.clock import Clock
from node.core.ids import CellId, PeerId
from node.core.journey import Plan
from node.identity.keys import Signer, is_signed

SUPPORT_S = 30.0
"""Seconds after which a statement of support is signed anew."""


class Statements:
    """Statements in one run. ``ledger``: the newest vote, kept where it outlives the process."""

    def __init__(self, identity: Signer, run_id: str, ledger: VoteLedger, clock: Clock) -> None:
        self._identity = identity
        self._run = run_id
        self._ledger = ledger
        self._clock = clock
        self._support: dict[tuple[CellId, PeerId, int], Supporter] = {}
        """The support signed last, by cell, leader and term."""

    def trust(self, revoked: Callable[[PeerId], bool]) -> Trust:
        """A new trust, which checks signatures as this peer does. ``revoked`` as for
        :class:`Trust`."""
        return Trust(self._run, partial(is_signed, self._identity), revoked)

    def term(self, cell: CellId) -> int:
        """Highest term of this peer's votes in ``cell``, 0 for none."""
        return self._ledger.term(cell)

    def support(self, cell: CellId, leader: PeerId, term: int) -> Supporter:
        """This peer's signed support for ``leader``, signed anew after :data:`SUPPORT_S` seconds.
        ``term``: term of the newest plan that it has followed."""
        wall = max(0, int(self._clock.wall()))
        about = (cell, leader, term)
        signed = self._support.get(about)
        if signed is None or not 0 <= wall - signed.at < SUPPORT_S:
            said = support_said(*about, wall)
            signature = self._identity.sign(said, signing_domain("support", self._run))
            signed = Supporter(self._identity.peer_id, term, wall, signature)
            self._support = {about: signed}
        return signed

    def vote(self, vote: Vote) -> bytes:
        """This peer's signature under a vote. Raises Refused if it has voted otherwise."""
        said = vote.said()
        self._ledger.cast(vote.cell, vote.term, vote.attempt, said)
        return self._identity.sign(said, signing_domain("vote", self._run))

    def plan(self, plan: Plan) -> bytes:
        """This peer's signature under a plan."""
        return self._identity.sign(plan.canonical(), signing_domain("plan", self._run))

    def is_plan_of(self, peer: PeerId, said: bytes, signature: bytes) -> bool:
        """Return True if ``peer`` has signed a plan with these bytes."""
        domain = signing_domain("plan", self._run)
        return is_signed(self._identity, peer, said, signature, domain)
