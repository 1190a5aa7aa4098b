"""The leader of the epoch: plan, run, close, round, commit. Pure: events and time in, actions out.

    GATHER  every stage has a live peer that can start from one version  -> plan        -> RUN
            the micro-batches of another leader's plan run here          -> take over   -> RUN
            nobody here knows the plan behind that version               -> recall      -> GATHER
    RUN     every micro-batch has an outcome, or the deadline has passed  -> close      -> ROUND
    ROUND   every live member has committed                               -> next version -> GATHER
            a member lacks parts and nobody is still averaging            -> repair      -> ROUND

It is a coordinator, never a data path. Whatever it knows it can learn again from what peers say
every second, so the next leader starts in GATHER and loses nothing.
"""

from collections.abc import Mapping
from enum import Enum

from node.consensus.rules import Rules
from node.core.errors import OutOfResources
from node.core.ids import NO_CELL, CellId, PeerId
from node.core.journey import Electorate, Plan, Version
from node.core.patience import GAP_S
from node.epoch import events as ev
from node.epoch.attempts.repeats import Repeats
from node.epoch.attempts.timing import AttemptTimes
from node.epoch.facts import RunFacts
from node.epoch.leader import reports
from node.epoch.leader.attempt import ATTEMPTS, EpochAttempt
from node.epoch.leader.conduct import Conduct, Record
from node.epoch.leader.evaluation import Evaluation
from node.epoch.leader.gathering import Gathering
from node.epoch.leader.plan_start import PlanStart
from node.epoch.leader.planning import Planning
from node.epoch.leader.roster import Roster
from node.epoch.leader.voting import Voting
from node.epoch.pace import RECALL_FROM
from node.epoch.plan_context import Memory, PastPlan, PlanContext
from node.epoch.waiting import Lack, Wait
from node.pipeline.events import VisitSketches
from node.scheduler.proven import NoWay

NEVER_MADE = "gave parameters that no step of the optimizer makes"
ALONE = "alone refused the parameters of an owner"
DIFFERED = "made other parameters than its stage"
LOST_PLAN = "does not run the plan any more, and its work in the epoch is lost"

AFTER_THE_END = (
    ev.Heartbeat
    | ev.Recalled
    | ev.Unreachable
    | ev.Declined
    | ev.Committed
    | ev.ClockTick
    | ev.QuorumChanged
    | ev.Equivocated
    | ev.ContextsKept
    | ev.Resigning
)
"""Events that count after the last plan of the run."""

Actions = list[ev.LeaderAction]


class Phase(Enum):
    """The phase of the epoch."""

    GATHER = "gather"
    EVALUATE = "evaluate"
    RUN = "run"
    ROUND = "round"
    FINISHED = "finished"


class Leader:
    """The state machine of one leader. ``history``: the newest plan this peer took part in, if any;
    it gives the cursor and the owners of the next plan. ``rules``: the owner's newest change that
    this peer knows; ``known``: its colleagues; ``cell``: the cell it leads, if the run has several;
    ``conduct``: records of the members from when this peer led before."""

    def __init__(
        self,
        me: PeerId,
        facts: RunFacts,
        *,
        term: int = 0,
        history: PastPlan | None = None,
        rules: Rules | None = None,
        known: frozenset[PeerId] = frozenset(),
        cell: CellId = NO_CELL,
        conduct: Mapping[PeerId, Record] | None = None,
    ) -> None:
        self.me = me
        self.facts = facts
        self.phase = Phase.GATHER
        self.attempt: EpochAttempt | None = None
        """The attempt under way."""
        self.memory = Memory(history)
        newest = self.memory.history
        self.roster = Roster(
            facts.stages,
            me,
            facts.prove,
            known,
            _owners(newest),
            stood=self.memory.stood,
            late_s=facts.waits.late_s,
            coarsest=facts.sizes.coarsest,
        )
        self.conduct = Conduct(conduct)
        self.gathering = Gathering(facts, history)
        self.voting = Voting(me)
        self.planning = Planning(
            me, facts, term=term, history=history, rules=rules or facts.make.read(""), cell=cell
        )
        self.losses = Evaluation(facts, newest)
        self.repeats = Repeats()

    @property
    def plan(self) -> Plan | None:
        """The plan in force, if an epoch is under way."""
        if self.attempt is None:
            return None
        return self.attempt.plan

    @property
    def idle(self) -> bool:
        """True if no epoch is under way."""
        return self.phase in (Phase.GATHER, Phase.FINISHED)

    def silent_s(self, peer: PeerId, now: float) -> float:
        """Seconds since the last sign of life of a peer that is silent for longer than usual, 0 for
        any other peer."""
        if peer == self.me:
            return 0.0
        return self.roster.life.silent_s(peer, now)

    def votes_on(self, e: ev.Committed) -> tuple[Plan, Version] | None:
        """The plan that a member's report of a commit belongs to, and the version that the plan
        makes; None if the report is not of the epoch under way."""
        attempt = self._attempt_of(e.plan_hash)
        if attempt is None or attempt.plan.member(e.peer) is None:
            return None
        return attempt.plan, attempt.makes

    def handle(self, event: ev.LeaderEvent, now: float) -> Actions:
        """Handle one event and return the actions. Unknown or stale events change nothing."""
        if self.phase is Phase.FINISHED and not isinstance(event, AFTER_THE_END):
            return []
        match event:
            case ev.QuorumChanged(quorum):
                self.gathering.starting.proofs.newest(quorum)
            case ev.Equivocated(peers):
                self.voting.void(peers)
            case ev.ContextsKept(contexts):
                self.memory.kept(contexts)
            case ev.Resigning(resigns):
                self.gathering.resign(resigns)
            case ev.Heartbeat(peer) if not self.planning.division.has_left(peer, now):
                return self._heard(event, now)
            case ev.Unreachable():
                return self._unreachable(event, now)
            case ev.ProbeAnswered(peer, ours):
                return self._answered(peer, ours, now)
            case ev.Declined(plan_hash, reason):
                return self._declined(plan_hash, reason, now)
            case ev.Accused(about, by) if {about, by} <= self.roster.peers.candidates.keys():
                return self._probe([about])
            case ev.MicroBatchesReported():
                return self._finished(event, now)
            case ev.Sketched(peer, plan_hash, visits):
                self._sketched(peer, plan_hash, visits)
            case ev.Committed() | ev.Incomplete():
                return self._outcome(event, now)
            case ev.Evaluated(epoch, loss):
                if self.phase is Phase.EVALUATE and self.losses.is_of(epoch):
                    return self._evaluated(loss, now)
            case ev.Recalled():
                return self._recalled(event, now)
            case ev.MoveRefused(peer):
                self.gathering.stays(peer, now)
            case ev.Changed(rules):
                return self._changed(rules, now)
            case ev.Grouped():
                self.planning.windows.grouped(event)
            case ev.Searched(job, routes, makespan):
                self.planning.routing.router.improved(job, routes, makespan)
            case ev.ClockTick():
                return self._tick(event, now)
        return []

    def _attempt_of(self, plan_hash: str) -> EpochAttempt | None:
        """The attempt under way, if it is of the plan with this hash."""
        if self.attempt is None or self.attempt.plan.hash != plan_hash:
            return None
        return self.attempt

    # ----------------------------------------------------------- peers come and go

    def _heard(self, e: ev.Heartbeat, now: float) -> Actions:
        done: Actions = []
        before = self.roster.peers.candidates.get(e.peer)
        if before is not None and before.stage != e.stage:
            done = self._gone(e.peer, now, f"left stage {before.stage}")
            before = None
        self.roster.hear(e, now)
        if before is None:
            self.gathering.changed(now)
        elif self.phase is Phase.RUN and self._has_lost_the_plan(before, e):
            done += [reports.peer_lost(e.peer, LOST_PLAN), *self._member_lost(e.peer, now)]
        if self.phase is Phase.FINISHED:
            news = self.gathering.missed_the_end(e, self.roster)
        else:
            # Heartbeats with nothing new but measurements come from every peer every second: they
            # wait for the next clock tick.
            changed = before is None or e.stands() != before.stands()
            news = changed and self.phase is Phase.GATHER
        if news:
            done += self._try_plan(now)
        return done

    def _has_lost_the_plan(self, before: ev.Heartbeat, now: ev.Heartbeat) -> bool:
        """Return True if the plan in force ran at a peer and does not any more, as after a restart
        of its process that nobody has noticed."""
        if self.plan is None or now.peer == self.me:
            return False  # a leader's own heartbeat names no plan
        ran = before.capacity.running.plan_hash
        return ran == self.plan.hash != now.capacity.running.plan_hash

    def _unreachable(self, e: ev.Unreachable, now: float) -> Actions:
        self.roster.life.probed(e.peer)
        if self.roster.life.heard.get(e.peer, now) > e.since:
            return []
        if e.plan_hash and (self.plan is None or self.plan.hash != e.plan_hash):
            return []  # a late refusal of an earlier plan
        return self._gone(e.peer, now, "does not answer")

    def _answered(self, peer: PeerId, ours: bool, now: float) -> Actions:
        life = self.roster.life
        life.probed(peer)
        if peer not in self.roster.peers.candidates:
            return []
        if ours:
            life.alive(peer, now)
        elif life.is_late(peer, now):
            return self._gone(peer, now, "follows another leader")
        return []

    def _changed(self, rules: Rules, now: float) -> Actions:
        """The owner has changed the rules. A revoked peer counts as gone, and does not vote."""
        self.planning.learns(rules)
        revokes = self.planning.rules.revokes
        done: Actions = []
        for peer in [p for p in self.roster.peers.candidates if revokes(p)]:
            done += self._gone(peer, now, "is revoked by the owner of the run")
        return done

    def _gone(self, peer: PeerId, now: float, why: str) -> Actions:
        """Go on without a peer."""
        if peer == self.me:
            return []
        known = self.roster.gone(peer)
        if known is None:
            return []
        self.gathering.gone(peer, now)
        if known.leaving:
            self.planning.departed(peer, now)
            return [reports.peer_left(peer), *self._member_lost(peer, now)]
        return [reports.peer_lost(peer, why), *self._member_lost(peer, now)]

    def _member_lost(self, peer: PeerId, now: float) -> Actions:
        """Go on without a member of the attempt under way."""
        attempt = self.attempt
        if attempt is None:
            return []
        member = attempt.plan.member(peer)
        if member is None or peer in attempt.dead:
            return []
        attempt.lose([peer])
        if self.phase is Phase.EVALUATE:
            return []
        if (bare := attempt.bare) is not None:
            # No path can end any more, and there would be nobody to average.
            return self._abandon(
                now, f"stage {bare} has lost every peer that holds epoch {attempt.plan.epoch}"
            )
        # Others may still reach it, and would wait for it until the deadline.
        running = self.phase is Phase.RUN
        there = attempt.alive if running else attempt.living(member.stage)
        told = tuple(m.peer for m in there)
        done: Actions = [ev.SendLost(told, attempt.plan, tuple(sorted(attempt.dead)))]
        if running:
            attempt.results.give_up(peer)
            return done + self._close_if_done(attempt, now)
        return done + self._settle_stage(attempt, member.stage, now)

    # ----------------------------------------------------------- time passes

    def _tick(self, e: ev.ClockTick, now: float) -> Actions:
        self.gathering.expect(e.coming)
        self.roster.peers.met(e.known)
        self._wake(now)
        done = self._mind_the_silent(now, e.slack)
        attempt = self.attempt
        if self.phase is Phase.GATHER:
            done += self._try_plan(now)
        elif attempt is not None and now >= attempt.timing.deadline:
            done += self._time_is_up(attempt, now)
        elif (
            attempt is not None and self.phase is Phase.RUN and attempt.waits_for_few(now - e.slack)
        ):
            attempt.results.give_up(None)
            done += self._close_if_done(attempt, now)
        elif (
            attempt is not None
            and self.phase is Phase.RUN
            and self.gathering.outgrown(self.roster, attempt, now)
        ):
            done += self._begin_anew(attempt, now)
        elif attempt is not None:
            for peer in self._overdue(attempt, now - e.slack):
                done += self._late(attempt, peer, now)
        return done

    def _wake(self, now: float) -> None:
        """Allow for the time in which this process stood still: others may have found another
        leader, and nobody was late."""
        ticked = self.roster.life.ticked(now)
        if now - ticked > self.facts.waits.late_s:
            self.voting.hear_again(now)
        if self.attempt is not None:
            timing = self.attempt.timing
            stood_s = now - max(ticked, timing.began)
            if stood_s > GAP_S:
                timing.stood_still(stood_s, now)

    def _mind_the_silent(self, now: float, slack: float) -> Actions:
        """Ask silent peers whether they live. Silence alone is no death: a peer on a busy machine
        answers late."""
        done: Actions = []
        life = self.roster.life
        for peer in life.silent(now, slack):
            # The loss of another peer may have led to a division.
            if peer == self.me or peer not in life.heard:
                continue
            if life.probe(peer, now):
                done.append(ev.ProbePeer(peer))
            elif life.is_unanswered(peer, now):
                silent = now - life.heard[peer]
                done += self._gone(peer, now, f"was last heard {silent:.1f} s ago")
        return done

    def _time_is_up(self, attempt: EpochAttempt, now: float) -> Actions:
        """The deadline of the phase has passed."""
        if self.phase is Phase.RUN:
            attempt.results.give_up(None)
            return self._close_if_done(attempt, now)
        if self.phase is Phase.EVALUATE:
            return self._evaluated(0.0, now)
        if self.phase is not Phase.ROUND:
            return []
        done: Actions = []
        late = [peer for peer in attempt.unreported if peer != self.me]
        for peer in late:
            done += self._late(attempt, peer, now)
        if self.phase is Phase.ROUND and not late:
            done += self._abandon(now, "this peer did not finish its own round")
        return done

    def _overdue(self, attempt: EpochAttempt, now: float) -> list[PeerId]:
        """Members that are late with their report, where all others have reported and can commit
        without them."""
        if self.phase is Phase.RUN:
            late = attempt.results.silent_origins(attempt.dead)
        else:
            late = attempt.unreported
        if not attempt.timing.is_late(now) or self.me in late:
            return []
        if attempt.can_spare({*late, *attempt.probation}):
            return late
        return []

    def _late(self, attempt: EpochAttempt, peer: PeerId, now: float) -> Actions:
        """Go on without a member that did not report in time. A member that has fallen silent may
        be frozen, and is not blamed."""
        if attempt is not self.attempt or peer in attempt.dead:
            return []  # the loss of another member has changed the attempt
        if self.silent_s(peer, now):
            return self._gone(peer, now, "has fallen silent")
        why = "did not finish its work in time"
        seconds = now - attempt.timing.began
        blamed = self.conduct.blame([peer], why, seconds, now, attempt.plan.hash)
        return blamed + self._gone(peer, now, why)

    def _probe(self, peers: list[PeerId]) -> Actions:
        """Find out whether these peers live."""
        here = self.roster.peers.candidates
        return [ev.ProbePeer(peer) for peer in peers if peer in here and peer != self.me]

    # ----------------------------------------------------------- gather

    def _try_plan(self, now: float) -> Actions:
        """Plan an epoch, or wait for missing peers, versions and voters."""
        gathering = self.gathering
        roster = self.roster
        if gathering.resigns():
            return []
        roster.peers.put_on_probation(self.conduct.on_probation(now) - {self.me})
        asked = gathering.look(roster, self.memory.history, now)
        if asked is not None:
            return asked
        base = gathering.starting.choose(roster, self.memory.tokens, now)
        if isinstance(base, Wait):
            gathering.lacks_version(base)
            given_up = gathering.starting.go_on_from_less(roster, now)
            if given_up is None:
                return []
            return [given_up, *self._try_plan(now)]
        past = self._context(base, now)
        if past is None:
            return self._recall(base, now)
        revoked = self.planning.rules.revokes
        votes = self.voting.voters(self.memory.history, roster, base, revoked, now)
        if isinstance(votes, Wait):
            gathering.wait(votes)
            return []
        gathering.over()
        if (taken := self._take_over(base, past, now)) is not None:
            return taken
        if self.losses.is_due_before(base):
            plan = self.planning.measurement(roster, base)
            return [self._evaluate(EpochAttempt(plan, AttemptTimes(now, now)), base.epoch, now)]
        gathering.starting.found()
        # Facts for the record are said once, and must not be lost with a plan that cannot be made.
        done = gathering.starting.turn(roster, base, past.tokens, self.memory.tokens)
        return done + self._plan_or_wait(base, past, votes, now)

    def _take_over(self, base: Version, past: PlanContext, now: float) -> Actions | None:
        """Go on with the epoch that another leader began from ``base``; None where it is planned
        anew."""
        plan = self.memory.history
        timing = AttemptTimes(now, now)
        attempt = self.gathering.takeover.attempt(plan, base, self.roster, timing)
        if attempt is None:
            return None
        plan = attempt.plan
        timing.deadline = now + plan.deadline_s
        self.roster.versions.agree(base)
        self.memory.goes_on(past)
        self._follow(plan)
        self._begin(attempt, now)
        to = tuple(m.peer for m in attempt.alive)
        dead = tuple(sorted(attempt.dead))
        takes = [ev.SendTakeover(to, plan, dead), reports.epoch_taken_over(attempt)]
        return [*takes, *self._close_if_done(attempt, now)]

    def _context(self, base: Version, now: float) -> PlanContext | None:
        """The context of the version to start from; None if other peers must be asked for it, or
        for the proof that the version counts."""
        memory = self.memory
        versions = self.roster.versions
        batch = self.facts.batch.target_batch
        past = memory.past(base, versions.tokens_of(base), batch)
        # Others have followed a plan, which names the voters; this leader knows none.
        unknown = (
            memory.history is None
            and base not in memory.forgotten
            and any(c.term for c in self.roster.peers.candidates.values())
        )
        if unknown or self._doubts(base, now):
            return None
        return past

    def _doubts(self, version: Version, now: float) -> bool:
        """Return True if it is not proven that this version counts."""
        return self.gathering.starting.proofs.doubts(version, self.roster, now)

    def _recall(self, base: Version, now: float) -> Actions:
        self.gathering.wait(Wait(Lack.HISTORY, epoch=base.epoch))
        match self.memory.asking(base, now, self.facts.waits.recall_s):
            case "ask":
                holders = tuple(p for p in self.roster.versions.holders(base) if p != self.me)
                return [ev.Recall(base, holders[:RECALL_FROM], self._doubts(base, now))]
            case "over":
                return self._recalled(ev.Recalled(base), now)
        return []

    def _recalled(self, e: ev.Recalled, now: float) -> Actions:
        if e.certified is not None:
            self.voting.shown(e.certified)
        if self._doubts(e.version, now):
            return self._unproven(e.version, now)
        known = self.memory.recalled(e.version, e.plan, e.dropped)
        if known is None or self.phase is not Phase.GATHER:
            return []
        if known and e.plan is not None:
            self.losses.recalled(e.plan)
        done: Actions = []
        if not known and not self.memory.knows(e.version):
            done.append(reports.history_lost(e.version))
        return done + self._try_plan(now)

    def _unproven(self, version: Version, now: float) -> Actions:
        """Nobody could prove that a version counts: pass it over."""
        versions = self.roster.versions
        self.memory.ask_again(version)
        versions.pass_over(version)
        self.gathering.starting.proofs.not_found(now)
        done: Actions = [reports.version_unproven(version, versions.holders(version))]
        if self.phase is Phase.GATHER:
            done += self._try_plan(now)
        return done

    # ----------------------------------------------------------- plan

    def _plan_or_wait(
        self, base: Version, past: PlanContext, votes: Electorate, now: float
    ) -> Actions:
        """Plan an epoch, unless the members lack memory or connections."""
        try:
            return self._plan(base, past, votes, now)
        except OutOfResources as e:
            self.planning.division.postpone(now)
            lacks = self.gathering.lacks_memory(e)
            return [*lacks, *self.gathering.look_again(self.roster, base, now)]
        except NoWay as e:
            self.planning.division.postpone(now)
            self.gathering.wait(Wait(Lack.WAYS, peers=e.peers, detail=str(e)))
            return self.gathering.look_again(self.roster, base, now)

    def _plan(self, base: Version, past: PlanContext, votes: Electorate, now: float) -> Actions:
        """Plan an epoch. Raises OutOfResources and NoWay."""
        before = self.memory.history
        self.roster.versions.agree(base)
        self.memory.goes_on(past)
        past = self.losses.with_reference(base, past)
        said = [c.term for c in self.roster.peers.candidates.values()]
        term = self.planning.terms.next(said, now)
        start = PlanStart(base, past, term, votes, self.losses.training, self.losses.held_out)
        made = self.planning.next(self.roster, start, now)
        done: Actions = []
        if made.founded is not None:
            done += self._divide(made.founded, now)
        if votes.orphan and (before is None or not before.electorate.orphan):
            done.append(reports.orphaned(made.plan.electorate))
        self._follow(made.plan)
        if made.plan.last:
            self.phase = Phase.FINISHED
            self.attempt = None
            self.gathering.finished(made.plan)
        else:
            self._run(made.plan, made.steady, now)
        return [*done, *made.said, self._sends(made.plan), made.fact]

    def _divide(self, founded: Plan, now: float) -> Actions:
        """The members of the new cell have left this one, and for a while they still give the state
        they held."""
        for m in founded.members:
            self.roster.gone(m.peer)
        self.gathering.changed(now)
        return [reports.cell_divided(founded), self._sends(founded)]

    def _sends(self, plan: Plan) -> ev.SendPlan:
        """The action that sends a plan, with the certificate of the version it starts from if there
        is one."""
        return ev.SendPlan(plan, self.voting.is_certified(plan.base))

    def _follow(self, plan: Plan) -> None:
        """This is the newest plan."""
        self.gathering.planned(plan)
        self.roster.versions.planned(plan.digests)
        self.memory.planned(plan)
        self.voting.planned()
        if not plan.outer:
            working = {h.peer for p in plan.paths for h in p.journey}
            self.roster.speeds.worked({m.peer for m in plan.members if m.current}, working)

    # ----------------------------------------------------------- run and close

    def _run(self, plan: Plan, steady: bool, now: float) -> None:
        """The epoch of a plan begins."""
        listeners = [m.peer for m in plan.members if not m.current]
        probation = self.roster.peers.probation.intersection(listeners)
        timing = AttemptTimes(now, now + plan.deadline_s)
        attempt = EpochAttempt(plan, timing, probation=probation, steady=steady)
        self._begin(attempt, now)
        if plan.outer:
            # The members begin it as soon as they have the plan.
            self._open(attempt, now)

    def _begin(self, attempt: EpochAttempt, now: float) -> None:
        """The micro-batches of an attempt run from now on."""
        self.phase = Phase.RUN
        self.attempt = attempt
        usual_s = self.planning.deadlines.usual_run(attempt.plan, self._patience(attempt))
        attempt.timing.run(usual_s, now)

    def _finished(self, e: ev.MicroBatchesReported, now: float) -> Actions:
        attempt = self._attempt_of(e.plan_hash)
        if self.phase is not Phase.RUN or attempt is None:
            return self.conduct.excuse(e.peer, e.plan_hash, now)
        if attempt.results.report(e, self.facts.micro_batch_tokens):
            attempt.timing.heard(now)  # repetitions give nobody more time
        return self._close_if_done(attempt, now)

    def _close_if_done(self, attempt: EpochAttempt, now: float) -> Actions:
        results = attempt.results
        if not results.complete:
            return []
        if not results.counted:
            moves = self.gathering.look_again(self.roster, attempt.plan.base, now)
            return [*self._abandon(now, "no micro-batch was finished"), *moves]
        run_s = now - attempt.timing.started
        if not attempt.taken_over:
            self.planning.deadlines.ran(run_s, whole=not results.dropped)
        self._open(attempt, now)
        notes = attempt.open(self.facts.make.assign)
        moves = self.gathering.rebalance(self.roster, attempt.plan, run_s, now)
        return [*notes, *self.planning.routing.search(self.roster), *moves]

    def _open(self, attempt: EpochAttempt, now: float) -> None:
        """The rounds begin."""
        self.phase = Phase.ROUND
        deadlines = self.planning.deadlines
        longest_s = deadlines.round(self.roster, attempt.plan)
        # A new owner may have to wait for the state of the optimizer, and others wait for it.
        usual_s = deadlines.usual_round(
            self.roster,
            attempt.plan,
            patience=self._patience(attempt),
            steady=attempt.steady,
        )
        attempt.timing.open(usual_s, longest_s, now)
        attempt.number_rounds()

    def _patience(self, attempt: EpochAttempt) -> float:
        """Factor by which the members are waited for longer than usual."""
        return self.conduct.patience(
            m.peer for m in attempt.alive if m.peer not in attempt.probation
        )

    # ----------------------------------------------------------- round

    def _sketched(self, peer: PeerId, plan_hash: str, visits: tuple[VisitSketches, ...]) -> None:
        """A member reports sketches of its tensors. Its first report counts."""
        attempt = self._attempt_of(plan_hash)
        if attempt is not None and attempt.plan.member(peer) is not None:
            attempt.sketches.setdefault(peer, visits)

    def _outcome(self, e: ev.Committed | ev.Incomplete, now: float) -> Actions:
        """A member reports the end of its round."""
        excused: Actions = []
        if isinstance(e, ev.Committed):
            excused = self.conduct.excuse(e.peer, e.plan_hash, now)
        attempt = self._attempt_of(e.plan_hash)
        if self.phase is not Phase.ROUND or attempt is None:
            return excused
        member = attempt.plan.member(e.peer)
        if member is None or e.peer in attempt.dead:
            return excused
        if isinstance(e, ev.Incomplete) and attempt.is_stale(e, member.stage):
            return []
        attempt.take(e, now)
        if e.peer in self.roster.peers.candidates:
            self.roster.life.alive(e.peer, now)  # its report is a sign of life too
        probes: Actions = []
        if isinstance(e, ev.Committed):
            self.roster.peers.committed(e, attempt.plan, attempt.makes, attempt.results.tokens)
        else:
            # The accused are probed now, so that the repair does not hand them the same parts
            # again.
            probes = self._probe(list(e.failed))
        return probes + self._settle_stage(attempt, member.stage, now)

    def _settle_stage(self, attempt: EpochAttempt, stage: int, now: float) -> Actions:
        """Commit or repair, once every awaited member of a stage has reported."""
        awaited = attempt.awaited
        peers = [m.peer for m in attempt.living(stage) if m.peer in awaited]
        if any(p not in attempt.outcomes for p in peers):
            return []
        if (done := self._refused(attempt, stage, now)) is not None:
            return done
        unfinished = [p for p in peers if isinstance(attempt.outcomes[p], ev.Incomplete)]
        if unfinished:
            return self._repair(attempt, stage, unfinished, now)
        if attempt.committed >= awaited:
            return self._commit(attempt, now)
        return []

    def _refused(self, attempt: EpochAttempt, stage: int, now: float) -> Actions | None:
        """Go on without an owner that gave impossible parameters, if more members of its stage
        refused them than took them. If a single member refused them, one of the two lies. None if
        there is nothing to do."""
        for owner, (by, believers) in attempt.accusations(stage).items():
            liars = {owner}
            if len(by) <= 1:
                liars = self.conduct.losers([frozenset([owner]), by], self.me)
            why = ALONE
            away = liars
            if owner in liars:
                why = NEVER_MADE
                away = liars | {m.peer for m in attempt.living(stage)} & attempt.committed
            spared = self.me not in away and attempt.can_spare({*away, *attempt.probation})
            if len(by) > believers and spared:
                done = self.conduct.blame(liars, why, now - attempt.timing.began, now)
                attempt.lose(away - liars)
                for peer in sorted(liars):
                    done += self._gone(peer, now, why)
                return done
        return None

    def _repair(
        self, attempt: EpochAttempt, stage: int, unfinished: list[PeerId], now: float
    ) -> Actions:
        """Repeat the stage's round for members that did not get all parts; see
        :meth:`EpochAttempt.repair`. Gives the epoch up after too many attempts."""
        for peer in unfinished:
            hopeless = attempt.copies.is_hopeless(peer) and peer != self.me
            if hopeless and attempt.can_spare({peer, *attempt.probation}):
                return self._late(attempt, peer, now)
        number = attempt.next_round(stage)
        if number > min(2 * len(attempt.living(stage)) + 2, ATTEMPTS - 1):
            return self._abandon(
                now, f"stage {stage} could not finish its round in {number} attempts"
            )
        round_s = self.planning.deadlines.round(self.roster, attempt.plan, number)
        attempt.timing.repeat(round_s, now)
        self.repeats.round()
        again = attempt.repair(stage, unfinished, self.facts.make.assign, round_s)
        if not again.round.sources:
            self.voting.hear_again(now)
        return [again, reports.round_repaired(stage, number, len(attempt.dead))]

    # ----------------------------------------------------------- commit

    def _commit(self, attempt: EpochAttempt, now: float) -> Actions:
        """The members have committed. Equal digests inside a cell are an invariant; a member that
        differs from most has to catch up."""
        agreed, strays, disputed = attempt.digests()
        done: Actions = []
        if disputed:
            again = self.repeats.recount(attempt.plan.base)
            done = self._disputed(attempt, disputed, again, now)
            if again:
                return [*done, *self._abandon(now, reports.disputed(disputed))]
        self.repeats.differed(len(strays))
        done += [reports.digest_mismatch(peer, stage) for stage, peer in strays]
        for m in attempt.plan.members:
            if m.current and m.peer in attempt.committed and (m.stage, m.peer) not in strays:
                self.conduct.good(m.peer)
        made = self._made(attempt, agreed, now)
        if not self.voting.committed(attempt.plan, attempt.committed):
            # The version exists but is not committed; it may be, once enough voters are back.
            return [*done, reports.epoch_uncertain(attempt), *self._gather(now)]
        self.voting.certify(attempt)
        done += self.conduct.inspect(
            attempt.plan, self.me, attempt.results.seed, attempt.sketches, now
        )
        self.planning.routing.keep_apart(self.conduct.inspection.apart())
        loss = self.losses.training
        done.append(reports.epoch_committed(attempt, made, self.facts.epochs, loss, now))
        if self.losses.is_due_after(made):
            return [*done, self._evaluate(attempt, made.epoch, now)]
        return done + self._gather(now)

    def _disputed(
        self, attempt: EpochAttempt, stages: list[int], again: bool, now: float
    ) -> Actions:
        """Members of these stages hold different parameters, and no majority has the same.
        ``again``: the epoch is repeated."""
        done: Actions = [reports.digests_disputed(stages, again)]
        if self.repeats.is_no_accident:
            for stage in stages:
                losers = self.conduct.losers(attempt.stage_digests(stage).camps(), self.me)
                done += self.conduct.blame(losers, DIFFERED, now - attempt.timing.started, now)
        if again:
            self.repeats.differed(len(stages))
            self.roster.versions.undo(attempt.makes)
        return done

    def _made(self, attempt: EpochAttempt, agreed: Mapping[int, str], now: float) -> Version:
        """The attempt has made the version from which the swarm goes on. Returns it. ``agreed``:
        its digests, by stage."""
        plan = attempt.plan
        results = attempt.results
        made = attempt.makes
        self.planning.committed(attempt, now)
        # The owners that stepped the parts in the end; in an outer round nobody steps.
        owners = plan.owners
        if not plan.outer:
            owners = owners | attempt.owners.changed
            self.losses.trained(results.loss)
        self.roster.versions.committed(made, agreed)
        self.memory.committed(made, plan, owners, results.dropped, results.tokens)
        return made

    def _evaluate(self, attempt: EpochAttempt, version: int, now: float) -> ev.Evaluate:
        """Measure the held-out loss of the parameters at epoch ``version`` over the members of an
        attempt."""
        self.phase = Phase.EVALUATE
        self.attempt = attempt
        self.losses.begin(version)
        longest_s = max(self.facts.waits.epoch_s, attempt.plan.deadline_s)
        attempt.timing.evaluate(longest_s, now)
        return ev.Evaluate(version, attempt.plan)

    def _evaluated(self, loss: float, now: float) -> Actions:
        """The held-out loss is measured; 0 if it could not be."""
        return [*self.losses.result(loss), *self._gather(now)]

    def _gather(self, now: float) -> Actions:
        """The epoch is over: plan the next one."""
        self.phase = Phase.GATHER
        self.attempt = None
        return self._try_plan(now)

    def _begin_anew(self, attempt: EpochAttempt, now: float) -> Actions:
        """Plan the epoch of this attempt again, for all peers that are here."""
        members = {m.peer for m in attempt.plan.members}
        waiting = sum(p not in members for p in self.roster.participants.all())
        self._give_up(now)
        return [reports.epoch_outgrown(attempt, waiting), *self._try_plan(now)]

    def _abandon(self, now: float, why: str) -> Actions:
        """Give this attempt up for a fault, and record the reason."""
        attempt = self.attempt
        self._give_up(now)
        if attempt is None:
            return []
        return [reports.epoch_abandoned(attempt, why)]

    def _give_up(self, now: float) -> None:
        """Give this attempt up: nothing of it counts, all its samples go back, the version
        stays."""
        self.phase = Phase.GATHER
        self.attempt = None
        self.gathering.changed(now)

    def _declined(self, plan_hash: str, reason: str, now: float) -> Actions:
        """The leader's own member cannot follow a plan."""
        newest = self.memory.history
        if self.phase is Phase.GATHER or newest is None or newest.hash != plan_hash:
            return []
        return self._abandon(now, f"the leader cannot follow its own plan: {reason}")


def _owners(plan: Plan | None) -> dict[int, set[PeerId]]:
    """Owners in a plan, by stage."""
    if plan is None:
        return {}
    owners = set(plan.owners.values())
    stages: dict[int, set[PeerId]] = {}
    for member in plan.members:
        if member.peer in owners:
            stages.setdefault(member.stage, set()).add(member.peer)
    return stages
