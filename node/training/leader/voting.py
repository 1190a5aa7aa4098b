"""Which peers vote on the versions of a cell, and whether enough of them are present. Pure. Enters:
the plan before, the participants, the time. Leaves: the electorate of the next plan, or a few words
on what is waited for. Never: a version (:mod:`node.training.leader.starting_point`)."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace

from node.core.ids import PeerId
from node.core.journey import Electorate, Plan
from node.training.protocol.votes import decide, is_majority

RIPE = 10
"""A peer votes after so many epochs in a row as a current member: keys cost nothing."""
FEW = 5
"""Where fewer than so many vote, all current members do: the next death must not end the run."""
ALONE_S, ALONE_EPOCHS = 60.0, 5.0
"""Enough voters are waited for so many seconds, or so many epochs if that is longer. Then the peers
that are present go on as orphans."""


def without(e: Electorate, gone: Collection[PeerId]) -> Electorate:
    """The same without these, who vote elsewhere from now on, or nowhere."""
    return replace(
        e,
        voters=tuple(p for p in e.voters if p not in gone),
        elders=tuple(p for p in e.elders if p not in gone),
    )


class Voting:
    """Chooses the voters, for the leader ``me``."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._worked: dict[PeerId, int] = {}
        self._decided = ""
        """Hash of the plan whose version was committed last."""
        self._lacking = math.inf

    def committed(self, plan: Plan, by: Collection[PeerId]) -> bool:
        """These members have committed: whether that is enough to count."""
        if not decide(plan.electorate, by):
            return False
        self._decided = plan.hash
        current = [m.peer for m in plan.members if m.current]
        self._worked = {p: self._worked.get(p, 0) + 1 for p in current}
        return True

    def electorate(
        self, before: Plan | None, current: Sequence[PeerId], left: Collection[PeerId]
    ) -> Electorate:
        """The electorate of the next plan. ``before``: the plan that made the version which the
        next plan starts from, or an earlier attempt from the same version; None when it is not
        known, or the run begins. ``current``: possible current members, in any order; ``left``:
        peers that leave or were revoked, and do not vote."""
        order = sorted(current, key=lambda p: (p != self._me, p))
        e = before.electorate if before is not None else Electorate()
        if before is None or not e.voters:
            return Electorate(tuple(order))
        if before.parent:
            return Electorate(tuple(p for p in e.voters if p in current) or tuple(order))
        e = without(e, left)
        if before.hash != self._decided:
            return e
        voters = [p for p in e.voters if p in current]
        voters += [p for p in order if p not in voters and self._worked.get(p, 0) >= RIPE]
        if len(voters) < FEW:
            voters += [p for p in order if p not in voters]
        first = [self._me] if self._me in voters else []
        after = e.elders if e.orphan else e.voters
        still = e.orphan and not is_majority(e.elders, voters)
        return Electorate(tuple(dict.fromkeys([*first, *voters])), after, still)

    def planned(self) -> None:
        """A plan was made: waiting for absent voters starts from zero again."""
        self._lacking = math.inf

    def lacks(
        self, e: Electorate, here: Collection[PeerId], now: float, epoch_s: float
    ) -> str | Electorate:
        """The electorate to plan with: ``e`` if enough of its voters are ``here``, or an orphan one
        after :data:`ALONE_S`; until then, in words, what is waited for. ``epoch_s``: seconds of an
        epoch, 0 for unknown."""
        if decide(e, here):
            self._lacking = math.inf
            return e
        self._lacking = min(self._lacking, now)
        if now - self._lacking >= max(ALONE_S, ALONE_EPOCHS * epoch_s):
            voters = tuple(sorted(here, key=lambda p: (p != self._me, p)))
            return Electorate(voters, e.elders if e.orphan else e.voters, True)
        lacking = e.voters if not is_majority(e.voters, here) else e.elders
        count = sum(p in here for p in lacking)
        return f"more than half of the voters ({count} of {len(lacking)} are here)"
