"""From a version to the plan that starts from it: who does what, which settings count,
micro-batches and their paths. Pure. Enters: the roster, what goes with the version, the term.
Leaves: a plan, and what is said about it. Never: which version that is
(:mod:`node.training.leader.starting_point`), what becomes of the plan (the leader's)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from node.core.errors import Refused
from node.core.ids import NO_CELL, CellId, PeerId
from node.core.journey import NO_WINDOW, NOBODY, Electorate, Path, Plan, PlanMember, Version, Window
from node.data.order import Sampler
from node.training.leader import reports
from node.training.leader.deadlines import Deadlines
from node.training.leader.roster import Roster
from node.training.leader.routing import Routing
from node.training.protocol.events import RecordFact
from node.training.protocol.facts import RunFacts
from node.training.protocol.plan_context import PlanContext
from node.training.protocol.rules import Rules

DEPART_S = 15.0
"""Who left still gives what it held for about so long."""


class Planning:
    """``rules``: the owner's newest change that is known here. Kept from plan to plan: which stages
    are left out, who has left."""

    def __init__(
        self,
        me: PeerId,
        facts: RunFacts,
        routing: Routing,
        deadlines: Deadlines,
        rules: Rules,
        cell: CellId = NO_CELL,
    ) -> None:
        self._me, self._facts, self._routing, self._deadlines = me, facts, routing, deadlines
        self.rules, self._cell = rules, cell
        self._left_out: tuple[int, ...] = ()
        self._departed: dict[PeerId, float] = {}

    def learns(self, rules: Rules) -> None:
        """The owner has changed how cells average; of two changes the higher revision counts."""
        self.rules = max(self.rules, rules, key=lambda r: r.revision)

    def departed(self, peer: PeerId, now: float) -> None:
        """A peer has left, and for a while still gives what it held."""
        self._departed[peer] = now

    def plan(
        self,
        roster: Roster,
        base: Version,
        past: PlanContext,
        term: int,
        losses: tuple[float, float],
        now: float,
        window: Window = NO_WINDOW,
        outer: int = 0,
        founds: CellId = NO_CELL,
        electorate: Electorate = NOBODY,
    ) -> tuple[Plan, list[RecordFact], RecordFact]:
        """The plan that starts from ``base``, on whose digests the roster has agreed; what is to be
        said before it, and of it. ``losses``: ``loss`` and ``loss_val`` of the plan; ``window`` and
        ``outer``: of the rounds with other cells; ``outer`` is the window whose means this plan
        puts in place, 0 for none; ``founds`` and ``electorate``: as in a plan.

        Raises OutOfResources when the members' memory does not hold the optimizer's state.
        """
        facts, routing = self._facts, self._routing
        said: list[RecordFact] = []
        finished = base.epoch >= facts.epochs
        rules = self.in_force(past)
        if rules.change != past.change and not finished:
            said.append(reports.averaging_changed(rules, base))
        members, owners = self._draft(roster, base, past)
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
        # Only now nothing can be raised any more: what is said once must not be lost with a plan.
        said = self._leave_out(roster, base) + said
        plan = Plan(
            base.epoch,
            term,
            self._me,
            members,
            paths,
            owners,
            self._moved(roster, members, owners, past, now),
            {stage: digest for stage, digest in roster.agreed.items() if stage in by_stage},
            deadline_s=facts.waits.epoch_s,
            cursor=cursor,
            loss=losses[0],
            loss_val=losses[1],
            tokens=past.tokens,
            lineage=base.lineage,
            forecast=routing.forecast(by_stage) if paths else (0.0, 0.0),
            outer=outer,
            stood=roster.stages_that_stood(base),
            change=rules.change,
            cell_id=self._cell,
            founds=founds,
            window=window,
            electorate=electorate,
        )
        within = (
            self._deadlines.round(roster, plan)
            if outer
            else self._deadlines.run(roster, paths, plan.forecast[0])
        )
        plan = replace(plan, deadline_s=within)
        if finished:
            return plan, said, reports.run_finished(facts.epochs)
        about = routing.about(by_stage) if paths else {}
        return plan, said, reports.epoch_planned(plan, self._left_out, about)

    def in_force(self, past: PlanContext) -> Rules:
        """The settings of the next plan: a newer change that is known here, else the one in force
        at ``past``. What was in force belongs to the history, so a change may come into force again
        after the history in which it first did was undone. A recalled change that the owner did not
        sign counts as none."""
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
        """The members, by PeerId, and who owns which part. Raises OutOfResources when their memory
        does not hold the optimizer's state."""
        members: list[PlanMember] = []
        owners: dict[str, PeerId] = {}
        for stage, peers in roster.replicas().items():
            able = [(p, roster.speed(p)) for p in peers if roster.can_start(p, base)]
            if not able:
                # the epoch goes around this stage, and whoever is here has nobody to listen to
                continue
            current = {p for p, _ in able}
            members += [PlanMember(p, stage, roster.speed(p), p in current) for p in peers]
            room = {p: r for p in current if (r := roster.candidates[p].room)}
            owners |= self._facts.make.assign(stage, able, past.owners, room)
        return tuple(sorted(members, key=lambda m: m.peer)), owners

    def _leave_out(self, roster: Roster, base: Version) -> list[RecordFact]:
        """Say it when paths begin to go around a stage, and when they no longer do."""
        was, self._left_out = self._left_out, tuple(roster.bare(base))
        gone, back = sorted(set(self._left_out) - set(was)), sorted(set(was) - set(self._left_out))
        said = [reports.stage_left_out(s, base) for s in gone]
        return said + [reports.stage_back(s, base, roster.held(s, base)) for s in back]

    def _moved(
        self,
        roster: Roster,
        members: Sequence[PlanMember],
        owners: Mapping[str, PeerId],
        past: PlanContext,
        now: float,
    ) -> dict[str, PeerId]:
        """Who can still give the optimizer state of each part that has another owner than
        before."""
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
