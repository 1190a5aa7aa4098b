"""The leader of the epoch: plan, run, close, round, commit. Pure: events and time in, actions out.

    GATHER  every stage has a live peer that can start from one version  -> plan        -> RUN
            nobody here knows the plan behind that version               -> recall      -> GATHER
    RUN     every micro-batch has an outcome, or the deadline has passed  -> close      -> ROUND
    ROUND   every live member has committed                               -> next version -> GATHER
            a member lacks parts and nobody is still averaging            -> repair      -> ROUND

It is a coordinator, never a data path. Whatever it knows it can learn again from what peers say
every second, so the next leader starts in GATHER with a higher term and loses nothing.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from itertools import chain
from statistics import median_high
from typing import Any

from node.consensus.rules import Rules
from node.consensus.terms import STEP_HEARD, Terms
from node.consensus.voters import Commitment, Quorum
from node.core.errors import OutOfResources
from node.core.ids import ENDS, NO_CELL, CellId, PeerId
from node.core.journey import (
    NO_WINDOW,
    UNKNOWN,
    Electorate,
    Hop,
    Losses,
    Path,
    Plan,
    PlanMember,
    Version,
    is_worse,
)
from node.core.patience import GAP_S
from node.epoch import events as ev
from node.epoch.facts import RunFacts
from node.epoch.leader import reports
from node.epoch.leader.attempt import COPIES, EpochAttempt
from node.epoch.leader.balance import Balance
from node.epoch.leader.conduct import Conduct, Record
from node.epoch.leader.deadlines import Deadlines
from node.epoch.leader.planning import Planning
from node.epoch.leader.roster import Roster
from node.epoch.leader.routing import Routing
from node.epoch.leader.starting_point import LOST_S, StartingPoint, Voting, counted, without
from node.epoch.leader.windows import Windows
from node.epoch.pace import ASK_AFTER, RECALL_FROM, STANDS_S
from node.epoch.plan_context import GENESIS, Memory, PlanContext
from node.epoch.waiting import Lack, Wait
from node.scheduler.proven import NoWay

PROOF_AGAIN_S = 60.0
"""Seconds for which no other certificate is asked for after nobody had one for a claimed version:
claims cost nothing, and asking delays the next plan."""
UNANSWERED_S = 3 * STANDS_S
"""Seconds after which a probe without any result counts as failed."""
ROUNDS = 1.5
"""Number of round deadlines that the leader waits for a member, because the member's deadline
starts only when the note arrives."""
LATE = 1.25
"""Multiple of the usual time, and of the others' time, after which a member is late with its
report. Its time begins only when the note arrives."""
NEVER_MADE = "gave parameters that no step of the optimizer makes"
ALONE = "alone refused the parameters of an owner"
DIFFERED = "made other parameters than its stage"
SETTLES = 10
"""Multiple of ``settle_s`` after which a young swarm stops waiting for more peers, though peers
still come and go."""
RECOUNTS = 2
"""Number of times that an epoch is repeated because members of a cell ended with different
parameters and no majority agrees."""


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


class Phase(Enum):
    """The phase of the epoch."""

    GATHER = "gather"
    EVALUATE = "evaluate"
    RUN = "run"
    ROUND = "round"
    FINISHED = "finished"


class Leader:
    """The state machine of one leader. ``history``: the newest plan this peer took part in, if any;
    ``dropped``: its micro-batches that did not count. Both give the cursor and the owners of the
    next plan. ``rules``: the owner's newest change that this peer knows; ``known``: its colleagues;
    ``cell``: the cell it leads, if the run has several; ``conduct``: records of the members from
    when this peer led before."""

    def __init__(
        self,
        me: PeerId,
        facts: RunFacts,
        *,
        term: int = 0,
        history: Plan | None = None,
        dropped: Sequence[int] = (),
        rules: Rules | None = None,
        known: frozenset[PeerId] = frozenset(),
        cell: CellId = NO_CELL,
        conduct: Mapping[PeerId, Record] | None = None,
    ) -> None:
        self.me = me
        self.facts = facts
        self.term = term
        self.conduct = Conduct(conduct)
        self._no_proof_until = float("-inf")
        self._quorum = Quorum()
        """The newest certificate that this peer believes."""
        self._void: frozenset[PeerId] = frozenset()
        """Peers that voted twice."""
        self._terms = Terms(term)
        self.phase = Phase.GATHER
        self.roster = Roster(facts.stages, me, facts.prove, known, _owners(history))
        self.waiting: Wait | None = Wait(Lack.SETTLING)
        """The reason why no epoch is planned; None when one is."""
        self._lacking = ""
        self.loss = 0.0
        self.loss_val = 0.0
        self.reference = UNKNOWN
        """Losses before the first step, as the newest plan has them."""
        self.tokens = 0
        if history:
            self.loss = history.loss
            self.loss_val = history.loss_val
            self.reference = history.reference
            self.tokens = history.tokens
        self._measured = False
        """True once the held-out loss before the first step was asked for, whatever the result."""
        self._evaluating = 0
        """Epoch of the parameters that are being evaluated on the held-out text."""
        self._told_worse = history is not None and is_worse(
            history.loss_val, history.reference, history.epoch, facts.warmup
        )
        """True if the journal of this leader, or of the one before, has the warning."""
        self.repaired = self.mismatches = 0
        self._epoch: EpochAttempt | None = None
        self.memory = Memory(history, dropped)
        self.routing = Routing(facts, history, dropped)
        self.roster.stood = self.memory.stood
        self._starting = StartingPoint(facts)
        self.deadlines = Deadlines(facts)
        self.planning = Planning(
            me, facts, self.routing, self.deadlines, rules or facts.make.read(""), cell
        )
        self.windows = Windows()
        self._voting = Voting(me)
        self._heard_from = 0.0
        """From this time on a voter counts as present only once it was heard again. It is the time
        of the last repetition of a round without members counted as dead, which may live behind a
        partition and finish the round with others; or the time when this process went on after it
        had stood still, because others may have found another leader meanwhile."""
        self._ticked = math.inf
        self.commit: Commitment | None = None
        """The last commit under this leader."""
        self._certified: Version | None = None
        """The version that was committed last, or whose quorum certificate another peer has shown
        to the leader. A certificate that only its own member has seen goes with no plan: newcomers
        would wait for its voters, and most of these may be gone."""
        self.after = ""
        """Hash of the plan before the newest one, which gave it its voters; empty for the first
        plan of all."""
        self._left: set[PeerId] = set()
        """Voters that have said that they leave, and have not been here since."""
        self._finished_with: set[PeerId] = set()
        """Members of the last plan that have been here ever since."""
        self._balance = Balance(facts.stages, facts.waits.rebalance_every_s, facts.waits.download_s)
        self._changed: float | None = None
        self._complete: float | None = None
        """Time since when every stage has had enough peers."""
        self._coming: Mapping[PeerId, int | None] = {}
        self._disputed = GENESIS, 0
        """The last version after which members made different parameters, and the number of
        times."""
        self._asked: dict[PeerId, float] = {}
        """Silent peers that are being probed, and the time since when."""
        self._resigning = False
        """True to finish the epoch under way and plan no other: another peer is to lead."""

    @property
    def plan(self) -> Plan | None:
        """The plan in force, if an epoch is under way."""
        if self._epoch is None:
            return None
        return self._epoch.plan

    @property
    def waiting_for(self) -> str:
        """:attr:`waiting` as text, empty for no reason."""
        if self.waiting is None:
            return ""
        return str(self.waiting)

    def silent_s(self, peer: PeerId, now: float) -> float:
        """Seconds since the last sign of life of a peer that is silent for longer than usual, 0 for
        any other peer."""
        heard = self.roster.heard.get(peer)
        if heard is None or peer == self.me:
            return 0.0
        usual = ASK_AFTER * self.roster.silence(peer, self.facts.waits.late_s)
        if now - heard > usual:
            return now - heard
        return 0.0

    @property
    def idle(self) -> bool:
        """True if no epoch is under way."""
        return self.phase in (Phase.GATHER, Phase.FINISHED)

    def votes_on(self, e: ev.Committed) -> tuple[Plan, Version] | None:
        """The plan that a member's report of a commit belongs to, and the version that the plan
        makes; None if the report is not of the epoch under way."""
        epoch = self._epoch
        if epoch is None or e.plan_hash != epoch.plan.hash or epoch.plan.member(e.peer) is None:
            return None
        return epoch.plan, epoch.makes

    def handle(self, event: ev.LeaderEvent, now: float) -> list[ev.LeaderAction]:
        """Handle one event and return the actions. Unknown or stale events change nothing."""
        if self.phase is Phase.FINISHED and not isinstance(event, AFTER_THE_END):
            return []
        match event:
            case ev.QuorumChanged(quorum):
                self._quorum = quorum
            case ev.Equivocated(peers):
                self._void = peers
            case ev.ContextsKept(contexts):
                self.memory.kept(contexts)
            case ev.Resigning(resigns):
                self._resigning = resigns
            case ev.Heartbeat(peer) if not self.planning.has_left(peer, now):
                return self._heard(event, now)
            case ev.Unreachable(peer, since):
                self._asked.pop(peer, None)
                lives = self.roster.heard.get(peer, now) > since
                if not lives:
                    return self._gone(peer, now, "does not answer")
            case ev.ProbeAnswered(peer, ours):
                return self._answered(peer, ours, now)
            case ev.Declined(plan_hash, reason) if self.phase is not Phase.GATHER:
                newest = self.memory.history
                if newest is not None and newest.hash == plan_hash:
                    return self._abandon(now, f"the leader cannot follow its own plan: {reason}")
            case ev.Accused(about, by) if {about, by} <= self.roster.candidates.keys():
                if about != self.me:
                    return [ev.ProbePeer(about)]
            case ev.MicroBatchesReported():
                return self._finished(event, now)
            case ev.Committed() | ev.Incomplete():
                return self._outcome(event, now)
            case ev.Evaluated(epoch, loss):
                return self._was_evaluated(epoch, loss, now)
            case ev.Recalled():
                return self._recalled(event, now)
            case ev.MoveRefused(peer):
                self._balance.refused(peer, now)
            case ev.Changed(rules):
                # A revoked peer counts as gone, and does not vote.
                self.planning.learns(rules)
                gone = [p for p in self.roster.candidates if self.planning.rules.revokes(p)]
                return [
                    a
                    for p in gone
                    for a in self._gone(p, now, "is revoked by the owner of the run")
                ]
            case ev.Grouped():
                self.windows.grouped(event)
            case ev.Searched(job, routes, makespan):
                self.routing.router.improved(job, routes, makespan)
            case ev.ClockTick(coming, known, slack):
                self._coming = coming
                self.roster.known = known
                if now - self._ticked > self.facts.waits.late_s:
                    self._heard_from = now
                if (epoch := self._epoch) is not None:
                    # Nobody was late while this process stood still.
                    stood_s = now - max(self._ticked, epoch.began)
                    if stood_s > GAP_S:
                        epoch.late_at += stood_s
                self._ticked = now
                return self._tick(now, slack)
        return []

    # ----------------------------------------------------------- signs of life

    def _heard(self, e: ev.Heartbeat, now: float) -> list[Any]:
        done: list[Any] = []
        before = self.roster.candidates.get(e.peer)
        if before is not None and before.stage != e.stage:
            done = self._gone(e.peer, now, f"left stage {before.stage}")
            before = None
        self.roster.hear(e, now)
        self._asked.pop(e.peer, None)
        if before is None:
            self._changed = now
        if self.phase is Phase.FINISHED:
            # A peer that holds the final version and is not in the last plan: plan once more, so
            # that it serves too.
            comes = e.at == self.roster.base and e.peer not in self._finished_with
            news = comes and e.peer in self.roster.replicas().get(e.stage, ())
        else:
            # Heartbeats with nothing new but measurements come from every peer every second: they
            # wait for the next clock tick.
            changed = before is None or e.stands() != before.stands()
            news = changed and self.phase is Phase.GATHER
        if news:
            done += self._try_plan(now)
        return done

    def _gone(self, peer: PeerId, now: float, why: str) -> list[Any]:
        self._asked.pop(peer, None)
        if peer == self.me:
            return []
        known = self.roster.gone(peer)
        if known is None:
            return []
        self._changed = now
        self._finished_with.discard(peer)
        if known.leaving:
            self.planning.departed(peer, now)
            done: list[Any] = [reports.peer_left(peer)]
        else:
            done = [reports.peer_lost(peer, why)]
        epoch = self._epoch
        if epoch is None:
            return done
        member = epoch.plan.member(peer)
        if member is None or peer in epoch.dead:
            return done
        epoch.dead.add(peer)
        if self.phase is Phase.EVALUATE:
            return done
        if (bare := epoch.bare) is not None:
            # No path can end any more, and there would be nobody to average.
            return done + self._abandon(
                now, f"stage {bare} has lost every peer that holds epoch {epoch.plan.epoch}"
            )
        # Others may still reach it, and would wait for it until the deadline.
        running = self.phase is Phase.RUN
        if running:
            there = epoch.alive
        else:
            there = epoch.living(member.stage)
        told = tuple(m.peer for m in there)
        done.append(ev.SendLost(told, epoch.plan, tuple(sorted(epoch.dead))))
        if running:
            epoch.give_up(peer)
            return done + self._close_if_done(epoch, now)
        epoch.outcomes.pop(peer, None)
        return done + self._settle_stage(epoch, member.stage, now)

    def _tick(self, now: float, slack: float) -> list[Any]:
        done = self._mind_the_silent(now, slack)
        epoch = self._epoch
        if self.phase is Phase.GATHER:
            done += self._try_plan(now)
        elif epoch is not None and now >= epoch.deadline:
            if self.phase is Phase.RUN:
                epoch.give_up(None)
                done += self._close_if_done(epoch, now)
            elif self.phase is Phase.ROUND:
                late = [peer for peer in epoch.unreported if peer != self.me]
                for peer in late:
                    done += self._late(epoch, peer, now)
                if self.phase is Phase.ROUND and not late:
                    done += self._abandon(now, "this peer did not finish its own round")
            elif self.phase is Phase.EVALUATE:
                done += self._was_evaluated(self._evaluating, 0.0, now)
        elif epoch is not None:
            for peer in self._overdue(epoch, now - slack):
                done += self._late(epoch, peer, now)
        return done

    def _overdue(self, epoch: EpochAttempt, now: float) -> list[PeerId]:
        """Members that are late with their report, where all others have reported and can commit
        without them."""
        running = self.phase is Phase.RUN
        late = epoch.silent_origins if running else epoch.unreported
        others_s = epoch.reported - epoch.began
        if now < max(epoch.late_at, epoch.began + LATE * others_s) or self.me in late:
            return []
        return late if epoch.can_spare({*late, *epoch.probation}) else []

    def _late(self, epoch: EpochAttempt, peer: PeerId, now: float) -> list[Any]:
        """Go on without a member that did not report in time. A member that has fallen silent may
        be frozen, and is not blamed."""
        if epoch is not self._epoch or peer in epoch.dead:
            return []  # the loss of another member has changed the attempt
        if self.silent_s(peer, now):
            return self._gone(peer, now, "has fallen silent")
        why = "did not finish its work in time"
        blamed = self._blame([peer], why, now - epoch.began, now, epoch.plan.hash)
        return blamed + self._gone(peer, now, why)

    def _blame(
        self,
        peers: Collection[PeerId],
        why: str,
        seconds: float,
        now: float,
        missed: str = "",
    ) -> list[Any]:
        """Put on probation the peers that cost the others ``seconds``."""
        done: list[Any] = []
        for peer in sorted(peers):
            weight = self.conduct.cost(peer, seconds, now, missed)
            done.append(reports.on_probation(peer, why, self.conduct.probation_s(peer, now)))
            if weight:
                done.append(ev.CountFault(peer, why, weight))
        return done

    def _excuse(self, peer: PeerId, plan_hash: str, now: float) -> list[Any]:
        """End the probation of a peer that reports late."""
        if self.conduct.reported(peer, plan_hash, now):
            return [reports.excused(peer)]
        return []

    def _mind_the_silent(self, now: float, slack: float) -> list[Any]:
        """Ask silent peers whether they live. Silence alone is no death: a peer on a busy machine
        answers late."""
        done: list[Any] = []
        for peer, heard in list(self.roster.heard.items()):
            if peer not in self.roster.heard:
                continue  # removed meanwhile: the loss of another peer led to a division
            silent = now - heard
            most = self.roster.silence(peer, self.facts.waits.late_s) + slack
            if peer == self.me or silent <= ASK_AFTER * most:
                continue
            if peer not in self._asked:
                self._asked[peer] = now
                done.append(ev.ProbePeer(peer))
            elif now - self._asked[peer] > UNANSWERED_S:
                done += self._gone(peer, now, f"was last heard {silent:.1f} s ago")
        return done

    def _answered(self, peer: PeerId, ours: bool, now: float) -> list[Any]:
        self._asked.pop(peer, None)
        if peer not in self.roster.candidates:
            return []
        if ours:
            self.roster.alive(peer, now)
        elif now - self.roster.heard[peer] > self.facts.waits.late_s:
            return self._gone(peer, now, "follows another leader")
        return []

    # ----------------------------------------------------------- where to start from

    def _try_plan(self, now: float) -> list[Any]:
        facts = self.facts
        if self._resigning:
            self.waiting = Wait(Lack.NEXT_LEADER)
            return []
        self.roster.probation = self.conduct.on_probation(now) - {self.me}
        stages = self.roster.replicas()
        takes_part = [self.roster.candidates[p] for peers in stages.values() for p in peers]
        young = self.roster.base is None and all(c.at == GENESIS for c in takes_part)
        need = facts.min_replicas if young else 1
        thin = [s for s, peers in stages.items() if len(peers) < (need if s != ENDS else 1)]
        nobody = Wait(Lack.PEERS, stages=tuple(thin)) if thin else None
        if thin and (young or ENDS in thin or len(thin) > facts.spare):
            self.waiting = self._not_joined(thin, need) or nobody
            self._complete = None
            return self._mend(thin, now)
        if self._complete is None:
            self._complete = now
        self._mend((), now)
        if self._settles(now):
            self.waiting = Wait(Lack.SETTLING)
            return []
        base = self._choose(now)
        if isinstance(base, Wait):
            self.waiting = nobody or base
            if lost := self._starting.drop_agreement(self.roster, now):
                return [reports.agreement_lost(lost), *self._try_plan(now)]
            if self._starting.count_undone(self.roster, now):
                return [reports.undone_counted(), *self._try_plan(now)]
            if fallen := self._starting.fall_back(self.roster, now):
                return [reports.stage_fell_back(fallen), *self._try_plan(now)]
            return []
        past = self.memory.past(base, self.roster.tokens_of(base), facts.target_batch)
        # Others have followed a plan, which names the voters; this leader knows none.
        unknown = (
            self.memory.history is None
            and base not in self.memory.forgotten
            and any(c.term for c in self.roster.candidates.values())
        )
        if past is None or unknown or self._doubts(base, now):
            return self._recall(base, now)
        votes = self._electorate(base, now)
        if isinstance(votes, Wait):
            self.waiting = votes
            return []
        self.waiting = None
        if not base.epoch and self.facts.reference and self.facts.eval_every and not self._measured:
            return self._measure(base, now)
        self._starting.found()
        # Facts for the record are said once, and must not be lost with a plan that cannot be made.
        done = [*self._rebalance(now), *self._change_history(base, past)]
        try:
            return done + self._plan(base, past, votes, now)
        except OutOfResources as e:
            self.planning.postpone(now)
            said = self._lacking
            self._lacking = str(e)
            self.waiting = Wait(Lack.MEMORY, detail=f"memory for the optimizer's state: {e}")
            if said != self._lacking:
                done.append(reports.out_of_room(e))
            return done
        except NoWay as e:
            self.planning.postpone(now)
            self.waiting = Wait(Lack.WAYS, detail=str(e))
            return done

    def _measure(self, base: Version, now: float) -> list[Any]:
        """Ask for the held-out loss before the first step, over the peers that would take that
        step. The time limit is an epoch's over one replica of each stage. Nobody gets the plan."""
        self._measured = True
        workers = {s: self.roster.workers(s, base) for s in self.roster.replicas()}
        members = tuple(
            PlanMember(peer, stage, self.roster.speed(peer))
            for stage, peers in workers.items()
            for peer in peers
        )
        hops = tuple(Hop(stage, peers[0]) for stage, peers in workers.items() if stage != ENDS)
        count = self.facts.target_batch // self.facts.micro_batch
        path = Path(0, self.me, (), hops)
        within_s = self.deadlines.run(self.roster, (path,) * count)
        plan = Plan(base.epoch, self.term, self.me, members, (), {}, deadline_s=within_s)
        return [self._evaluate(EpochAttempt(plan, now, now), base.epoch, now)]

    def _evaluate(self, epoch: EpochAttempt, version: int, now: float) -> ev.Evaluate:
        """Measure the held-out loss of the parameters at epoch ``version`` over the members of an
        attempt."""
        self.phase = Phase.EVALUATE
        self._epoch = epoch
        self._evaluating = version
        epoch.deadline = now + max(self.facts.waits.epoch_s, epoch.plan.deadline_s)
        return ev.Evaluate(version, epoch.plan)

    def _settles(self, now: float) -> bool:
        """Return True while the first plan of this leader waits a moment for more peers: in a young
        swarm, so that peers that start together are in it together; else for members of the
        previous leader's plan that have not reported yet."""
        history = self.memory.history
        settle_s = self.facts.waits.settle_s
        if self.roster.base is not None or self._changed is None or self._complete is None:
            return False
        if history is not None:
            members = {m.peer for m in history.members} - {history.leader}
            if members and members <= self.roster.candidates.keys():
                return False
        return now - self._changed < settle_s and now - self._complete < SETTLES * settle_s

    def _not_joined(self, thin: Sequence[int], need: int) -> Wait | None:
        """The wait for pairs that have not reached each other, if stages have enough peers but not
        enough that reach the others; None if that is not the reason."""
        here = self.roster.present()
        full = [s for s in thin if len(here[s]) >= (need if s != ENDS else 1)]
        pairs = [(a, b) for a, b in self.roster.apart() if self.roster.candidates[a].stage in full]
        stage = {p: c.stage for p, c in self.roster.candidates.items()}
        if not pairs:
            return None
        no_way = NoWay([(Hop(stage[a], a), Hop(stage[b], b)) for a, b in pairs])
        return Wait(Lack.WAYS, detail=str(no_way))

    def _choose(self, now: float) -> Version | Wait:
        """The version to start from, or the reason for waiting. The leader first asks for the
        certificate of a version that few peers can have committed, and passes the version over if
        nobody could show one a moment ago."""
        r = self.roster
        r.unproven = {v for v in r.unproven if self._doubts(v, now) and r.holders(v)}
        while True:
            base = self._starting.choose(r, self.tokens, now)
            if isinstance(base, Wait) or now >= self._no_proof_until or not self._doubts(base, now):
                return base
            r.unproven.add(base)

    def _doubts(self, version: Version, now: float) -> bool:
        """Return True if this version was made elsewhere, and too few of the last voters can have
        committed it (:meth:`Quorum.doubts`)."""
        r = self.roster
        return not r.is_own(version) and self._quorum.doubts(
            version, r.holders(version), r.candidates, now
        )

    def _recall(self, base: Version, now: float) -> list[Any]:
        self.waiting = Wait(Lack.HISTORY, epoch=base.epoch)
        match self.memory.asking(base, now, self.facts.waits.recall_s):
            case "ask":
                holders = tuple(p for p in self.roster.holders(base) if p != self.me)
                return [ev.Recall(base, holders[:RECALL_FROM], self._doubts(base, now))]
            case "over":
                return self._recalled(ev.Recalled(base), now)
        return []

    def _recalled(self, e: ev.Recalled, now: float) -> list[Any]:
        if e.certified is not None:
            self._certified = e.certified
        if self._doubts(e.version, now):
            self.memory.ask_again(e.version)
            self.roster.unproven.add(e.version)
            self._no_proof_until = now + PROOF_AGAIN_S
            said = reports.version_unproven(e.version, self.roster.holders(e.version))
            if self.phase is not Phase.GATHER:
                return [said]
            return [said, *self._try_plan(now)]
        known = self.memory.recalled(e.version, e.plan, e.dropped)
        if known is None or self.phase is not Phase.GATHER:
            return []
        if known and e.plan is not None:
            self.loss = e.plan.loss
            self.loss_val = e.plan.loss_val
        done: list[Any] = []
        if not known and not self.memory.knows(e.version):
            done.append(reports.history_lost(e.version))
        return done + self._try_plan(now)

    # ----------------------------------------------------------- plan

    def _electorate(self, base: Version, now: float) -> Electorate | Wait:
        """The voters on the next version, or the wait for voters if too few are here."""
        h = self.memory.history
        r = self.roster
        self.after = ""
        if h is not None:
            self.after = h.hash
            if h.last:
                return h.electorate
        # A plan leaves out the peers of these stages, so they could not follow it
        bare = r.bare(base)
        members: list[PeerId] = []
        current: list[PeerId] = []
        for stage, peers in r.replicas().items():
            if stage not in bare:
                members += [p for p in peers if p not in self._void]
                current += [p for p in r.workers(stage, base) if p not in self._void]
        there = {p for p in members if p == self.me or r.heard.get(p, now) >= self._heard_from}
        self._left = self._left.difference(r.candidates) | {
            p for p, c in r.candidates.items() if c.leaving
        }
        named = self._left
        epoch_s = 0.0
        if h is not None:
            named = {*h.electorate.voters, *h.electorate.elders}
            epoch_s = sum(h.forecast)
        self._left &= named  # others have no vote to lose
        left = self._left | {p for p in named if self.planning.rules.revokes(p)}
        votes = self._voting.electorate(h, current, left)
        return self._voting.lacks(votes, there, now, epoch_s)

    def _plan(self, base: Version, past: PlanContext, votes: Electorate, now: float) -> list[Any]:
        done: list[Any] = []
        before = self.memory.history
        self.roster.agree(base)
        self.tokens = past.tokens
        past = self._with_reference(base, past)
        losses = (self.loss, self.loss_val)
        term = self._next_term(now)
        rules = self.planning.in_force(past)
        if rules.change != past.change:
            self.windows.forget()
        founds = self.planning.founds(self.roster, base, past, term, losses, rules, now)
        roster = self.roster
        founded = None
        child = NO_CELL
        if founds is not None:
            past, founded = founds
            away = {m.peer for m in founded.members}
            child = founded.cell_id
            votes = without(votes, away)
            roster = roster.without(away)
            term = founded.term + 1
            for peer in away:
                self.planning.departed(peer, now)
        window = NO_WINDOW
        if base.epoch < self.facts.epochs:
            window = self.windows.next(roster, base, now)
        outer = self.windows.number() if window.means else 0
        plan, said, words = self.planning.plan(
            roster, base, past, term, losses, now, window, outer, child, votes
        )
        if founded is not None:
            done += self._divide(founded, now)
        if votes.orphan and (before is None or not before.electorate.orphan):
            done.append(reports.orphaned(votes))
        self.term = plan.term
        self._lacking = ""
        self._terms.saw(plan.term, now)
        self.roster.agreed |= plan.digests
        self.memory.planned(plan)
        self._voting.planned()
        if not plan.outer:
            working = {h.peer for p in plan.paths for h in p.journey}
            self.roster.worked({m.peer for m in plan.members if m.current}, working)
        if plan.last:
            self.phase = Phase.FINISHED
            self._epoch = None
            self._finished_with = {m.peer for m in plan.members}
        else:
            self.phase = Phase.RUN
            epoch = self._epoch = EpochAttempt(plan, now, now + plan.deadline_s, reported=now)
            epoch.steady = past.owners == plan.owners
            epoch.probation = self.roster.probation.intersection(
                m.peer for m in plan.members if not m.current
            )
            usual = self.deadlines.usual_run(plan, self._patience(epoch))
            epoch.late_at = now + LATE * usual
            if plan.outer:
                # The members begin it as soon as they have the plan.
                self._open(epoch, now)
        return [*done, *said, self._sends(plan), words]

    def _with_reference(self, base: Version, past: PlanContext) -> PlanContext:
        """Add the losses before the first step to the context, once they are known. The first epoch
        measures the training loss of its initial parameters."""
        if not self.facts.reference:
            return past
        known = past.reference
        if not base.epoch:
            known = Losses(0.0, known.held_out or self.reference.held_out)
        elif base.epoch == 1:
            known = Losses(known.training or self.loss, known.held_out)
        self.reference = known
        return replace(past, reference=known)

    def _sends(self, plan: Plan) -> ev.SendPlan:
        """The action that sends a plan, with the certificate of the version it starts from if there
        is one."""
        return ev.SendPlan(plan, self._certified == plan.base)

    def _divide(self, founded: Plan, now: float) -> list[Any]:
        """The members of the new cell have left this one, and for a while they still give the state
        they held."""
        self.planning.left(founded, now)
        for m in founded.members:
            self._asked.pop(m.peer, None)
            self.roster.gone(m.peer)
        self._changed = now
        return [reports.cell_divided(founded), self._sends(founded)]

    def _next_term(self, now: float) -> int:
        """The term of the next plan: higher than the terms that members report, within the bound
        that the number of plans made since can explain. One peer's claim must not use up the
        numbers."""
        said = [c.term for c in self.roster.candidates.values()]
        most = self._terms.most(now, STEP_HEARD)
        if not self.term and said:
            # No plan was ever followed here: take the median report, and a step beyond.
            most = median_high(said) + STEP_HEARD
        return max([self.term, *(min(term, most) for term in said)]) + 1

    def _change_history(self, base: Version, past: PlanContext) -> list[Any]:
        """Report it if the swarm does not go on from the version agreed on."""
        was = self.roster.base
        if was is None or base == was:
            return []
        if counted(self.roster, base, self.tokens) > self.tokens:
            self._starting.joined()
            return [reports.history_changed(base, was, past.tokens, self.tokens)]
        return [reports.went_back(base, was)]

    def _rebalance(self, now: float) -> list[Any]:
        """At intervals, ask peers of stages that can spare them to move to the stage that holds the
        others up."""
        if (
            self.roster.base is None
            or self.roster.base.epoch >= self.facts.epochs
            or self._starting.bare
        ):
            return []
        moves = self._balance.look(self.roster, self.roster.base, now)
        return [a for m in moves for a in (ev.RequestMove(m.peer, m.target), reports.move_asked(m))]

    def _mend(self, thin: Sequence[int], now: float) -> list[Any]:
        """Ask a peer of a stage that can spare one to move to a stage that has too few to plan an
        epoch."""
        # A peer from another stage brings no parameters, so the peers that had them get time to
        # return.
        begun = any(c.at.epoch for c in self.roster.candidates.values())
        patience = LOST_S if begun else self.facts.waits.lacks_s
        m = self._balance.mend(self.roster, self.me, thin, self._coming, patience, now)
        if m is None:
            return []
        return [ev.RequestMove(m.peer, m.target), reports.help_asked(m)]

    # ----------------------------------------------------------- run and close

    def _finished(self, e: ev.MicroBatchesReported, now: float) -> list[Any]:
        epoch = self._epoch
        if self.phase is not Phase.RUN or epoch is None or e.plan_hash != epoch.plan.hash:
            return self._excuse(e.peer, e.plan_hash, now)
        known = len(epoch.results)
        epoch.report(e, self.facts.micro_batch * self.facts.sizes.sequence)
        if len(epoch.results) > known:  # repetitions give nobody more time
            epoch.reported = now
        return self._close_if_done(epoch, now)

    def _close_if_done(self, epoch: EpochAttempt, now: float) -> list[Any]:
        if len(epoch.results) < len(epoch.plan.paths):
            return []
        if not any(r.counted for r in epoch.results.values()):
            return self._abandon(now, "no micro-batch was finished")
        if not epoch.dropped:
            self.deadlines.ran(now - epoch.started)
        self._open(epoch, now)
        return epoch.rounds(self.facts.make.assign) + self.routing.search(self.roster)

    def _open(self, epoch: EpochAttempt, now: float) -> None:
        """The rounds begin."""
        self.phase = Phase.ROUND
        epoch.closed = now
        epoch.reported = now
        longest = self.deadlines.round(self.roster, epoch.plan)
        # A new owner may have to wait for the state of the optimizer, and others wait for it.
        epoch.round_s = self.deadlines.usual_round(
            self.roster, epoch.plan, patience=self._patience(epoch), steady=epoch.steady
        )
        epoch.late_at = now + LATE * epoch.round_s
        epoch.deadline = now + ROUNDS * longest
        epoch.attempts = dict.fromkeys(epoch.stages, 0)

    def _patience(self, epoch: EpochAttempt) -> float:
        """Factor by which the members are waited for longer than usual."""
        return self.conduct.patience(m.peer for m in epoch.alive if m.peer not in epoch.probation)

    # ----------------------------------------------------------- round and commit

    def _outcome(self, e: ev.Committed | ev.Incomplete, now: float) -> list[Any]:
        epoch = self._epoch
        late = self._excuse(e.peer, e.plan_hash, now) if isinstance(e, ev.Committed) else []
        if self.phase is not Phase.ROUND or epoch is None or e.plan_hash != epoch.plan.hash:
            return late
        member = epoch.plan.member(e.peer)
        if member is None or e.peer in epoch.dead:
            return late
        if isinstance(e, ev.Incomplete) and (
            e.attempt != epoch.attempts[member.stage]
            or isinstance(epoch.outcomes.get(e.peer), ev.Committed)
        ):
            return []
        if e.peer not in epoch.outcomes:  # repetitions give nobody more time
            epoch.reported = now
        epoch.outcomes[e.peer] = e
        if epoch.enough > now and epoch.can_spare(epoch.uncommitted):
            epoch.enough = now
        if e.peer in self.roster.candidates:
            self.roster.alive(e.peer, now)  # its report is a sign of life too
        if isinstance(e, ev.Committed) and (c := self.roster.candidates.get(e.peer)):
            self.roster.candidates[e.peer] = replace(
                c,
                at=epoch.makes,
                digest=e.digest,
                speed=e.speed or c.speed,
                # Sorted, as the member sorts them: another order would look like a change.
                reachable=tuple(sorted({*c.reachable, epoch.plan.base}))
                if member.current
                else c.reachable,
                tokens=epoch.plan.tokens + epoch.tokens,
                orphan=epoch.plan.electorate.orphan,
            )
        # The accused are probed now, so that the repair does not hand them the same parts again.
        accused = e.failed if isinstance(e, ev.Incomplete) else ()
        probes = [ev.ProbePeer(p) for p in accused if p in self.roster.candidates and p != self.me]
        return probes + self._settle_stage(epoch, member.stage, now)

    def _settle_stage(self, epoch: EpochAttempt, stage: int, now: float) -> list[Any]:
        awaited = epoch.awaited
        peers = [m.peer for m in epoch.living(stage) if m.peer in awaited]
        if any(p not in epoch.outcomes for p in peers):
            return []
        if (done := self._refused(epoch, stage, now)) is not None:
            return done
        unfinished = [p for p in peers if isinstance(epoch.outcomes[p], ev.Incomplete)]
        if unfinished:
            return self._repair(epoch, stage, unfinished, now)
        if epoch.committed >= awaited:
            return self._commit(epoch, now)
        return []

    def _refused(self, epoch: EpochAttempt, stage: int, now: float) -> list[Any] | None:
        """Go on without an owner that gave impossible parameters, if more members of its stage
        refused them than took them. If a single member refused them, one of the two lies. None if
        there is nothing to do."""
        for owner, (by, believers) in epoch.accusations(stage).items():
            liars = {owner}
            if len(by) <= 1:
                liars = self._losers([frozenset([owner]), by])
            why = ALONE
            away = liars
            if owner in liars:
                why = NEVER_MADE
                away = liars | {m.peer for m in epoch.living(stage) if m.peer in epoch.committed}
            spared = self.me not in away and epoch.can_spare({*away, *epoch.probation})
            if len(by) > believers and spared:
                done = self._blame(liars, why, now - epoch.began, now)
                epoch.drop(away - liars)
                for peer in sorted(liars):
                    done += self._gone(peer, now, why)
                return done
        return None

    def _losers(self, camps: Sequence[frozenset[PeerId]]) -> set[PeerId]:
        """Members of all camps but one. The leader's own camp stays, or else the largest one, or
        the one with the member that did the most epochs."""
        stays = max(
            camps,
            key=lambda camp: (self.me in camp, len(camp), max(map(self.conduct.epochs, camp))),
        )
        return {*chain.from_iterable(camps)} - stays

    def _repair(
        self, epoch: EpochAttempt, stage: int, unfinished: list[PeerId], now: float
    ) -> list[Any]:
        """Repeat the stage's round for members that did not get all parts; see
        :meth:`EpochAttempt.repair`. Gives the epoch up after too many attempts."""
        for peer in unfinished:
            hopeless = epoch.copies[peer] >= COPIES and peer != self.me
            if hopeless and epoch.can_spare({peer, *epoch.probation}):
                return self._late(epoch, peer, now)
        epoch.attempts[stage] += 1
        attempts = epoch.attempts[stage]
        if attempts > 2 * len(epoch.living(stage)) + 2:
            return self._abandon(
                now, f"stage {stage} could not finish its round in {attempts} attempts"
            )
        round_s = self.deadlines.round(self.roster, epoch.plan, attempts)
        epoch.round_s = max(epoch.round_s, round_s)
        epoch.deadline = max(epoch.deadline, now + ROUNDS * round_s)
        # Members wait as long for an owner that gives them nothing, which is not their fault.
        epoch.late_at = now + LATE * round_s
        self.repaired += 1
        again = epoch.repair(stage, unfinished, self.facts.make.assign, round_s)
        if not again.round.sources:
            self._heard_from = now
        return [again, reports.round_repaired(stage, attempts, len(epoch.dead))]

    def _commit(self, epoch: EpochAttempt, now: float) -> list[Any]:
        agreed, strays, disputed = epoch.digests()
        done: list[Any] = []
        if disputed:
            again = self._recounted(epoch.plan.base)
            done.append(reports.digests_disputed(disputed, again))
            if self._disputed[1] > 1:  # a flipped bit does not flip twice
                for stage in disputed:
                    losers = self._losers(epoch.camps(stage))
                    done += self._blame(losers, DIFFERED, now - epoch.started, now)
            if again:
                self.mismatches += len(disputed)
                self.roster.undo(epoch.makes)
                return [*done, *self._abandon(now, reports.disputed(disputed))]
        # Equal digests inside a cell are an invariant; a member that differs from most has to catch
        # up.
        self.roster.agreed |= agreed
        self.roster.fallen.clear()
        self.mismatches += len(strays)
        done += [reports.digest_mismatch(peer, stage) for stage, peer in strays]
        for m in epoch.plan.members:
            if m.current and m.peer in epoch.committed and (m.stage, m.peer) not in strays:
                self.conduct.good(m.peer)
        self.windows.committed(epoch.plan)
        if not epoch.plan.outer:
            self.loss = sum(r.loss_sum for r in epoch.results.values() if r.counted) / max(
                1, epoch.tokens
            )
            self.routing.committed(epoch.plan, epoch.dropped, now - epoch.closed)
        if not epoch.dead:  # the others waited for a dead member, which is no work
            # Without members that were not needed: one could take a little longer in each epoch.
            round_s = min(epoch.enough, now) - epoch.closed
            self.deadlines.took(epoch.plan, round_s, epoch.steady)
        self.tokens += epoch.tokens
        base = self.roster.base = epoch.makes
        # The owners that stepped the parts in the end; in an outer round nobody steps.
        owners = epoch.plan.owners | ({} if epoch.plan.outer else epoch.owners)
        self.memory.committed(base, epoch.plan, owners, epoch.dropped, self.tokens)
        void = self._void
        if not self._voting.committed(epoch.plan, {p for p in epoch.committed if p not in void}):
            # The version exists but is not committed; it may be, once enough voters are back.
            self.phase = Phase.GATHER
            self._epoch = None
            return [*done, reports.epoch_uncertain(epoch), *self._try_plan(now)]
        self.commit = epoch.commit(void)
        self._certified = None
        if self.commit is not None:
            self._certified = self.commit.version
        done.append(reports.epoch_committed(epoch, base, self.facts.epochs, self.loss, now))
        every = self.facts.eval_every
        if every and (base.epoch % every == 0 or base.epoch == self.facts.epochs):
            return [*done, self._evaluate(epoch, base.epoch, now)]
        self.phase = Phase.GATHER
        self._epoch = None
        return done + self._try_plan(now)

    def _recounted(self, base: Version) -> bool:
        """Return True to repeat the epoch from ``base``: if no majority agrees on the result, all
        go back to ``base``, on which they agree. After :data:`RECOUNTS` repetitions the swarm goes
        on with one of the results."""
        before, times = self._disputed
        if before != base:
            times = 0
        self._disputed = base, times + 1
        return self._disputed[1] <= RECOUNTS

    def _was_evaluated(self, epoch: int, loss: float, now: float) -> list[Any]:
        if self.phase is not Phase.EVALUATE or epoch != self._evaluating:
            return []
        said: list[Any] = []
        if loss > 0:
            self.loss_val = loss
            said.append(reports.evaluated(epoch, loss))
        if not epoch:
            self.reference = Losses(0.0, loss)
        elif is_worse(loss, self.reference, epoch, self.facts.warmup) and not self._told_worse:
            self._told_worse = True
            before = self.reference.held_out
            said.append(reports.worse(epoch, loss, before, self.facts.advice))
        self.phase = Phase.GATHER
        self._epoch = None
        return said + self._try_plan(now)

    def _abandon(self, now: float, why: str) -> list[Any]:
        """Give this attempt up: nothing of it counts, all its samples go back, the version
        stays."""
        epoch = self._epoch
        self.phase = Phase.GATHER
        self._epoch = None
        self._changed = now
        if epoch is None:
            return []
        return [reports.epoch_abandoned(epoch, why)]


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
