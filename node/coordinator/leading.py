"""The leader's side of a peer: carries out the decisions of
:class:`~node.epoch.leader.leader.Leader` and reports the results to it. Enters: events for the
leader. Leaves: notes to members, probes, a search for better paths, journal events. Never: a
decision; the member's side (that is :mod:`node.coordinator.service`)."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from node.consensus.votes import Supporter, Warrant, decide, signing_domain
from node.coordinator import notes
from node.coordinator.briefing import Briefing
from node.coordinator.service import Training, Unheard
from node.core.errors import NetworkFault, PeerFault
from node.core.ids import PeerId, short
from node.core.journey import Plan
from node.epoch import events as ev
from node.epoch.leader.leader import Leader
from node.epoch.pace import PROBE_TIMEOUT_S, SEARCH_S, STANDS_S, TELL_TIMEOUT_S
from node.scheduler.router import Routes, SearchJob, search
from protos import training_pb2 as pb

MOST_SUPPORT = 4096
"""Number of signed statements of support above which the statements of peers that do not vote are
dropped."""
Search = Callable[[SearchJob], Awaitable[tuple[Routes, float]]]
"""A search for better paths: takes a job, returns the routes and their makespan like
:func:`node.scheduler.router.search`."""


async def in_thread(job: SearchJob) -> tuple[Routes, float]:
    """Search in a thread of its own for at most :data:`SEARCH_S` seconds of CPU time."""
    return await asyncio.to_thread(search, job, clock=time.thread_time, limit_s=SEARCH_S)


class LeaderService:
    """Carries out the leader's decisions at one peer. Takes the place of ``training.lead``."""

    def __init__(self, training: Training, search: Search) -> None:
        self._training = training
        self._search_paths = search
        self._tasks = training.tasks
        self._journal = training.journal
        self._me = training.me
        self._probing: set[PeerId] = set()
        self._searching = asyncio.Lock()
        self._briefing: Briefing | None = None
        self._briefed: Leader | None = None
        """The leader that was told what :attr:`_briefing` knows."""
        self._support: dict[PeerId, Supporter] = {}
        """Support that peers have signed for this peer as leader, including peers that have left
        since."""
        training.lead = self.lead

    def lead(self, event: Any) -> None:
        """Feed the leader, if this peer leads, and carry out its actions."""
        t = self._training
        if t.leader is None:
            self._support.clear()
            return
        if isinstance(event, ev.Heartbeat) and event.support is not None:
            self._support[event.peer] = event.support
        now = t.clock.now()
        for each in self._brief(t.leader).before(event, now):
            self._carry_out(t.leader.handle(each, now))

    def _brief(self, leader: Leader) -> Briefing:
        """The briefing of the leader, a new one for a new leader."""
        t = self._training
        if self._briefing is None or leader is not self._briefed:
            self._briefed = leader
            checkpoints = t.work.local_checkpoints
            self._briefing = Briefing(
                t.trust, t.cell, checkpoints.versions, t.facts.make.recall, t.facts.may_lead
            )
        return self._briefing

    def _carry_out(self, actions: Iterable[Any]) -> None:
        t = self._training
        for action in actions:
            match action:
                case ev.SendPlan(plan, certificate):
                    if certificate is not None:
                        t.trust.learns(certificate, t.clock.now())
                    domain = signing_domain("plan", t.facts.run_id)
                    note = notes.plan_note(
                        plan,
                        t.identity.sign(plan.canonical(), domain),
                        Warrant(certificate, self._supporters(plan), t.trust.doubles.told()),
                    )
                    before = t.member.plan
                    if before is not None and before.leader != self._me and not plan.parent:
                        self._tasks.spawn(self._take_over(plan, note), "take over")
                        continue
                    for m in plan.members:
                        # A member may have to load an older version before it answers.
                        self._tasks.spawn(
                            self._deliver(m.peer, note, ev.PlanArrived(plan), plan.deadline_s),
                            "plan",
                        )
                case ev.SendRound(to, _, round):
                    note = notes.round_note(round)
                    for peer in to:
                        self._tasks.spawn(
                            self._deliver(peer, note, notes.round_event(note, self._me)), "round"
                        )
                case ev.SendLost(to):
                    note = notes.dead_note(action)
                    for peer in to:
                        if peer == self._me:
                            t.hear_of_dead(peer, note.dead)
                        else:
                            self._tasks.spawn(t.inform(peer, note), "dead")
                case ev.ProbePeer(peer):
                    if peer not in self._probing:
                        self._probing.add(peer)
                        self._tasks.spawn(self._probe(peer), "probe")
                case ev.Recall():
                    self._tasks.spawn(self._recall(action), "recall")
                case ev.RequestMove(peer, stage):
                    self._tasks.spawn(self._ask_to_move(peer, stage), "move")
                case ev.SearchPaths(job):
                    self._tasks.spawn(self._search(job), "search")
                case ev.Evaluate(epoch, plan):
                    self._tasks.spawn(self._evaluate(epoch, plan), "evaluate")
                case ev.CountFault(peer, reason, weight):
                    t.transport.fault(peer, reason, weight)
                case ev.RecordFact(kind, text, level, facts):
                    self._journal.emit("training", kind, text, level, **facts)

    def _supporters(self, plan: Plan) -> tuple[Supporter, ...]:
        """Support signed by the voters and elders of this plan, and by the voters of the last
        certificate."""
        voters = {*plan.electorate.voters, *plan.electorate.elders, *self._training.trust.voters}
        if len(self._support) > MOST_SUPPORT:
            self._support = {p: s for p, s in self._support.items() if p in voters}
        return tuple(s for p, s in self._support.items() if p in voters)

    async def _take_over(self, plan: Plan, note: pb.Note) -> None:
        """Send the first plan of a new leader. Its own member follows the plan only when enough of
        the voters do: the previous leader may live, and the voters may still follow that one."""
        event = ev.PlanArrived(plan)
        following = {self._me}
        others = [
            self._tasks.spawn(self._deliver(m.peer, note, event, plan.deadline_s), "plan")
            for m in plan.members
            if m.peer != self._me
        ]
        for told in asyncio.as_completed(others):
            if (peer := await told) is not None:
                following.add(peer)
            if decide(plan.electorate, following):
                break
        if decide(plan.electorate, following):
            await self._deliver(self._me, note, event)
        else:
            self.lead(ev.Declined(plan.hash, "too few voters follow it"))

    async def _deliver(
        self, peer: PeerId, note: pb.Note, event: Any, stands_s: float = STANDS_S
    ) -> PeerId | None:
        """Deliver a note. Returns the peer if it accepted, else None."""
        t = self._training
        try:
            if peer == self._me:
                reason = await t.happens(event)
            else:
                reason = await t.word(peer, note, TELL_TIMEOUT_S, stands_s)
        except PeerFault as e:
            reason = e.reason
        if reason is not None:
            self._journal.emit(
                "training", "note-refused", f"peer {short(peer)}: {reason}", "warning", peer=peer
            )
            if peer == self._me and isinstance(event, ev.PlanArrived):
                self.lead(ev.Declined(event.plan.hash, reason))
            else:
                self.lead(ev.Unreachable(peer))
            return None
        return peer

    async def _probe(self, peer: PeerId) -> None:
        try:
            reason = await self._training.word(peer, pb.Note(), PROBE_TIMEOUT_S)
            self.lead(ev.ProbeAnswered(peer, reason is None))
        except Unheard as e:
            self._training.vitals.dead(peer, self._training.clock.now(), e.since)
            self.lead(ev.Unreachable(peer, e.since))
        finally:
            self._probing.discard(peer)

    async def _recall(self, asked: ev.Recall) -> None:
        t = self._training
        version = asked.version
        plan, dropped = t.member.remembers(version)
        if plan is not None and not asked.proof:
            self.lead(ev.Recalled(version, plan, dropped))
            return

        def proves(found: ev.Recalled) -> bool:
            c = found.certificate
            return not asked.proof or (c is not None and t.trust.shown(c, t.cell, t.clock.now()))

        self.lead(await t.past.recall(version, asked.holders, proves))

    async def _ask_to_move(self, peer: PeerId, stage: int) -> None:
        t = self._training
        try:
            if peer == self._me:
                refused = t.on_move(stage) or None
            else:
                refused = await t.tell(peer, pb.Note(move=pb.MoveNote(stage=stage)), TELL_TIMEOUT_S)
        except PeerFault as e:
            # It may have received the request and be moving: it counts as moving.
            self._journal.emit(
                "training", "move-unanswered", f"peer {short(peer)}: {e.reason}", "info", peer=peer
            )
            return
        if refused is not None:
            self._journal.emit(
                "training",
                "move-refused",
                f"peer {short(peer)} stays: {refused}",
                "info",
                peer=peer,
            )
            self.lead(ev.MoveRefused(peer))

    async def _search(self, job: SearchJob) -> None:
        # one at a time; the next search sees the changes made meanwhile
        if not self._searching.locked():
            async with self._searching:
                routes, makespan = await self._search_paths(job)
            self.lead(ev.Searched(job, routes, makespan))

    async def _evaluate(self, epoch: int, plan: Plan) -> None:
        loss = 0.0
        try:
            loss = await self._training.work.evaluate(plan)
        except (PeerFault, NetworkFault) as e:
            self._journal.emit(
                "training",
                "evaluation-failed",
                f"the held-out loss could not be measured: {e}",
                "warning",
            )
        self.lead(ev.Evaluated(epoch, loss))
