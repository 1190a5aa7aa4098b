"""The averaging settings of a plan: from the manifest, or from the owner's newest change. Pure.
Enters: changes that were read, plans. Leaves: changes to pass on, reasons to refuse a plan. Never:
a signature; the reader of a change has checked it.

A change is in force from the first plan that carries it. Cells average only with cells under the
same change.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from node.averaging.strategies.outer import OuterSettings
from node.consensus.proposal import Proposal
from node.core.ids import PeerId

MAX_CHANGE = 2000
"""Characters of a signed change, all of them ASCII, so that it fits in a posting."""


def mark(peer: PeerId) -> str:
    """The short name of a peer in a change: 16 hex digits, so that a change has room for many."""
    return hashlib.sha256(peer.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Rules:
    """Settings of a plan that the owner can change. ``cell``: most replicas of a stage in a cell, 0
    for no bound. ``revoked``: marks of peers that are put out of the run, and of keys of invites.
    ``revision``: 0 for the manifest's own settings, else the number of the owner's signed
    ``change``; of two changes the one with the higher revision counts."""

    cell: int = 0
    outer: OuterSettings = OuterSettings()
    revision: int = 0
    change: str = ""
    revoked: frozenset[str] = frozenset()

    def revokes(self, peer: PeerId) -> bool:
        """Return True if the owner has revoked this peer, or the invite with this key."""
        return bool(self.revoked) and mark(peer) in self.revoked


Read = Callable[[str], Rules]
"""Reads a change and checks it; "" gives the manifest's own settings. Raises Refused."""


class ChangeStatus:
    """The owner's changes, as one peer knows them. ``known``: the newest one it has received;
    ``in_force``: the one of the newest plan it followed. Every heartbeat carries ``known`` until
    the leader has made a plan under it. ``invite_of(peer)``: the key of the invite for anybody with
    which a peer came, None for another peer."""

    def __init__(
        self, own: Rules, invite_of: Callable[[PeerId], PeerId | None] = lambda peer: None
    ) -> None:
        self.known = self.in_force = own
        self._invite_of = invite_of
        self._shown: PeerId | None = None

    def revokes(self, peer: PeerId) -> bool:
        """Return True if the newest change that is known revokes this peer, or the invite with
        which it came."""
        invite = self._invite_of(peer)
        return self.known.revokes(peer) or (invite is not None and self.known.revokes(invite))

    def tells(self, leader: PeerId) -> str:
        """The change to send to this leader; "" if the leader has it."""
        return "" if leader == self._shown else self.known.change

    def learns(self, rules: Rules) -> bool:
        """Take note of a change. Return True if it is newer than the known one."""
        if rules.revision <= self.known.revision:
            return False
        self.known = rules
        self._shown = None
        return True

    def refuses(self, plan: Proposal, rules: Rules) -> str:
        """The reason to refuse a plan under these settings: its change is older than the one in
        force. "" if the plan may be followed; the plan that ends the run always may."""
        if plan.last or rules.revision >= self.in_force.revision:
            return ""
        self._shown = None
        return (
            f"a plan under change {rules.revision} of the owner, and change "
            f"{self.in_force.revision} is in force here"
        )

    def follows(self, leader: PeerId, rules: Rules) -> bool:
        """A plan of this leader under these settings is in force now. Return True if they are
        news."""
        # If the owner gave two changes the same number, the one in a plan counts.
        news = rules.revision >= self.known.revision and rules.change != self.known.change
        self.in_force = rules
        if news:
            self.known = rules
        self._shown = leader if rules.revision == self.known.revision else None
        return news
