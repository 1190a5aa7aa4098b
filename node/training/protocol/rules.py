"""Which averaging settings a plan is under: the manifest's, or the owner's newest change to them.
Pure. Enters: changes that were read, plans. Leaves: what a peer tells and refuses. Never: a
signature: who reads a change has checked it.

A change holds from the first plan that names it. Cells meet only with others that are under the
same change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

from node.averaging.strategies.outer import OuterSettings
from node.core.ids import PeerId
from node.core.journey import Plan

MAX_CHANGE = 2000
"""Characters of a signed change, which all are ASCII: it has room in a posting."""


def mark(peer: PeerId) -> str:
    """16 hex digits for a peer: a change has room for many."""
    return hashlib.sha256(peer.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Rules:
    """``cell``: most replicas of a stage in a cell, 0 for no bound. ``revoked``: marks of peers
    that are put out of the run. ``revision`` 0: the manifest's own; else ``change`` is what the
    owner signed, and of two the higher revision counts."""

    cell: int = 0
    outer: OuterSettings = OuterSettings()
    revision: int = 0
    change: str = ""
    revoked: frozenset[str] = frozenset()

    def revokes(self, peer: PeerId) -> bool:
        """Whether the owner has put this peer out."""
        return bool(self.revoked) and mark(peer) in self.revoked


Read = Callable[[str], Rules]
"""A change, checked; "" for the manifest's own settings. Raises Refused."""


class ChangeStatus:
    """Where one peer is with the owner's changes. ``known``: the newest it has heard of;
    ``in_force``: that of the newest plan it followed. A leader that has not shown that it knows as
    much is told with every heartbeat."""

    def __init__(self, own: Rules) -> None:
        self.known = self.in_force = own
        self._shown: PeerId | None = None

    def tells(self, leader: PeerId) -> str:
        """What this leader has to hear; empty for nothing."""
        return "" if leader == self._shown else self.known.change

    def learns(self, rules: Rules) -> bool:
        """Somebody has a change; True for one that is news."""
        if rules.revision <= self.known.revision:
            return False
        self.known, self._shown = rules, None
        return True

    def refuses(self, plan: Plan, rules: Rules) -> str:
        """Why a plan under these settings is not followed: an older change never comes back. Empty
        for one that is. What ends the run is followed whatever it says."""
        if plan.last or rules.revision >= self.in_force.revision:
            return ""
        self._shown = None
        return (
            f"a plan under change {rules.revision} of the owner, and change "
            f"{self.in_force.revision} is in force here"
        )

    def follows(self, leader: PeerId, rules: Rules) -> bool:
        """A plan of this leader under these settings is in force now; True when they are news."""
        # Of two that the owner gave one number, the one in a plan counts.
        news = rules.revision >= self.known.revision and rules.change != self.known.change
        self.in_force = rules
        self.known = rules if news else self.known
        self._shown = leader if rules.revision == self.known.revision else None
        return news
