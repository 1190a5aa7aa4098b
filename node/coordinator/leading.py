"""The leader's side of a peer: carries out the decisions of
:class:`~node.epoch.leader.leader.Leader` and reports the results to it. Enters: events for the
leader. Leaves: notes to members, probes, a search for better paths, journal events. Never: a
decision; the member's side (that is :mod:`node.coordinator.following`)."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from node.consensus.rules import Rules
from node.consensus.tally import VoteTally
from node.consensus.trust import Trust, Warrant
from node.consensus.voters import decide
from node.consensus.votes import Certificate, Supporter, Vote, vote_on
from node.coordinator import notes
from node.coordinator.briefing import Briefing
from node.coordinator.kit import Kit
from node.coordinator.messenger import Messenger, Unheard
from node.coordinator.recalling import Recalling
from node.coordinator.statements import Statements
from node.core.errors import NetworkFault, PeerFault
from node.core.ids import CellId, PeerId, short
from node.core.journey import Plan, Version
from node.epoch import events as ev
from node.epoch.leader.conduct import Record
from node.epoch.leader.leader import Leader, Phase
from node.epoch.member import Member
from node.epoch.pace import PROBE_TIMEOUT_S, SEARCH_S, STANDS_S, TELL_TIMEOUT_S
from node.scheduler.router import Routes, SearchJob, search
from node.stage.runtime import StageRuntime
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


@dataclass(frozen=True)
class PeerMachines:
    """State machines of a coordinator, and its leader's search for paths."""

    member: Callable[..., Member] = Member
    leader: Callable[..., Leader] = Leader
    search: Search = in_thread


class OwnPeer(Protocol):
    """The leader's own peer: :class:`node.coordinator.service.Training`, whose member
    :class:`node.coordinator.following.Following` drives."""

    @property
    def member(self) -> Member:
        """Its member."""
        ...

    @property
    def cell(self) -> CellId:
        """Its cell."""
        ...

    @property
    def on_move(self) -> Callable[[int], str]:
        """Asks it to host another stage; returns "" if it will, else the reason against."""
        ...

    async def happens(self, event: Any) -> str | None:
        """Feed its member. Returns the reason of a refusal, or None."""
        ...

    def hear_of_dead(self, peer: PeerId, note: pb.DeadNote) -> str | None:
        """The leader has found members dead."""
        ...


class Leading:
    """The driver of the leader at one peer, while it leads. ``own``: the peer itself; ``trust``:
    certificates and proofs that it has seen."""

    def __init__(
        self,
        kit: Kit,
        own: OwnPeer,
        work: StageRuntime,
        trust: Trust,
        statements: Statements,
        messenger: Messenger,
        recalling: Recalling,
        machines: PeerMachines,
    ) -> None:
        self._kit = kit
        self._own = own
        self._work = work
        self._trust = trust
        self._statements = statements
        self._messenger = messenger
        self._recalling = recalling
        self._machines = machines
        self.leader: Leader | None = None
        """The leader, while this peer leads."""
        self.since = kit.clock.now()
        """Time at which this peer last began to lead."""
        self._probing: set[PeerId] = set()
        self._searching = asyncio.Lock()
        self._briefing: Briefing | None = None
        self._support: dict[PeerId, Supporter] = {}
        """Support that peers have signed for this peer as leader, including peers that have left
        since."""
        self.tally = VoteTally(trust)
        """Votes for this peer's epochs, and quorum certificates of the versions they made."""
        self._conduct: Mapping[PeerId, Record] = {}
        """Records of the members from when this peer led last."""
        self._closed = False
        self.addressed: Callable[[pb.Note, Plan | None, PeerId], pb.Note] = lambda note, *_: note
        """Makes of a plan's note, and of the plan that this peer followed before, the note to one
        member."""

    # ----------------------------------------------------------- the lead

    def begin(self, rules: Rules) -> None:
        """Begin to lead. ``rules``: the owner's newest change that is known here."""
        kit = self._kit
        member = self._own.member
        self.leader = self._machines.leader(
            kit.me,
            kit.facts,
            term=member.term,
            history=member.plan,
            dropped=member.dropped,
            rules=rules,
            known=self._work.colleagues.all,
            cell=self._own.cell,
            conduct=self._conduct,
        )
        make = kit.facts.make
        saved = self._work.local_checkpoints.versions
        self._briefing = Briefing(self._trust, saved, make.recall, kit.facts.may_lead)
        self.tally = VoteTally(self._trust)
        self.since = kit.clock.now()
        kit.journal.emit("training", "leading", "this peer leads the epochs", term=member.term)

    def end(self) -> None:
        """Lead no more."""
        if self.leader is not None:
            self._conduct = self.leader.conduct.records
        self.leader = None

    def close(self) -> None:
        """Take no further event: a broken connection is no news to a leader that stops."""
        self._closed = True

    def stuck_s(self, moved: float) -> float:
        """Seconds for which this peer has led without a plan under way; ``moved``: time of the last
        event of its member. Negative while it does not lead, or a plan is under way."""
        if self.leader is None or self.leader.phase is not Phase.GATHER:
            return -math.inf
        return self._kit.clock.now() - max(moved, self.since)

    # ----------------------------------------------------------- events and actions

    def lead(self, event: Any) -> None:
        """Feed the leader, if this peer leads, and carry out its actions."""
        if self._closed:
            return
        if self.leader is None or self._briefing is None:
            self._support.clear()
            return
        now = self._kit.clock.now()
        for each in self._briefing.before(event):
            actions = self.leader.handle(each, now)
            if self.leader.commit is not None:
                self.tally.certify(self.leader.commit)
            self._carry_out(actions)

    def hear_own(self, note: pb.Note) -> None:
        """This peer's own report to its leader."""
        event = notes.leader_event(note, self._kit.me)
        if isinstance(event, ev.Committed):
            vote = self.vote_in(event)
            if vote is not None:  # signed here just now, or not at all
                self.tally.cast(self._kit.me, vote, note.committed.vote)
        self.lead(event)

    def vote_in(self, e: ev.Committed) -> Vote | None:
        """The vote that a member must have signed with its report of a commit; None if the report
        is not of the epoch under way."""
        if self.leader is None:
            return None
        about = self.leader.votes_on(e)
        if about is None:
            return None
        plan, version = about
        member = plan.member(e.peer)
        if member is None:
            return None
        return vote_on(plan, version, e.attempt, member.stage, e.digest)

    def supported(self, support: Supporter) -> None:
        """A peer has signed its support for this peer as leader."""
        if self.leader is not None:
            self._support[support.peer] = support

    def _carry_out(self, actions: Iterable[Any]) -> None:
        kit = self._kit
        for action in actions:
            match action:
                case ev.SendPlan(plan, certified):
                    self._send_plan(plan, plan.base if certified else None)
                case ev.SendRound(to, _, round):
                    note = notes.round_note(round)
                    for peer in to:
                        kit.tasks.spawn(
                            self._deliver(peer, note, notes.round_event(note, kit.me)), "round"
                        )
                case ev.SendLost(to):
                    note = notes.dead_note(action)
                    for peer in to:
                        if peer == kit.me:
                            self._own.hear_of_dead(peer, note.dead)
                        else:
                            kit.tasks.spawn(self._messenger.notify(peer, note), "dead")
                case ev.ProbePeer(peer):
                    if peer not in self._probing:
                        self._probing.add(peer)
                        kit.tasks.spawn(self._probe(peer), "probe")
                case ev.Recall():
                    kit.tasks.spawn(self._recall(action), "recall")
                case ev.RequestMove(peer, stage):
                    kit.tasks.spawn(self._ask_to_move(peer, stage), "move")
                case ev.SearchPaths(job):
                    kit.tasks.spawn(self._search(job), "search")
                case ev.Evaluate(epoch, plan):
                    kit.tasks.spawn(self._evaluate(epoch, plan), "evaluate")
                case ev.CountFault(peer, reason, weight):
                    kit.transport.fault(peer, reason, weight)
                case ev.RecordFact(kind, text, level, facts):
                    kit.journal.emit("training", kind, text, level, **facts)

    def _send_plan(self, plan: Plan, certified: Version | None) -> None:
        """Sign a plan and send it to every member, with the quorum certificate of ``certified``."""
        kit = self._kit
        certificate = self.tally.certificate(certified)
        if certificate is not None:
            self._trust.learns(certificate, kit.clock.now())
        doubles = self._trust.doubles.told()
        warrant = Warrant(certificate, self._supporters(plan), doubles)
        note = notes.plan_note(plan, self._statements.plan(plan), warrant)
        before = self._own.member.plan
        if before is not None and before.leader != kit.me and not plan.parent:
            kit.tasks.spawn(self._take_over(plan, note), "take over")
            return
        for m in plan.members:
            # A member may have to load an older version before it answers.
            addressed = self.addressed(note, before, m.peer)
            deliver = self._deliver(m.peer, addressed, ev.PlanArrived(plan), plan.deadline_s)
            kit.tasks.spawn(deliver, "plan")

    def _supporters(self, plan: Plan) -> tuple[Supporter, ...]:
        """Support signed by the voters and elders of this plan, and by the voters of the last
        certificate."""
        voters = {*plan.electorate.voters, *plan.electorate.elders, *self._trust.voters}
        if len(self._support) > MOST_SUPPORT:
            self._support = {p: s for p, s in self._support.items() if p in voters}
        return tuple(s for p, s in self._support.items() if p in voters)

    async def _take_over(self, plan: Plan, note: pb.Note) -> None:
        """Send the first plan of a new leader. Its own member follows the plan only when enough of
        the voters do: the previous leader may live, and the voters may still follow that one."""
        event = ev.PlanArrived(plan)
        me = self._kit.me
        following = {me}
        others = list[asyncio.Task[PeerId | None]]()
        for m in plan.members:
            if m.peer != me:
                addressed = self.addressed(note, None, m.peer)
                deliver = self._deliver(m.peer, addressed, event, plan.deadline_s)
                others.append(self._kit.tasks.spawn(deliver, "plan"))
        for told in asyncio.as_completed(others):
            if (peer := await told) is not None:
                following.add(peer)
            if decide(plan.electorate, following):
                break
        if decide(plan.electorate, following):
            await self._deliver(me, note, event)
        else:
            self.lead(ev.Declined(plan.hash, "too few voters follow it"))

    async def _deliver(
        self, peer: PeerId, note: pb.Note, event: Any, stands_s: float = STANDS_S
    ) -> PeerId | None:
        """Deliver a note. Returns the peer if it accepted, else None."""
        me = self._kit.me
        send = self._messenger.send_with_retry
        try:
            if peer == me:
                reason = await self._own.happens(event)
            else:
                reason = await send(peer, note, TELL_TIMEOUT_S, stands_s)
        except PeerFault as e:
            reason = e.reason
        if reason is not None:
            self._kit.journal.emit(
                "training", "note-refused", f"peer {short(peer)}: {reason}", "warning", peer=peer
            )
            if peer == me and isinstance(event, ev.PlanArrived):
                self.lead(ev.Declined(event.plan.hash, reason))
            else:
                self.lead(ev.Unreachable(peer))
            return None
        return peer

    async def _probe(self, peer: PeerId) -> None:
        try:
            reason = await self._messenger.send_with_retry(peer, pb.Note(), PROBE_TIMEOUT_S)
            self.lead(ev.ProbeAnswered(peer, reason is None))
        except Unheard as e:
            self._kit.vitals.dead(peer, self._kit.clock.now(), e.since)
            self.lead(ev.Unreachable(peer, e.since))
        finally:
            self._probing.discard(peer)

    async def _recall(self, asked: ev.Recall) -> None:
        version = asked.version
        plan, dropped = self._own.member.remembers(version)
        if plan is not None and not asked.proof:
            self.lead(ev.Recalled(version, plan, dropped))
            return

        def shown(certificate: Certificate | None) -> Version | None:
            if certificate is None:
                return None
            return self.tally.show(certificate, self._own.cell, self._kit.clock.now())

        def proves(certificate: Certificate | None) -> bool:
            return not asked.proof or shown(certificate) is not None

        found, certificate = await self._recalling.recall(version, asked.holders, proves)
        self.lead(replace(found, certified=shown(certificate)))

    async def _ask_to_move(self, peer: PeerId, stage: int) -> None:
        note = pb.Note(move=pb.MoveNote(stage=stage))
        try:
            if peer == self._kit.me:
                refused = self._own.on_move(stage) or None
            else:
                refused = await self._messenger.send(peer, note, TELL_TIMEOUT_S)
        except PeerFault as e:
            # It may have received the request and be moving: it counts as moving.
            self._kit.journal.emit(
                "training", "move-unanswered", f"peer {short(peer)}: {e.reason}", "info", peer=peer
            )
            return
        if refused is not None:
            self._kit.journal.emit(
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
                routes, makespan = await self._machines.search(job)
            self.lead(ev.Searched(job, routes, makespan))

    async def _evaluate(self, epoch: int, plan: Plan) -> None:
        loss = 0.0
        try:
            loss = await self._work.evaluate(plan)
        except (PeerFault, NetworkFault) as e:
            self._kit.journal.emit(
                "training",
                "evaluation-failed",
                f"the held-out loss could not be measured: {e}",
                "warning",
            )
        self.lead(ev.Evaluated(epoch, loss))
