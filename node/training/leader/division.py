"""When a cell divides, and which peers leave it. Pure. Enters: who is present, and what goes with
the version to start from. Leaves: the plan that founds the new cell, and the samples that remain.
Never: whether a peer accepts that plan; one that does not stays in the old cell."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from node.core.errors import OutOfResources
from node.core.ids import ENDS, CellId, PeerId, child_cell
from node.core.journey import Electorate, Plan, PlanMember, Version
from node.core.samples import split
from node.scheduler.costs import believe
from node.scheduler.near import leavers
from node.training.leader.roster import Roster
from node.training.protocol.facts import RunFacts
from node.training.protocol.plan_context import PlanContext
from node.training.protocol.rules import Rules

LEFT_S = 5.0
"""What members of a new cell have said before they knew of it is heard for so long."""
POSTPONED_S = 60.0
"""A cell whose halves could not have worked looks again after so long."""

Stages = Mapping[int, Sequence[PeerId]]


class Division:
    """Of the cell ``cell``, by what the manifest fixes."""

    def __init__(self, cell: CellId, facts: RunFacts) -> None:
        self._cell, self._assign, self._tensor = cell, facts.make.assign, facts.sizes.tensor
        self._may_lead = facts.may_lead
        self._again = 0.0
        self._left: dict[PeerId, float] = {}

    def left(self, founded: Plan, now: float) -> None:
        """The plan is on its way to its members."""
        self._left = {p: until for p, until in self._left.items() if now < until}
        self._left |= {m.peer: now + LEFT_S for m in founded.members}

    def has_left(self, peer: PeerId, now: float) -> bool:
        """Whether what this peer says comes from before it left, as far as one can tell."""
        return now < self._left.get(peer, 0.0)

    def postpone(self, now: float) -> None:
        """No plan could be made with this division: do not try again for a while."""
        self._again = now + POSTPONED_S

    def founds(
        self,
        roster: Roster,
        base: Version,
        past: PlanContext,
        me: PeerId,
        term: int,
        losses: tuple[float, float],
        rules: Rules,
        now: float,
    ) -> tuple[PlanContext, Plan] | None:
        """Divide the cell: what goes with ``base`` for the peers that stay, and the founding plan
        for those that leave; None while the cell stays whole. ``me`` leads and stays. ``losses``:
        ``loss`` and ``loss_val`` of the plan. ``rules``: those in force; a cell divides above
        ``rules.cell`` replicas of a stage, never with 0."""
        most = rules.cell
        away = self._leavers(roster, base, me, most) if most and now >= self._again else {}
        if not away:
            return None
        ends = [p for p in roster.replicas()[ENDS] if roster.can_start(p, base)]
        away = self._with_a_leader(away, ends, me)
        halves = [_half(roster, base, away, leaves) for leaves in (True, False)]
        if not away or not all(self._hold_the_state(roster, half) for half in halves):
            self.postpone(now)
            return None
        try:
            stays, leaves = split(past.cursor)
        except ValueError:  # its share of the samples has been halved as often as can be
            self.postpone(now)
            return None
        members = tuple(PlanMember(p, s, roster.speed(p)) for p, s in sorted(away.items()))
        founded = Plan(
            base.epoch,
            term,
            me,
            members,
            (),
            past.owners,
            digests=dict(roster.agreed),
            cursor=leaves,
            loss=losses[0],
            loss_val=losses[1],
            tokens=past.tokens,
            lineage=base.lineage,
            change=rules.change,
            cell_id=child_cell(self._cell, base.lineage, term),
            parent=self._cell,
            electorate=Electorate(tuple(sorted(away))),
        )
        return replace(past, cursor=stays), founded

    def _leavers(self, roster: Roster, base: Version, me: PeerId, most: int) -> dict[PeerId, int]:
        """The peers that leave, with their stages: up to half of every stage, at most a full cell,
        chosen so that near peers stay together. Empty unless every stage has two peers that can
        start from ``base``, and some stage has more than ``most``."""
        if not base.epoch:
            return {}
        able = {
            stage: [p for p in peers if roster.can_start(p, base)]
            for stage, peers in roster.replicas().items()
        }
        if min(map(len, able.values())) < 2 or max(map(len, able.values())) <= most:
            return {}
        rows = {stage: [(p, roster.speed(p)) for p in peers] for stage, peers in able.items()}
        costs = believe(roster.measured(), able[ENDS], roster.doubts(), self._tensor)
        return leavers(rows, me, most, costs.delay)

    def _with_a_leader(
        self, away: dict[PeerId, int], ends: Sequence[PeerId], me: PeerId
    ) -> dict[PeerId, int]:
        """With an ends peer among those who leave that may lead them; empty where there is none."""
        leave = [p for p in ends if p in away]
        if any(map(self._may_lead, leave)):
            return away
        able = [p for p in ends if p != me and p not in away and self._may_lead(p)]
        if not leave or not able:
            return {}
        return {p: s for p, s in away.items() if p != leave[0]} | {able[0]: ENDS}

    def _hold_the_state(self, roster: Roster, half: Stages) -> bool:
        """Whether these have the memory for the optimizer's state of every stage."""
        for stage, peers in half.items():
            room = {p: r for p in peers if (r := roster.candidates[p].room)}
            try:
                self._assign(stage, [(p, roster.speed(p)) for p in peers], {}, room)
            except OutOfResources:
                return False
        return True


def _half(roster: Roster, base: Version, away: Collection[PeerId], leaves: bool) -> Stages:
    """By stage, who starts from ``base`` in the cell of those who leave, or of those who stay."""
    return {
        stage: [p for p in peers if (p in away) is leaves and roster.can_start(p, base)]
        for stage, peers in roster.replicas().items()
    }
