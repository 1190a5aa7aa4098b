"""Takeover of the epoch that a leader has left under way: the members go on, and only micro-batches
of lost peers are given back. Pure. Enters: the newest plan, the roster of the new leader.
Leaves: an attempt at that plan. Never: a plan; the epoch of another version.

Members that have begun to average, or have voted, do not begin again for another leader, so an
epoch is taken over only while its micro-batches run
(docs/decisions/039-an-epoch-outlives-its-leader.md).
"""

from collections import Counter

from node.consensus.voters import decide
from node.core.ids import PeerId
from node.core.journey import Plan, Version
from node.epoch.attempts.timing import AttemptTimes
from node.epoch.leader.attempt import EpochAttempt
from node.epoch.leader.roster import Roster
from node.epoch.plan_context import PastPlan

WORTH = 0.25
"""Work of an epoch that is done and stays, over the share of it that is given back, from which the
epoch is taken over. With less done it is planned anew: a smaller batch pays for a whole round."""


class Takeover:
    """The decision of one leader about the epoch of a plan that it did not make. ``past``: the plan
    that it followed last."""

    def __init__(self, past: PastPlan | None = None) -> None:
        self._past = past
        self._over = ""
        """Hash of the newest plan that this leader has made or taken over."""

    def planned(self, plan: Plan) -> None:
        """This leader has made the plan, or taken it over: it does not do so again."""
        self._over = plan.hash

    def attempt(
        self, plan: Plan | None, base: Version, roster: Roster, timing: AttemptTimes
    ) -> EpochAttempt | None:
        """The attempt that goes on with the epoch of ``plan``; None where it is better planned
        anew, from ``base``."""
        if plan is None or plan.base != base or not plan.paths or plan.hash == self._over:
            return None
        me = roster.peers.leader
        if plan.leader == me:
            return None  # its rounds would have the numbers of those from when it led before
        # The other members wait for nobody whom the leader before has found dead, although it may
        # be awake again: its micro-batches would never come home.
        dead = set[PeerId]()
        if self._past is not None and self._past.plan.hash == plan.hash:
            dead.update(self._past.dead)
        here = {p: c for p, c in roster.peers.candidates.items() if p not in dead}
        # A member with an older term has not begun this epoch, and goes on without it.
        begun = {m.peer for m in plan.members if m.peer in here and here[m.peer].term >= plan.term}
        there = {p for p in begun if here[p].capacity.running.plan_hash == plan.hash}
        if there != begun or me not in there or not decide(plan.electorate, there):
            return None
        work = work_by_peer(plan)
        # Nobody can have computed more of it than the plan gave it, but for the work of the dead.
        computed = sum(min(work[p], here[p].capacity.running.computed) for p in there)
        lost = sum(path.origin not in there for path in plan.paths) / len(plan.paths)
        if (1 - lost) * computed / work.total() <= WORTH * lost:
            return None
        probation = roster.peers.probation.intersection(
            m.peer for m in plan.members if not m.current
        )
        attempt = EpochAttempt(plan, timing, leader=me, probation=probation)
        attempt.lose({m.peer for m in plan.members} - there)
        if attempt.bare is not None:
            return None
        for peer in attempt.dead:
            attempt.results.give_up(peer)
        return attempt


def work_by_peer(plan: Plan) -> Counter[PeerId]:
    """Forwards, losses and backwards of a plan's paths, by peer."""
    work = Counter[PeerId]()
    for path in plan.paths:
        work[path.origin] += 3
        for hop in path.hops:
            work[hop.peer] += 2
    return work
