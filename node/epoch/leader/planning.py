"""Makes the plan that starts from a version: members and owners, settings, micro-batches and their
paths. Pure. Enters: the roster, the start of the plan. Leaves: plans, and facts about them for the
record. Never: the choice of the version (:mod:`node.epoch.leader.starting_point`), the fate of a
plan (the leader's)."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from node.consensus.rules import Rules
from node.consensus.voters import decide
from node.core.errors import OutOfResources, Refused
from node.core.ids import ENDS, NO_CELL, CellId, PeerId
from node.core.journey import NO_WINDOW, Electorate, Hop, Path, Plan, PlanMember, Version, Window
from node.data.order import Sampler
from node.epoch.events import RecordFact
from node.epoch.facts import RunFacts
from node.epoch.leader import reports
from node.epoch.leader.attempt import EpochAttempt
from node.epoch.leader.deadlines import EpochDeadlines
from node.epoch.leader.division import Division
from node.epoch.leader.plan_start import PlanStart
from node.epoch.leader.roster import Roster
from node.epoch.leader.routing import Routing
from node.epoch.leader.windows import Windows
from node.epoch.pace import ALL_OWN
from node.epoch.plan_context import PastPlan, PlanContext
from node.epoch.plan_terms import PlanTerms

DEPART_S = 15.0
"""Seconds for which a peer that left is expected to give the state it held."""
LINE = 64
"""Versions of a leader's plans that are remembered."""
WARM = 2
"""Replicas of a stage that work, at which it can do without one that only listens."""


@dataclass(frozen=True)
class NextPlan:
    """A plan that was made. ``founded``: the plan that founds a new cell of some of the peers, if
    the cell divides; ``said``: facts to record before the plan; ``fact`` records the plan itself.
    ``steady``: no part has another owner than before."""

    plan: Plan
    founded: Plan | None
    said: list[RecordFact]
    fact: RecordFact
    steady: bool


class Planning:
    """Plans of the cell ``cell``, made by its leader ``me`` after ``history`` and plans of
    ``term``. ``rules``: the owner's newest change that is known here. Kept from plan to plan: the
    stages left out, the peers that have left."""

    def __init__(
        self,
        me: PeerId,
        facts: RunFacts,
        *,
        term: int,
        history: PastPlan | None,
        rules: Rules,
        cell: CellId,
    ) -> None:
        self._me = me
        self._facts = facts
        self._cell = cell
        self.rules = rules
        self.terms = PlanTerms(term)
        self.routing = Routing(facts, history)
        self.deadlines = EpochDeadlines(facts)
        self.windows = Windows()
        self.division = Division(me, facts, cell)
        self._left_out: tuple[int, ...] = ()
        self._departed: dict[PeerId, float] = {}
        self._behind = Behind()

    def learns(self, rules: Rules) -> None:
        """The owner has changed how cells average; of two changes the higher revision counts."""
        self.rules = max(self.rules, rules, key=lambda r: r.revision)

    def departed(self, peer: PeerId, now: float) -> None:
        """A peer has left, and for a while it still gives the state it held."""
        self._departed[peer] = now

    def next(self, roster: Roster, start: PlanStart, now: float) -> NextPlan:
        """Make the next plan, and divide the cell if it is too large; the roster has agreed on the
        digests of the version. Raises OutOfResources if the members' memory does not hold the
        optimizer's state; NoWay if no paths lead through all stages."""
        rules = self.in_force(start.past)
        if rules.change != start.past.change:
            self.windows.forget()
        founded: Plan | None = None
        divided = self.division.founds(roster, start, rules, now)
        if divided is not None:
            start, founded = divided
            away = {m.peer for m in founded.members}
            roster = roster.without(away)
            for peer in away:
                self.departed(peer, now)
        window = NO_WINDOW
        if start.base.epoch < self._facts.epochs:
            window = self.windows.next(roster, start.base, now)
        child = NO_CELL
        if founded is not None:
            child = founded.cell_id
        plan, said, fact = self._plan(roster, start, window, child, now)
        if founded is not None:
            self.division.left(founded, now)
        self.terms.planned(plan.term, now)
        return NextPlan(plan, founded, said, fact, start.past.owners == plan.owners)

    def measurement(self, roster: Roster, base: Version) -> Plan:
        """A plan of the peers that would take the first step, to measure the held-out loss of
        ``base`` before it. The time limit is an epoch's over one replica of each stage. Nobody gets
        the plan."""
        stages = roster.participants.by_stage()
        workers = {s: roster.versions.workers(s, base) for s in stages}
        members = tuple(
            PlanMember(peer, stage, roster.speeds.of(peer))
            for stage, peers in workers.items()
            for peer in peers
        )
        hops = tuple(Hop(stage, peers[0]) for stage, peers in workers.items() if stage != ENDS)
        path = Path(0, self._me, (), hops)
        within_s = self.deadlines.run(roster, (path,) * self._facts.batch.micro_batches)
        term = self.terms.newest
        return Plan(base.epoch, term, self._me, members, (), {}, deadline_s=within_s)

    def committed(self, attempt: EpochAttempt, now: float) -> None:
        """The epoch of an attempt counts."""
        plan = attempt.plan
        timing = attempt.timing
        self.windows.committed(plan)
        if not plan.outer:
            self.routing.committed(plan, attempt.results.dropped, now - timing.closed)
        if not attempt.dead:  # the others waited for a dead member, which is no work
            self.deadlines.took(plan, timing.round_took(now), attempt.steady)

    def _plan(
        self, roster: Roster, start: PlanStart, window: Window, founds: CellId, now: float
    ) -> tuple[Plan, list[RecordFact], RecordFact]:
        """Make a plan. Returns the plan, the facts to record before it, and the fact that records
        it. ``window`` and ``founds`` as in a plan."""
        facts = self._facts
        routing = self.routing
        base = start.base
        past = start.past
        finished = base.epoch >= facts.epochs
        outer = 0
        if window.means:
            outer = self.windows.number()
        rules = self.in_force(past)
        works = not finished and not outer
        drafted, owners = self._draft(roster, base, past, works=works)
        members = drafted
        if not finished:
            members = _without_idle(drafted, roster.peers.probation, start.electorate)
        sampler = Sampler(past.cursor)
        cursor = sampler.cursor()
        paths: tuple[Path, ...] = ()
        by_stage: dict[int, list[tuple[PeerId, float]]] = {}
        for m in members:
            if m.current:
                by_stage.setdefault(m.stage, []).append((m.peer, m.speed))
        if works:
            batch = facts.batch
            samples = [tuple(sampler.take(batch.micro_batch)) for _ in range(batch.micro_batches)]
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
        agreed = roster.versions.agreed
        plan = Plan(
            base.epoch,
            start.term,
            self._me,
            members,
            paths,
            owners,
            self._moved(roster, drafted, owners, past, now),
            {stage: digest for stage, digest in agreed.items() if stage in by_stage},
            deadline_s=facts.waits.epoch_s,
            cursor=cursor,
            loss=start.loss,
            loss_val=start.loss_val,
            tokens=past.tokens,
            lineage=base.lineage,
            forecast=forecast,
            outer=outer,
            stood=roster.versions.stages_that_stood(base),
            change=rules.change,
            cell_id=self._cell,
            founds=founds,
            window=window,
            electorate=start.electorate,
            reference=past.reference,
            wires=wires,
        )
        if outer:
            deadline_s = self.deadlines.round(roster, plan)
        else:
            deadline_s = self.deadlines.run(roster, paths, plan.forecast[0])
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
        self, roster: Roster, base: Version, past: PlanContext, *, works: bool
    ) -> tuple[tuple[PlanMember, ...], dict[str, PeerId]]:
        """The members, by PeerId, and the owner of each part. ``works``: it has micro-batches.
        Raises OutOfResources if their memory does not hold the optimizer's state."""
        members: list[PlanMember] = []
        owners: dict[str, PeerId] = {}
        speeds = roster.speeds
        for stage, peers in roster.participants.by_stage().items():
            able = speeds.rows(roster.versions.workers(stage, base))
            if not able:
                # the epoch goes around this stage, and a peer that is here has nobody to listen to
                continue
            current = {p for p, _ in able}
            owners |= self._owners(roster, stage, able, past, roster.peers.room(current))
            if works and self.deadlines.worth_fetching(roster, stage):
                current |= self._behind.fetching(roster, stage, base, current)
            members += [PlanMember(p, stage, speeds.of(p), p in current) for p in peers]
        self._behind.planned(base, roster.versions.agreed)
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
        may_own = roster.participants.may_own(stage)
        owning = [(p, speed) for p, speed in able if p in may_own]
        if min(ALL_OWN, len(able)) <= len(owning) < len(able):
            with suppress(OutOfResources):
                return assign(stage, owning, past.owners, room)
        return assign(stage, able, past.owners, room)

    def _leave_out(self, roster: Roster, base: Version) -> list[RecordFact]:
        """Report the stages that paths begin to go around, and the stages that they visit again."""
        was = self._left_out
        self._left_out = tuple(roster.versions.bare(base))
        gone = sorted(set(self._left_out) - set(was))
        back = sorted(set(was) - set(self._left_out))
        return [
            *(reports.stage_left_out(s, base) for s in gone),
            *(reports.stage_back(s, base, roster.versions.held(s, base)) for s in back),
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
        donors = {m.peer for m in members} | roster.peers.leaving | self._departed.keys()
        if past.founded:  # the owners of the parent cell are as well as they were
            donors |= set(past.owners.values())
        return {
            p: old
            for p, new in owners.items()
            if (old := past.owners.get(p, new)) != new and old in donors
        }


class Behind:
    """Replicas with an older version of the history that work all the same, because they fetch the
    version that the epoch begins from when they get the plan."""

    def __init__(self) -> None:
        self._line: dict[Version, Mapping[int, str]] = {}
        """Digest of each stage at the versions that plans of this leader began from, the newest
        last."""
        self._asked: dict[PeerId, Version] = {}
        """Replicas that were asked to fetch, with the version; one that still has an older version
        is not asked again, and listens."""

    def planned(self, base: Version, digests: Mapping[int, str]) -> None:
        """A plan begins from this version, with these digests of its stages."""
        self._line[base] = dict(digests)
        while len(self._line) > LINE:
            del self._line[next(iter(self._line))]

    def fetching(
        self, roster: Roster, stage: int, base: Version, current: Collection[PeerId]
    ) -> set[PeerId]:
        """Replicas of a stage that fetch ``base`` from the ``current`` ones. Each reports an older
        version with its digest, as a current member reports the base: a claim costs nothing."""
        versions = roster.versions
        self._asked = {p: v for p, v in self._asked.items() if p not in current}
        if stage not in versions.agreed or versions.held(stage, base) != base:
            return set()
        here = roster.peers.candidates
        found = {
            p
            for p in roster.participants.by_stage()[stage]
            if p not in current
            and p not in self._asked
            and p not in roster.peers.probation
            and here[p].at.epoch < base.epoch
            and here[p].digest
            and self._line.get(here[p].at, {}).get(stage) == here[p].digest
        }
        self._asked |= dict.fromkeys(found, base)
        return found


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
