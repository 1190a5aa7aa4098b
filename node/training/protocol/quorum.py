"""When enough of the voters agree. Pure. Enters: an electorate, some peers. Leaves: yes or no.
Never: who votes next; that is :mod:`node.training.leader.voting`.

Two sides of a parted network cannot both have enough. Nor can the voters of one plan and those of
the next part from each other: a plan needs enough of both.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from node.core.ids import PeerId
from node.core.journey import Electorate

BELIEVED = 2
"""Of so few voters one is enough: a majority of two would be lost with either."""


def most(voters: Sequence[PeerId], among: Collection[PeerId]) -> bool:
    """More than half of them; of exact halves the one with the first. Of nobody that is nobody."""
    here = sum(p in among for p in voters)
    if len(voters) <= BELIEVED:
        return here > 0 or not voters
    return 2 * here > len(voters) or (2 * here == len(voters) and voters[0] in among)


def decide(e: Electorate, among: Collection[PeerId]) -> bool:
    """Whether these can commit what such a plan makes."""
    return most(e.voters, among) and (e.orphan or most(e.elders, among))
