"""The votes on the versions that a leader's epochs make: the voters, who of them is here, and the
last commit. Pure. Enters: plans and commits of the leader, the roster, proofs of double votes.
Leaves: an electorate, or the wait for voters. Never: a signature.

A plan needs a majority of its voters and of the voters of the plan before
(:mod:`node.consensus.voters`).
"""

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from node.consensus.voters import Commitment, decide, is_majority
from node.core.ids import PeerId
from node.core.journey import Electorate, Plan, Version
from node.epoch.leader.attempt import EpochAttempt
from node.epoch.leader.roster import Roster
from node.epoch.waiting import Lack, Wait

RIPE = 10
"""Number of epochs in a row as a current member after which a peer votes: keys cost nothing."""
FEW = 5
"""Number of voters below which all current members vote: the next death must not end the run."""
ALONE_S = 60.0
"""Seconds to wait for enough voters. Then the peers that are present go on as orphans."""
ALONE_EPOCHS = 5.0
"""Epochs to wait for them, if that is longer."""


class Voting:
    """Chooses the voters, for the leader ``me``."""

    def __init__(self, me: PeerId) -> None:
        self._me = me
        self._worked: dict[PeerId, int] = {}
        self._decided = ""
        """Hash of the plan that made the version committed last."""
        self._lacking = math.inf
        self._void: frozenset[PeerId] = frozenset()
        """Peers that voted twice."""
        self._left: set[PeerId] = set()
        """Voters that have said that they leave, and have not been here since."""
        self._heard_from = 0.0
        """From this time on a voter counts as present only once it was heard again. It is the time
        of the last repetition of a round without members counted as dead, which may live behind a
        partition and finish the round with others; or the time when this process went on after it
        had stood still, because others may have found another leader meanwhile."""
        self.commit: Commitment | None = None
        """The last commit under this leader."""
        self._certified: Version | None = None
        """The version that was committed last, or whose quorum certificate another peer has shown
        to the leader. A certificate that only its own member has seen goes with no plan: newcomers
        would wait for its voters, and most of these may be gone."""
        self.after = ""
        """Hash of the plan before the newest one, which gave it its voters; empty for the first
        plan of all."""

    # ----------------------------------------------------------- presence

    def void(self, peers: frozenset[PeerId]) -> None:
        """These peers have voted twice: their votes do not count."""
        self._void = peers

    def hear_again(self, now: float) -> None:
        """From now on voters count as present only once they were heard again."""
        self._heard_from = now

    def voters(
        self,
        before: Plan | None,
        roster: Roster,
        base: Version,
        revoked: Callable[[PeerId], bool],
        now: float,
    ) -> Electorate | Wait:
        """The voters on the version that a plan from ``base`` makes, or the wait for voters if too
        few are here. ``before`` as in :meth:`electorate`; ``revoked(peer)``: the owner of the run
        has put the peer out."""
        self.after = ""
        if before is not None:
            self.after = before.hash
            if before.last:
                return before.electorate
        # A plan leaves out the peers of these stages, so they could not follow it
        bare = roster.versions.bare(base)
        members: list[PeerId] = []
        current: list[PeerId] = []
        for stage, peers in roster.participants.by_stage().items():
            if stage not in bare:
                members += [p for p in peers if p not in self._void]
                workers = roster.versions.workers(stage, base)
                current += [p for p in workers if p not in self._void]
        heard = roster.life.heard
        there = {p for p in members if p == self._me or heard.get(p, now) >= self._heard_from}
        self._left = self._left.difference(roster.peers.candidates) | roster.peers.leaving
        named = self._left
        epoch_s = 0.0
        if before is not None:
            named = {*before.electorate.voters, *before.electorate.elders}
            epoch_s = sum(before.forecast)
        self._left &= named  # others have no vote to lose
        left = self._left | {p for p in named if revoked(p)}
        return self.lacks(self.electorate(before, current, left), there, now, epoch_s)

    # ----------------------------------------------------------- the voters of a plan

    def electorate(
        self, before: Plan | None, current: Sequence[PeerId], left: Collection[PeerId]
    ) -> Electorate:
        """The electorate of the next plan. ``before``: the plan that made the version which the
        next plan starts from, or an earlier attempt from the same version; None if it is not known,
        or the run begins. ``current``: possible current members, in any order; ``left``: peers that
        leave or were revoked, and do not vote."""
        order = sorted(current, key=lambda p: (p != self._me, p))
        if before is None or not before.electorate.voters:
            return Electorate(tuple(order))
        e = before.electorate
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
        """A plan was made: the wait for absent voters starts from zero again."""
        self._lacking = math.inf

    def lacks(
        self, e: Electorate, here: Collection[PeerId], now: float, epoch_s: float
    ) -> Wait | Electorate:
        """The electorate to plan with: ``e`` if enough of its voters are ``here``, or an orphan one
        after :data:`ALONE_S`; until then the wait for the others. ``epoch_s``: seconds of an
        epoch, 0 for unknown."""
        if decide(e, here):
            self._lacking = math.inf
            return e
        self._lacking = min(self._lacking, now)
        if now - self._lacking >= max(ALONE_S, ALONE_EPOCHS * epoch_s):
            voters = tuple(sorted(here, key=lambda p: (p != self._me, p)))
            after = e.elders if e.orphan else e.voters
            return Electorate(voters, after, True)
        lacking = e.elders if is_majority(e.voters, here) else e.voters
        absent = tuple(p for p in lacking if p not in here)
        present = len(lacking) - len(absent)
        return Wait(Lack.VOTERS, peers=absent, here=present, of=len(lacking))

    # ----------------------------------------------------------- commits

    def committed(self, plan: Plan, by: Collection[PeerId]) -> bool:
        """These members have committed. Return True if that is enough for the version to count."""
        if not decide(plan.electorate, {p for p in by if p not in self._void}):
            return False
        self._decided = plan.hash
        current = [m.peer for m in plan.members if m.current]
        self._worked = {p: self._worked.get(p, 0) + 1 for p in current}
        return True

    def certify(self, attempt: EpochAttempt) -> None:
        """The version that an attempt makes counts: keep its commit."""
        self.commit = attempt.commit(self._void)
        self._certified = None
        if self.commit is not None:
            self._certified = self.commit.version

    def shown(self, version: Version) -> None:
        """Another peer has shown a certificate of this version."""
        self._certified = version

    def is_certified(self, version: Version) -> bool:
        """Return True if a plan from this version takes its certificate along."""
        return self._certified == version


def without(e: Electorate, gone: Collection[PeerId]) -> Electorate:
    """``e`` without the peers of ``gone``, which vote elsewhere from now on, or nowhere."""
    return replace(
        e,
        voters=tuple(p for p in e.voters if p not in gone),
        elders=tuple(p for p in e.elders if p not in gone),
    )
