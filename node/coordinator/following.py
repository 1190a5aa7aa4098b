"""The member's side of a peer: feeds the member and carries out its actions in order. Enters:
events for the member. Leaves: work for the stage, messages to the leader. Never: a decision; those
are the member's (:mod:`node.epoch.member`)."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from typing import Any, Protocol

from node.consensus.admission import Admission
from node.consensus.rules import Rules
from node.consensus.version_history import VersionHistory
from node.consensus.votes import vote_on
from node.coordinator import notes
from node.coordinator.kit import Kit
from node.coordinator.recalling import Recalling
from node.coordinator.statements import Statements
from node.core.errors import Refused
from node.core.ids import ENDS, PeerId
from node.core.journey import Plan, Version
from node.core.tasks import Tasks
from node.epoch import events as ev
from node.epoch.member import Member, MemberState
from node.pipeline.events import MicroBatchDone
from node.wire.limits import RESULTS
from protos import training_pb2 as pb

CARRIED_OUT_S = 5.0
"""Seconds that a stopping peer gives to a message that is being carried out."""


class PlanReports:
    """Reports of this peer about one plan to its leader: the micro-batches that end here, and its
    last word on a round. Results that come while a report is on its way travel in the next one.
    Reports that the leader could not be told travel once it answers again.

    ``tell(note)`` sends a note, and returns False if the leader could not be told; ``spawn`` begins
    a task.
    """

    def __init__(
        self,
        plan: Plan,
        tell: Callable[[pb.Note], Awaitable[bool]],
        spawn: Callable[[Coroutine[Any, Any, None], str], object],
    ) -> None:
        self.plan = plan
        self._tell = tell
        self._spawn = spawn
        self._results: list[MicroBatchDone] = []
        self._told = 0
        """Number of results that were sent."""
        self._telling = False
        self._unheard: pb.Note | None = None
        """The last word, if the leader could not be told."""

    def add(self, result: MicroBatchDone) -> None:
        """A micro-batch has ended."""
        self._results.append(result)
        self._go_on()

    def says(self, note: pb.Note) -> None:
        """Tell the leader this word on a round."""
        self._unheard = None
        self._spawn(self._say(note), note.WhichOneof("say") or "word")

    def again(self) -> None:
        """Report all results once more: somebody else is to hear them."""
        self._told = 0
        self._go_on()

    def answers(self) -> None:
        """The leader answers: tell it all that it could not be told."""
        self._go_on()
        if self._unheard is not None:
            self.says(self._unheard)

    def _go_on(self) -> None:
        if not self._telling and self._told < len(self._results):
            self._telling = True
            self._spawn(self._report(), "results")

    async def _report(self) -> None:
        try:
            while batch := tuple(self._results[self._told : self._told + RESULTS]):
                sent = self._told + len(batch)
                self._told = sent  # before the call, in which it may be set back
                heard = await self._tell(notes.finished_note(self.plan, batch))
                if not heard and self._told == sent:  # else it was set back for a new leader
                    self._told -= len(batch)
                    return
        finally:
            self._telling = False

    async def _say(self, note: pb.Note) -> None:
        if not await self._tell(note):
            self._unheard = note


class Turns(asyncio.Lock):
    """The turns of the events that come to one member, one at a time. ``over``: no further event is
    handled."""

    over = False


class PeerPort(Protocol):
    """The rest of this peer: :class:`node.coordinator.service.Training`."""

    async def tell_leader(self, plan: Plan, note: pb.Note) -> bool:
        """Send a note that the leader of this plan must hear. Return False if it does not
        answer."""
        ...

    def accuse(self, peer: PeerId) -> None:
        """``peer`` did not answer: let the leader find out whether it is dead."""
        ...

    def keep_change(self, rules: Rules) -> None:
        """Keep a newer change of the owner, and pass it on."""
        ...

    def leader_changed(self) -> None:
        """This peer follows another leader than before."""
        ...

    def version_changed(self) -> None:
        """Another version is in place than the leader knows: report it at once."""
        ...

    def entered(self, plan: Plan) -> None:
        """This peer now belongs to the cell that ``plan`` founds."""
        ...

    def follows(self, plan: Plan) -> None:
        """A plan is in force here."""
        ...

    def commits(self, plan: Plan, note: pb.Note) -> None:
        """This peer's member has committed the version that ``plan`` made; ``note`` is about to say
        so to the leader."""
        ...


class Following:
    """The driver of one member. ``finished``: set when the run is complete."""

    def __init__(
        self,
        kit: Kit,
        member: Member,
        admission: Admission,
        statements: Statements,
        recalling: Recalling,
        port: PeerPort,
    ) -> None:
        self._kit = kit
        self.member = member
        self._admission = admission
        self._statements = statements
        self._recalling = recalling
        self._port = port
        self._turns = Turns()
        self._epoch_tasks = Tasks("training", kit.on_error)
        self._hearing = Tasks("training", kit.on_error)
        self._reports: PlanReports | None = None
        """The reports about the newest plan."""
        self.moved = kit.clock.now()
        """Time of the last event, in seconds of the clock."""
        self.finished = asyncio.Event()

    @property
    def past(self) -> VersionHistory:
        """The versions from which this peer has begun epochs."""
        return self._recalling.history

    @property
    def busy(self) -> bool:
        """True while an epoch is under way here, or an event is being carried out."""
        return self.member.busy or self._turns.locked()

    def running(self) -> ev.Running:
        """This peer's work in the plan in force, for a leader that could take it over; none where
        this peer leads the epoch: as its leader once more it would number its rounds as before."""
        m = self.member
        if m.plan is None or m.state is not MemberState.RUN or m.leader == self._kit.me:
            return ev.Running()
        machine = self._kit.work.engines.pipeline.machine
        if machine.plan is None or machine.plan.hash != m.plan.hash:
            return ev.Running(m.plan.hash)
        return ev.Running(m.plan.hash, machine.computed)

    def leader_of(self, plan: Plan) -> PeerId:
        """The peer that leads the epoch of a plan, by this peer's knowledge."""
        m = self.member
        if m.plan is plan and m.leader is not None:
            return m.leader
        return plan.leader

    def answered(self, leader: PeerId) -> None:
        """``leader`` has accepted a heartbeat: it may have missed reports on its epoch."""
        reports = self._reports
        if reports is None or reports.plan is not self.member.plan:
            return
        if self.leader_of(reports.plan) == leader:
            reports.answers()

    # ----------------------------------------------------------- the end

    def stop(self) -> None:
        """Take no further event."""
        self._turns.over = True

    async def end_epoch(self) -> None:
        """End the work of the epoch under way."""
        await self._epoch_tasks.close()

    async def carried_out(self) -> None:
        """Wait for the event that is being carried out, at most :data:`CARRIED_OUT_S`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CARRIED_OUT_S):
                async with self._turns:
                    pass

    async def end_hearing(self) -> None:
        """End what :meth:`told` has begun."""
        await self._hearing.close()

    # ----------------------------------------------------------- events

    async def told(self, event: Any, unless: Callable[[], str] | None = None) -> str | None:
        """Handle an event as :meth:`happens` does, but complete it even if the sender hangs up
        meanwhile: otherwise a half carried out plan would count as known when it is sent again."""
        return await asyncio.shield(self._hearing.spawn(self.happens(event, unless), "told"))

    async def happens(self, event: Any, unless: Callable[[], str] | None = None) -> str | None:
        """Feed the member and carry out its actions in order. Returns the reason of a refusal, or
        None. ``unless`` is called when the event's turn comes; it returns the reason to refuse the
        event, or ""."""
        async with self._turns:
            if self._turns.over:
                return "this peer stops"
            if unless is not None and (why := unless()):
                return why
            queue = [event]
            refused = None
            while queue:
                event = queue.pop(0)
                if isinstance(event, ev.PlanArrived):
                    event = replace(event, digest=self._kit.work.stage.digest)
                for action in self.member.handle(event, self._kit.clock.now()):
                    if isinstance(action, ev.RefuseCaller):
                        refused = action.reason
                    elif isinstance(action, ev.GoTo) and (refused := await self._go_to(action)):
                        break  # what follows is work on a version that is not here
                    elif isinstance(action, ev.GoTo):
                        continue
                    elif isinstance(action, ev.FetchBase):
                        if (refused := await self._fetch_base(action)) is None:
                            queue.append(event)
                    elif (follow := await self._act(action)) is not None:
                        queue.append(follow)
            self.moved = self._kit.clock.now()
            return refused

    def place(self, term: int = 0) -> None:
        """Tell the member which version is in place. ``term``: the highest one in which this peer
        has voted, 0 for none."""
        work = self._kit.work
        versions = work.local_checkpoints.versions()
        placed = ev.VersionPlaced(work.stage.version, versions, work.tokens, term)
        self.member.handle(placed, self._kit.clock.now())

    # ----------------------------------------------------------- actions

    async def _go_to(self, action: ev.GoTo) -> str | None:
        """Put another version in place. If that fails, report what this peer holds instead and
        return why it failed."""
        await self._epoch_tasks.close()
        try:
            await self._kit.work.go_to(action.version, action.how)
        except Refused as e:
            self._kit.journal.emit(
                "checkpoint", "restore-failed", str(e), "error", epoch=action.version.epoch
            )
            self.place()
            self._port.version_changed()
            return f"epoch {action.version.epoch} cannot be put in place: {e}"
        return None

    async def _fetch_base(self, action: ev.FetchBase) -> str | None:
        """Put the parameters in place that a plan begins from. Returns the reason if they could
        not be fetched in time; then the version in place stays."""
        await self._epoch_tasks.close()
        work = self._kit.work
        reason = None
        try:
            await work.fetch_base(action.version, action.donors, action.digest, action.within_s)
        except Refused as e:
            reason = f"epoch {action.version.epoch} is not here: {e}"
            self._kit.journal.emit(
                "checkpoint", "base-missing", str(e), "warning", epoch=action.version.epoch
            )
        if work.stage.version != self.member.at:
            self.place()
            self._port.version_changed()
        return reason

    async def _act(self, action: Any) -> Any:
        match action:
            case ev.Settle(epoch):
                await self._kit.work.settle(epoch, self.member.plan)
                versions = self._kit.work.local_checkpoints.versions()
                self.member.handle(ev.CheckpointsKept(versions), self._kit.clock.now())
            case ev.BeginEpoch(plan, behind):
                await self._begin(plan, behind)
            case ev.EnterCell(plan):
                await self._follow(plan)
                self._kit.work.enter(plan)
                self._port.entered(plan)
            case ev.ReportAgain(plan):
                self._port.leader_changed()
                self._reports_on(plan).again()
            case ev.StartRound(plan, r, listener):
                self._epoch_tasks.spawn(self._end(plan, r, listener), "round")
            case ev.AdoptParts(plan, ended):
                digest = await self._kit.work.adopt(plan)
                self._kit.work.engines.meter.worked()
                return ev.Adopted(ended, digest)
            case ev.TellCommitted(plan):
                note = notes.committed_note(action, self._kit.work.speed(), self._vote(action))
                self._port.commits(plan, note)
                self._reports_on(plan).says(note)
            case ev.TellIncomplete(plan, ended):
                for peer in ended.failed:
                    self._port.accuse(peer)
                self._reports_on(plan).says(notes.incomplete_note(action))
            case ev.Finish(plan):
                await self._finish(plan)
        return None

    async def _begin(self, plan: Plan, behind: tuple[Version, int] | None) -> None:
        """Take part in a plan. ``behind``: as in :meth:`_follow`."""
        await self._follow(plan, behind)
        self._kit.callbacks.on_plan(plan)
        if plan.window.number:
            self._kit.callbacks.on_partners(plan)
        rules = self._kit.work.read(plan.change)
        if self._admission.changes.follows(plan.leader, rules):
            self._port.keep_change(rules)
        await self._kit.work.begin(plan, behind is not None)
        if self._kit.stage == ENDS and behind is None and plan.paths:
            reports = self._reports_on(plan)
            self._epoch_tasks.spawn(self._kit.work.run(plan, reports.add), "run")

    async def _finish(self, plan: Plan) -> None:
        await self._follow(plan)
        await self._kit.work.finish(plan)
        self._kit.callbacks.on_plan(plan)
        self.finished.set()
        self._kit.journal.emit(
            "training",
            "run-finished",
            f"the run is complete at epoch {plan.epoch}",
            epoch=plan.epoch,
        )

    async def _follow(self, plan: Plan, behind: tuple[Version, int] | None = None) -> None:
        """The plan is in force. ``behind``: the version that this peer held and its tokens, if the
        plan is of another history."""
        await self._epoch_tasks.close()
        kit = self._kit
        self._admission.terms.saw(plan.term, kit.clock.wall())
        self._admission.trust.expects(sum(plan.forecast))
        self._kit.work.colleagues.meet([m.peer for m in plan.members if m.current], kit.clock.now())
        self._port.follows(plan)
        if self._kit.work.plan is None or plan.leader != self._kit.work.plan.leader:
            self._port.leader_changed()
        if behind is not None:
            kit.tasks.spawn(self._recalling.give_up(*behind, plan.leader), "give-up")
        else:
            self.past.stood(plan.base, plan.tokens)

    async def _end(self, plan: Plan, r: ev.RoundArrived, listener: bool) -> None:
        """Run the round that ends the epoch, or copy its result from other members."""
        if r.sources:
            ended = await self._kit.work.copy(plan, r)
        else:
            ended = await self._kit.work.average(plan, r, listener)
        await self.happens(ended)

    def _reports_on(self, plan: Plan) -> PlanReports:
        """This peer's reports about a plan."""
        if self._reports is not None and self._reports.plan is plan:
            return self._reports

        async def tell(note: pb.Note) -> bool:
            if note.WhichOneof("say") == "finished" and self.member.plan is not plan:
                return False
            return await self._port.tell_leader(plan, note)

        self._reports = PlanReports(plan, tell, self._kit.tasks.spawn)
        return self._reports

    def _vote(self, action: ev.TellCommitted) -> bytes:
        """This peer's signature under the committed version; empty if it has voted otherwise."""
        plan = action.plan
        stage = self._kit.stage
        vote = vote_on(plan, self.member.at, action.attempt, stage, action.digest)
        try:
            return self._statements.vote(vote)
        except Refused as e:
            self._kit.journal.emit("training", "vote-refused", str(e), "warning", term=vote.term)
            return b""
