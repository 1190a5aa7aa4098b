"""Makes the plan that starts from a version: members and owners, settings, micro-batches and their
paths. When the cell divides, also the plan that founds the new cell. Pure. Enters: the roster, the
context of the version, the term. Leaves: plans, and facts about them for the record. Never: the
choice of the version (:mod:`node.epoch.leader.starting_point`), the fate of a plan (the
leader's). A peer that does not accept a founding plan stays in the old cell."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from node.consensus.rules import Rules
from node.consensus.voters import decide
from node.core.errors import OutOfResources, Refused
from node.core.ids import ENDS, CellId, PeerId, child_cell
from node.core.journey import Electorate, Path, Plan, PlanMember, Version, Window
from node.core.samples import split
from node.data.order import Sampler
from node.epoch.events import RecordFact
from node.epoch.facts import RunFacts
from node.epoch.leader import reports
from node.epoch.leader.deadlines import Deadlines
from node.epoch.leader.roster import Roster
from node.epoch.leader.routing import Routing
from node.epoch.pace import ALL_OWN
from node.epoch.plan_context import PlanContext
from node.scheduler.costs import believe
from node.scheduler.near import leavers

DEPART_S = 15.0
"""Seconds for which a peer that left is expected to give the state it held."""
LEFT_S = 5.0
"""Seconds for which heartbeats of members of a new cell are ignored: they may be from before they
knew of it."""
WARM = 2
"""Replicas of a stage that work, at which it can do without one that only listens."""
POSTPONED_S = 60.0
"""Seconds until a cell tries to divide again, after a division whose halves could not have
worked."""


class Planning:
    """Plans of the cell ``cell``, made by its leader ``me``. ``rules``: the owner's newest change
    that is known here. Kept from plan to plan: the stages left out, the peers that have left."""

    def __init__(
        self,
        me: PeerId,
        facts: RunFacts,
        routing: Routing,
        deadlines: Deadlines,
        rules: Rules,
        cell: CellId,
    ) -> None:
        self._me = me
        self._facts = facts
        self._routing = routing
        self._deadlines = deadlines
        self.rules = rules
        self._cell = cell
        self._left_out: tuple[int, ...] = ()
        self._departed: dict[PeerId, float] = {}
        self._divides_from = 0.0
        """Time before which no division is tried."""
        self._just_left: dict[PeerId, float] = {}
        """Members of a new cell, each with the time until which its heartbeats may be from
        before."""

    def learns(self, rules: Rules) -> None:
        """The owner has changed how cells average; of two changes the higher revision counts."""
        self.rules = max(self.rules, rules, key=lambda r: r.revision)

    def departed(self, peer: PeerId, now: float) -> None:
        """A peer has left, and for a while it still gives the state it held."""
        self._departed[peer] = now

    def plan(
        self,
        roster: Roster,
        base: Version,
        past: PlanContext,
        term: int,
        losses: tuple[float, float],
        now: float,
        window: Window,
        outer: int,
        founds: CellId,
        electorate: Electorate,
    ) -> tuple[Plan, list[RecordFact], RecordFact]:
        """Make the plan that starts from ``base``; the roster has agreed on its digests. Returns
        the plan, the facts to record before it, and the fact that records it. ``losses``: ``loss``
        and ``loss_val`` of the plan; ``window``: the window in the plan; ``outer``: number of the
        window that has its means put in place by this plan, 0 for none; ``founds`` and
        ``electorate``: as in a plan.

        Raises OutOfResources if the members' memory does not hold the optimizer's state.
        """
        facts = self._facts
        routing = self._routing
        finished = base.epoch >= facts.epochs
        rules = self.in_force(past)
        drafted, owners = self._draft(roster, base, past)
        members = drafted
        if not finished:
            members = _without_idle(drafted, roster.probation, electorate)
        sampler = Sampler(past.cursor)
        cursor = sampler.cursor()
        paths: tuple[Path, ...] = ()
        by_stage: dict[int, list[tuple[PeerId, float]]] = {}
        for m in members:
            if m.current:
                by_stage.setdefault(m.stage, []).append((m.peer, m.speed))
        if not finished and not outer:
            count = facts.target_batch // facts.micro_batch
            samples = [tuple(sampler.take(facts.micro_batch)) for _ in range(count)]
            paths = routing.lay(roster, by_stage, samples)
        # Only now nothing can be raised any more: facts for the record are said once, and must not
        # be lost with a plan.
        said = self._leave_out(roster, base)
        if rules.change != past.change and not finished:
            said.append(reports.averaging_changed(rules, base))
        forecast = (0.0, 0.0)
        wires: Mapping[tuple[PeerId, PeerId], str] = {}
        if paths:
            forecast = routing.forecast(by_stage)
            wires = routing.formats(paths)
        plan = Plan(
            base.epoch,
            term,
            self._me,
            members,
            paths,
            owners,
            self._moved(roster, drafted, owners, past, now),
            {stage: digest for stage, digest in roster.agreed.items() if stage in by_stage},
            deadline_s=facts.waits.epoch_s,
            cursor=cursor,
            loss=losses[0],
            loss_val=losses[1],
            tokens=past.tokens,
            lineage=base.lineage,
            forecast=forecast,
            outer=outer,
            stood=roster.stages_that_stood(base),
            change=rules.change,
            cell_id=self._cell,
            founds=founds,
            window=window,
            electorate=electorate,
            reference=past.reference,
            wires=wires,
        )
        if outer:
            deadline_s = self._deadlines.round(roster, plan)
        else:
            deadline_s = self._deadlines.run(roster, paths, plan.forecast[0])
        plan = replace(plan, deadline_s=deadline_s)
        if finished:
            return plan, said, reports.run_finished(facts.epochs)
        about: dict[str, object] = {}
        if paths:
            about = routing.about(by_stage)
        return plan, said, reports.epoch_planned(plan, self._left_out, about)

    def in_force(self, past: PlanContext) -> Rules:
        """The settings of the next plan: a newer change that is known here, else the one in force
        at ``past``. The settings in force belong to the history, so a change may come into force
        again after the history in which it first did was undone. A recalled change that the owner
        did not sign counts as none."""
        try:
            before = self._facts.make.read(past.change)
        except Refused:
            before = self._facts.make.read("")
        if before.revision >= self.rules.revision:
            self.rules = before
        return self.rules

    def _draft(
        self, roster: Roster, base: Version, past: PlanContext
    ) -> tuple[tuple[PlanMember, ...], dict[str, PeerId]]:
        """The members, by PeerId, and the owner of each part. Raises OutOfResources if their memory
        does not hold the optimizer's state."""
        members: list[PlanMember] = []
        owners: dict[str, PeerId] = {}
        for stage, peers in roster.replicas().items():
            able = [(p, roster.speed(p)) for p in roster.workers(stage, base)]
            if not able:
                # the epoch goes around this stage, and a peer that is here has nobody to listen to
                continue
            current = {p for p, _ in able}
            members += [PlanMember(p, stage, roster.speed(p), p in current) for p in peers]
            room = {p: r for p in current if (r := roster.candidates[p].room)}
            owners |= self._owners(roster, stage, able, past, room)
        return tuple(sorted(members, key=lambda m: m.peer)), owners

    def _owners(
        self,
        roster: Roster,
        stage: int,
        able: Sequence[tuple[PeerId, float]],
        past: PlanContext,
        room: Mapping[PeerId, int],
    ) -> dict[str, PeerId]:
        """The owner of each part of a stage among ``able`` (replicas that start, with their
        speeds): those that every other replica reaches, if they are enough and have the memory.
        Else all of them, and missing ways are found in the round. Raises OutOfResources if the
        memory of all does not suffice."""
        assign = self._facts.make.assign
        may_own = roster.may_own(stage)
        owning = [(p, speed) for p, speed in able if p in may_own]
        if min(ALL_OWN, len(able)) <= len(owning) < len(able):
            with suppress(OutOfResources):
                return assign(stage, owning, past.owners, room)
        return assign(stage, able, past.owners, room)

    def _leave_out(self, roster: Roster, base: Version) -> list[RecordFact]:
        """Report the stages that paths begin to go around, and the stages that they visit again."""
        was = self._left_out
        self._left_out = tuple(roster.bare(base))
        gone = sorted(set(self._left_out) - set(was))
        back = sorted(set(was) - set(self._left_out))
        return [
            *(reports.stage_left_out(s, base) for s in gone),
            *(reports.stage_back(s, base, roster.held(s, base)) for s in back),
        ]

    def _moved(
        self,
        roster: Roster,
        members: Sequence[PlanMember],
        owners: Mapping[str, PeerId],
        past: PlanContext,
        now: float,
    ) -> dict[str, PeerId]:
        """Donors of optimizer state: for each part with a new owner, the previous one, if it can
        still give the state."""
        self._departed = {p: at for p, at in self._departed.items() if now - at < DEPART_S}
        leaving = {p for p, c in roster.candidates.items() if c.leaving}
        donors = {m.peer for m in members} | leaving | self._departed.keys()
        if past.founded:  # the owners of the parent cell are as well as they were
            donors |= set(past.owners.values())
        return {
            p: old
            for p, new in owners.items()
            if (old := past.owners.get(p, new)) != new and old in donors
        }

    # ----------------------------------------------------------- a cell divides

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
        self,
        roster: Roster,
        base: Version,
        past: PlanContext,
        term: int,
        losses: tuple[float, float],
        rules: Rules,
        now: float,
    ) -> tuple[PlanContext, Plan] | None:
        """Divide the cell. Returns the context of ``base`` for the peers that stay, and the
        founding plan for the peers that leave; None while the cell stays whole. ``losses``:
        ``loss`` and ``loss_val`` of the plan. ``rules``: the rules in force; a cell divides above
        ``rules.cell`` replicas of a stage, never with 0."""
        if not rules.cell or now < self._divides_from:
            return None
        away = self._leavers(roster, base, rules.cell)
        if not away:
            return None
        ends = [p for p in roster.replicas()[ENDS] if roster.can_start(p, base)]
        able = [p for p in ends if roster.candidates[p].may_lead]
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
        return replace(past, cursor=stays), Plan(
            base.epoch,
            term,
            self._me,
            tuple(PlanMember(p, s, roster.speed(p)) for p, s in sorted(away.items())),
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
            reference=past.reference,
        )

    def _leavers(self, roster: Roster, base: Version, most: int) -> dict[PeerId, int]:
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
        costs = believe(roster.measured(), able[ENDS], roster.doubts(), self._facts.sizes.tensor)
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
            room = {p: r for p in peers if (r := roster.candidates[p].room)}
            try:
                self._facts.make.assign(stage, [(p, roster.speed(p)) for p in peers], {}, room)
            except OutOfResources:
                return False
        return True


def _without_idle(
    members: Sequence[PlanMember], probation: Collection[PeerId], electorate: Electorate
) -> tuple[PlanMember, ...]:
    """The members without those on ``probation`` that would only listen: owners would send each of
    them the parameters of every epoch, for nothing. They stay where a stage has fewer than
    :data:`WARM` others that work, which may die, and if the others could not commit."""
    working = Counter(m.stage for m in members if m.current)
    rest = tuple(
        m for m in members if m.current or m.peer not in probation or working[m.stage] < WARM
    )
    if decide(electorate, {m.peer for m in rest}):
        return rest
    return tuple(members)


def _half(
    roster: Roster, base: Version, away: Collection[PeerId], leaves: bool
) -> dict[int, list[PeerId]]:
    """Peers of each stage that start from ``base`` in the new cell (``leaves``) or in the old
    one."""
    return {
        stage: [p for p in peers if (p in away) is leaves and roster.can_start(p, base)]
        for stage, peers in roster.replicas().items()
    }
