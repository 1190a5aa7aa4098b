"""The leader's side of a peer: carries out the decisions of
:class:`~node.epoch.leader.leader.Leader` and reports the results to it. Enters: events for the
leader. Leaves: notes to members, inquiries, journal events. Never: a decision; the member's
side (that is :mod:`node.coordinator.following`)."""

import asyncio
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from node.consensus.mandate import Mandate
from node.consensus.rules import Rules
from node.consensus.trust import Trust
from node.consensus.voters import decide
from node.consensus.votes import Supporter, Vote, vote_on
from node.coordinator import notes
from node.coordinator.briefing import Briefing
from node.coordinator.credit.shared_note import Sent
from node.coordinator.credit.sketches import parse_sketches
from node.coordinator.inquiries import Inquiries, OwnPeer, Search
from node.coordinator.kit import Kit
from node.coordinator.messenger import Messenger
from node.coordinator.recalling import Recalling
from node.coordinator.statements import Statements
from node.core.errors import PeerFault
from node.core.ids import PeerId, short
from node.core.journey import Plan, Version
from node.epoch import events as ev
from node.epoch.leader.conduct import Record
from node.epoch.leader.leader import Leader, Phase
from node.epoch.member import Member
from node.epoch.pace import SEARCH_S, STANDS_S, TELL_TIMEOUT_S
from node.scheduler.router import Routes, SearchJob, search
from protos import training_pb2 as pb


async def in_thread(job: SearchJob) -> tuple[Routes, float]:
    """Search in a thread of its own for at most :data:`SEARCH_S` seconds of CPU time."""
    return await asyncio.to_thread(search, job, clock=time.thread_time, limit_s=SEARCH_S)


@dataclass(frozen=True)
class PeerMachines:
    """State machines of a coordinator, and its leader's search for paths."""

    member: Callable[..., Member] = Member
    leader: Callable[..., Leader] = Leader
    search: Search = in_thread


@dataclass(frozen=True)
class Tenure:
    """The time for which this peer leads, or has led last. ``since``: its beginning, in seconds of
    the clock; ``briefing``: what the leader hears before each event."""

    since: float
    briefing: Briefing


def alike(note: pb.Note, before: Plan | None) -> Callable[[PeerId], Sent]:
    """The same note to every member."""
    return lambda peer: note


class Leading:
    """The driver of the leader at one peer, while it leads. ``own``: the peer itself; ``trust``:
    certificates and proofs that it has seen."""

    def __init__(
        self,
        kit: Kit,
        own: OwnPeer,
        trust: Trust,
        statements: Statements,
        messenger: Messenger,
        recalling: Recalling,
        machines: PeerMachines,
    ) -> None:
        self._kit = kit
        self._own = own
        self._statements = statements
        self._messenger = messenger
        self._machines = machines
        self.mandate = Mandate(trust)
        """Votes for this peer's epochs, quorum certificates of the versions they made, and support
        for it."""
        self._inquiries = Inquiries(
            kit, own, self.mandate, messenger, recalling, machines.search, self.lead
        )
        self.leader: Leader | None = None
        """The leader, while this peer leads."""
        self._tenure: Tenure | None = None
        self._conduct: Mapping[PeerId, Record] = {}
        """Records of the members from when this peer led last."""
        self._closed = False
        self.addressed: Callable[[pb.Note, Plan | None], Callable[[PeerId], Sent]] = alike
        """Makes of a plan's note, and of the plan that this peer followed before, the note to each
        other member."""

    # ----------------------------------------------------------- the lead

    def begin(self, rules: Rules) -> None:
        """Begin to lead. ``rules``: the owner's newest change that is known here."""
        kit = self._kit
        member = self._own.member
        past = member.followed
        if past is not None:
            past = replace(past, dead=kit.work.lost_in(past.plan))
        self.leader = self._machines.leader(
            kit.me,
            kit.facts,
            term=member.term,
            history=past,
            rules=rules,
            known=kit.work.colleagues.all,
            cell=self._own.cell,
            conduct=self._conduct,
        )
        make = kit.facts.make
        saved = kit.work.local_checkpoints.versions
        briefing = Briefing(self.mandate.trust, saved, make.recall, kit.facts.may_lead)
        self.mandate.begin()
        self._tenure = Tenure(kit.clock.now(), briefing)
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
        tenure = self._tenure
        if tenure is None or self.leader is None or self.leader.phase is not Phase.GATHER:
            return -math.inf
        return self._kit.clock.now() - max(moved, tenure.since)

    # ----------------------------------------------------------- events and actions

    def lead(self, event: Any) -> None:
        """Feed the leader, if this peer leads, and carry out its actions."""
        if self._closed:
            return
        if self.leader is None or self._tenure is None:
            self.mandate.forget_support()
            return
        now = self._kit.clock.now()
        for each in self._tenure.briefing.before(event):
            actions = self.leader.handle(each, now)
            if self.leader.voting.commit is not None:
                self.mandate.certify(self.leader.voting.commit)
            self._carry_out(actions)

    def hear_own(self, note: pb.Note) -> None:
        """This peer's own report to its leader."""
        event = notes.leader_event(note, self._kit.me)
        if isinstance(event, ev.Committed):
            vote = self.vote_in(event)
            if vote is not None:  # signed here just now, or not at all
                self.mandate.cast(self._kit.me, vote, note.committed.vote)
            self.sketched(self._kit.me, note.committed)
        self.lead(event)

    def sketched(self, peer: PeerId, note: pb.CommittedNote) -> None:
        """A member sends sketches with its report of a commit. Raises WireError if they do not
        parse."""
        if self.leader is None or not note.HasField("sketches"):
            return
        plan = self.leader.plan
        if plan is not None and plan.hash == note.plan_hash:
            visits = parse_sketches(plan, note.sketches)
            self.lead(ev.Sketched(peer, plan.hash, visits))

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
            self.mandate.supported(support)

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
                case ev.SendTakeover(to):
                    note = notes.takeover_note(action)
                    event = notes.takeover_event(note, kit.me)
                    for peer in to:
                        if peer == kit.me:
                            kit.tasks.spawn(self._take_over_here(action, event), "takeover")
                        else:
                            kit.tasks.spawn(self._deliver(peer, note, event), "takeover")
                case ev.SendLost(to):
                    note = notes.dead_note(action)
                    for peer in to:
                        if peer == kit.me:
                            self._own.hear_of_dead(peer, note.dead)
                        else:
                            kit.tasks.spawn(self._messenger.notify(peer, note), "dead")
                case ev.ProbePeer(peer):
                    self._inquiries.probe(peer)
                case ev.Recall():
                    self._inquiries.recall(action)
                case ev.RequestMove(peer, stage):
                    self._inquiries.move(peer, stage)
                case ev.SearchPaths(job):
                    self._inquiries.search(job)
                case ev.Evaluate(epoch, plan):
                    self._inquiries.evaluate(epoch, plan)
                case ev.CountFault(peer, reason, weight):
                    kit.transport.fault(peer, reason, weight)
                case ev.RecordFact(kind, text, level, facts):
                    kit.journal.emit("training", kind, text, level, **facts)

    def _send_plan(self, plan: Plan, certified: Version | None) -> None:
        """Sign a plan and send it to every member, with the quorum certificate of ``certified``."""
        kit = self._kit
        warrant = self.mandate.warrant(plan.electorate, certified, kit.clock.now())
        note = notes.plan_note(plan, self._statements.plan(plan), warrant)
        before = self._own.member.plan
        if before is not None and self._own.member.leader != kit.me and not plan.parent:
            kit.tasks.spawn(self._send_first_plan(plan, note, before), "first plan")
            return
        to = self.addressed(note, before)
        for m in plan.members:
            # A member may have to load an older version before it answers.
            addressed = note if m.peer == kit.me else to(m.peer)
            deliver = self._deliver(m.peer, addressed, ev.PlanArrived(plan), plan.deadline_s)
            kit.tasks.spawn(deliver, "plan")

    async def _take_over_here(self, action: ev.SendTakeover, event: ev.TakenOver) -> None:
        """Let the own member go on with the epoch under this leader."""
        note = notes.takeover_note(action)
        if await self._deliver(self._kit.me, note, event) is not None:
            self._own.goes_on_without(event.plan_hash, action.dead)

    async def _send_first_plan(self, plan: Plan, note: pb.Note, before: Plan) -> None:
        """Send the first plan of a new leader, after ``before``. Its own member follows the plan
        only when enough of the voters do: the previous leader may live, and the voters may still
        follow that one."""
        event = ev.PlanArrived(plan)
        me = self._kit.me
        following = {me}
        others = list[asyncio.Task[PeerId | None]]()
        to = self.addressed(note, before)
        for m in plan.members:
            if m.peer != me:
                deliver = self._deliver(m.peer, to(m.peer), event, plan.deadline_s)
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
        self, peer: PeerId, note: Sent, event: Any, stands_s: float = STANDS_S
    ) -> PeerId | None:
        """Deliver a note. Returns the peer if it accepted, else None."""
        me = self._kit.me
        send = self._messenger.send_with_retry
        about = event.plan.hash if isinstance(event, ev.PlanArrived) else event.plan_hash
        try:
            if peer == me:
                reason = await self._own.happens(event)
            else:
                reason = await send(peer, note, TELL_TIMEOUT_S, stands_s)
        except PeerFault as e:
            reason = e.reason
            about = ""
        if reason is not None:
            self._kit.journal.emit(
                "training", "note-refused", f"peer {short(peer)}: {reason}", "warning", peer=peer
            )
            if peer == me and not isinstance(event, ev.RoundArrived):
                self.lead(ev.Declined(about, reason))
            else:
                self.lead(ev.Unreachable(peer, plan_hash=about))
            return None
        return peer
