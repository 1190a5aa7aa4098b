"""The division of a cell: some of its peers become a cell of their own. Pure. Enters: the roster,
the start of the next plan. Leaves: the plan that founds the new cell, and the start for the peers
that stay. Never: the plan of the old cell (:mod:`node.epoch.leader.planning`). A peer that does not
accept a founding plan stays in the old cell."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from node.consensus.rules import Rules
from node.core.errors import OutOfResources
from node.core.ids import ENDS, CellId, PeerId, child_cell
from node.core.journey import Electorate, Plan, PlanMember, Version
from node.core.samples import split
from node.epoch.facts import RunFacts
from node.epoch.leader.plan_start import PlanStart
from node.epoch.leader.roster import Roster
from node.epoch.leader.voting import without
from node.scheduler.costs import believe
from node.scheduler.near import leavers

LEFT_S = 5.0
"""Seconds for which heartbeats of members of a new cell are ignored: they may be from before they
knew of it."""
POSTPONED_S = 60.0
"""Seconds until a cell tries to divide again, after a division whose halves could not have
worked."""


class Division:
    """Divisions of the cell ``cell``, which ``me`` leads."""

    def __init__(self, me: PeerId, facts: RunFacts, cell: CellId) -> None:
        self._me = me
        self._facts = facts
        self._cell = cell
        self._divides_from = 0.0
        """Time before which no division is tried."""
        self._just_left: dict[PeerId, float] = {}
        """Members of a new cell, each with the time until which its heartbeats may be from
        before."""

    def left(self, founded: Plan, now: float) -> None:
        """The founding plan is on its way to its members."""
        self._just_left = {p: until for p, until in self._just_left.items() if now < until}
        self._just_left |= {m.peer: now + LEFT_S for m in founded.members}

    def has_left(self, peer: PeerId, now: float) -> bool:
        """Return True if a message of this peer probably comes from before it left."""
        return now < self._just_left.get(peer, 0.0)

    def postpone(self, now: float) -> None:
        """No plan could be made with this division: do not try again for a while."""
        self._divides_from = now + POSTPONED_S

    def founds(
        self, roster: Roster, start: PlanStart, rules: Rules, now: float
    ) -> tuple[PlanStart, Plan] | None:
        """Divide the cell. Returns the start of the next plan for the peers that stay, and the
        founding plan for the peers that leave; None while the cell stays whole. ``rules``: the
        rules in force; a cell divides above ``rules.cell`` replicas of a stage, never with 0."""
        if not rules.cell or now < self._divides_from:
            return None
        base = start.base
        past = start.past
        away = self._leavers(roster, base, rules.cell)
        if not away:
            return None
        here = roster.participants.by_stage()
        ends = [p for p in here[ENDS] if roster.versions.can_start(p, base)]
        able = [p for p in ends if roster.peers.candidates[p].membership.may_lead]
        away = self._with_a_leader(away, ends, able)
        halves = [_half(roster, base, away, leaves) for leaves in (True, False)]
        if not away or not all(self._hold_the_state(roster, half) for half in halves):
            self.postpone(now)
            return None
        try:
            stays, leaves = split(past.cursor)
        except ValueError:  # its share of the samples has been halved as often as can be
            self.postpone(now)
            return None
        founded = Plan(
            base.epoch,
            start.term,
            self._me,
            tuple(PlanMember(p, s, roster.speeds.of(p)) for p, s in sorted(away.items())),
            (),
            past.owners,
            digests=dict(roster.versions.agreed),
            cursor=leaves,
            loss=start.loss,
            loss_val=start.loss_val,
            tokens=past.tokens,
            lineage=base.lineage,
            change=rules.change,
            cell_id=child_cell(self._cell, base.lineage, start.term),
            parent=self._cell,
            electorate=Electorate(tuple(sorted(away))),
            reference=past.reference,
        )
        rest = replace(
            start,
            past=replace(past, cursor=stays),
            term=start.term + 1,
            electorate=without(start.electorate, away),
        )
        return rest, founded

    def _leavers(self, roster: Roster, base: Version, most: int) -> dict[PeerId, int]:
        """The peers that leave, with their stages: up to half of every stage, at most a full cell,
        chosen so that near peers stay together. Empty unless every stage has two peers that can
        start from ``base``, and some stage has more than ``most``."""
        if not base.epoch:
            return {}
        able = {
            stage: [p for p in peers if roster.versions.can_start(p, base)]
            for stage, peers in roster.participants.by_stage().items()
        }
        if min(map(len, able.values())) < 2 or max(map(len, able.values())) <= most:
            return {}
        speeds = roster.speeds
        rows = {stage: speeds.rows(peers) for stage, peers in able.items()}
        costs = believe(speeds.measured(), able[ENDS], speeds.doubts(), self._facts.sizes.tensor)
        return leavers(rows, self._me, most, costs.delay)

    def _with_a_leader(
        self, away: dict[PeerId, int], ends: Sequence[PeerId], able: Sequence[PeerId]
    ) -> dict[PeerId, int]:
        """The leavers, changed if necessary so that one of their ends peers is ``able`` to lead;
        empty if there is none."""
        leave = [p for p in ends if p in away]
        if any(p in able for p in leave):
            return away
        others = [p for p in able if p != self._me and p not in away]
        if not leave or not others:
            return {}
        return {p: s for p, s in away.items() if p != leave[0]} | {others[0]: ENDS}

    def _hold_the_state(self, roster: Roster, half: Mapping[int, Sequence[PeerId]]) -> bool:
        """Return True if these peers have the memory for the optimizer's state of every stage."""
        for stage, peers in half.items():
            try:
                rows = roster.speeds.rows(peers)
                self._facts.make.assign(stage, rows, {}, roster.peers.room(peers))
            except OutOfResources:
                return False
        return True


def _half(
    roster: Roster, base: Version, away: Collection[PeerId], leaves: bool
) -> dict[int, list[PeerId]]:
    """Peers of each stage that start from ``base`` in the new cell (``leaves``) or in the old
    one."""
    return {
        stage: [p for p in peers if (p in away) is leaves and roster.versions.can_start(p, base)]
        for stage, peers in roster.participants.by_stage().items()
    }
