"""Majorities: when the voters of a plan can commit the version that it makes. Pure. Enters: voters
in their order, the peers that agree. Leaves: yes or no. Never: a signature; the choice of voters,
which is the leader's.

Two sides of a partitioned network cannot both have enough voters. Nor can the voters of one plan
and of the next decide apart from each other: a plan needs a majority of both.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from node.core.ids import CellId, PeerId
from node.core.journey import Electorate, Version

FORGET_S = 60.0
"""Seconds without a new certificate after which a member no longer insists on the voters of its
last one: it was away or alone, and starts from newer certificates of other peers."""
FORGET_EPOCHS = 5.0
"""The same limit in epochs; the longer one counts."""
RIPE = 10
"""Epoch of a history from which certificates bind a member: peers that start together may begin as
two swarms, and each may give up its history for the other's."""
BELIEVED = 2
"""Number of voters up to which a single one is a majority: if two voters were both needed, losing
either would stop the cell."""


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


@dataclass(frozen=True)
class Commitment:
    """A version that a leader's cell has committed, without the signatures that prove it.
    ``voters``: of the plan that made it, in their order; ``votes``: peer, stage, attempt and digest
    of each vote that counts, of voters of this plan or of the one before."""

    cell: CellId
    term: int
    version: Version
    voters: tuple[PeerId, ...]
    votes: tuple[tuple[PeerId, int, int, str], ...]


@dataclass(frozen=True)
class Quorum:
    """The newest certificate that a peer believes, as its leader needs it. ``at``: seconds of the
    own clock when the certificate was shown last; ``epoch_s``: expected seconds of an epoch, 0 for
    unknown."""

    voters: tuple[PeerId, ...] = ()
    version: Version = Version(0)
    at: float = -math.inf
    epoch_s: float = 0.0

    def holds(self, now: float) -> bool:
        """Return True if plans need these voters now: the certificate is recent, and its history is
        past the first :data:`RIPE` epochs."""
        forget_s = max(FORGET_S, FORGET_EPOCHS * self.epoch_s)
        return self.version.epoch >= RIPE and now - self.at <= forget_s

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
