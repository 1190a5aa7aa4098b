"""One peer's part in the epochs of a run: messages from other peers, and the parts that drive its
machines. Enters: messages and time. Leaves: events for the leader
(:mod:`node.coordinator.leading`) and the member (:mod:`node.coordinator.following`) of this peer.
Never: a decision of either; work of the stage."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from node.consensus.admission import OTHER_LEADER, Admission, Ground, Here, Refusal, undoes
from node.consensus.equivocation import DoubleVote
from node.consensus.rules import ChangeStatus, Rules
from node.consensus.terms import Terms
from node.consensus.version_history import VersionHistory
from node.coordinator import notes
from node.coordinator.candidacy import Candidacy
from node.coordinator.credit.book import Book
from node.coordinator.credit.keeper import Credit
from node.coordinator.following import Following
from node.coordinator.kit import Kit
from node.coordinator.known_peers import KnownPeers
from node.coordinator.leading import Leading, PeerMachines
from node.coordinator.ledger import VoteLedger
from node.coordinator.messenger import Messenger
from node.coordinator.plan_inbox import PlanInbox
from node.coordinator.presence import View
from node.coordinator.recalling import Recalling
from node.coordinator.reporting import PAUSE_S, LeaderReply, Reporting, SelfReport
from node.coordinator.statements import Statements
from node.coordinator.vitals import MOST_LOST, Life
from node.coordinator.ways import Ways
from node.core.errors import Refused, WireError
from node.core.ids import NO_CELL, CellId, PeerId, short, short_cell
from node.core.journey import Plan
from node.core.tasks import Tasks
from node.epoch import events as ev
from node.epoch.leader.leader import Leader, Phase
from node.epoch.member import Member, MemberState
from node.epoch.pace import IDLE_TICK_S, TICK_S
from node.epoch.waiting import Lack, Wait
from node.identity.keys import Signer
from node.transport.port import blamed, printable
from protos import training_pb2 as pb
from protos import training_pb2_grpc as rpc

BARS = 3.0
"""Weight of a fault that bars a peer at once."""
ANSWER_S = 3.0
"""Seconds without an answer to a heartbeat after which a leader is shown as silent."""
HEARD_S = 5.0
"""Seconds for which a peer that this one heard is not shown as lost, whatever the leader says."""


class Training(rpc.TrainingServicer):
    """One peer's part in the epochs of a run. ``view()`` shows the peers that the directory lists
    as alive; ``ledger`` keeps votes, None: in memory only; ``book`` keeps receipts of work, None:
    no book."""

    def __init__(
        self,
        kit: Kit,
        identity: Signer,
        view: Callable[[], View],
        machines: PeerMachines | None = None,
        ledger: VoteLedger | None = None,
        book: Book | None = None,
    ) -> None:
        machines = machines or PeerMachines()
        work = kit.work
        self.kit = kit
        self.statements = Statements(identity, kit.facts.run_id, ledger or VoteLedger(), kit.clock)
        changes = ChangeStatus(kit.facts.make.read(""), kit.facts.invite_of)
        trust = self.statements.trust(changes.revokes)
        self.admission = Admission(Terms(), trust, changes, kit.facts.may_lead)
        self._inbox = PlanInbox(
            self.admission, self.statements, kit.facts.bounds, work, kit.clock, kit.journal
        )
        self.messenger = Messenger(kit.transport, kit.clock, kit.vitals, self._heartbeat_answered)
        recalling = Recalling(kit.transport, kit.journal, kit.facts.bounds, VersionHistory())
        member = machines.member(
            kit.me, work.stage.version, work.local_checkpoints.versions(), work.tokens
        )
        self.following = Following(kit, member, self.admission, self.statements, recalling, self)
        self.peers = KnownPeers(kit, view, self.following)
        self.leading = Leading(
            kit, self, trust, self.statements, self.messenger, recalling, machines
        )
        self.credit = Credit(kit, identity, work.engines.pipeline, book)
        self.leading.addressed = self.credit.addressed
        self.candidacy = Candidacy(
            kit, view, self.admission, self.messenger, self.following, self.leading
        )
        report = SelfReport(kit, self.admission, self.statements, self.following, self.candidacy)
        self.reporting = Reporting(
            kit, report, self.messenger, self.following, self.leading, self.candidacy
        )
        self.started = False
        rpc.add_TrainingServicer_to_server(self, kit.transport.server)

    @property
    def member(self) -> Member:
        """The member of this peer."""
        return self.following.member

    @property
    def leader(self) -> Leader | None:
        """The leader, while this peer leads."""
        return self.leading.leader

    @property
    def cell(self) -> CellId:
        """The cell this peer belongs to; empty in a run of one cell."""
        return self.candidacy.cell

    @property
    def tasks(self) -> Tasks:
        """The tasks that last as long as this peer takes part."""
        return self.kit.tasks

    def start(self) -> None:
        """Begin to take part: the state in place is what this peer offers."""
        self.started = True
        self.following.place(self.statements.term(self.cell))
        self.candidacy.start()
        self.tasks.spawn(self.reporting.beat(), "heartbeat", eternal=True)
        self.tasks.spawn(self._clockwork(), "clock", eternal=True)
        if self.kit.facts.waits.probe_every_s:
            ways = Ways(self.kit, self.peers, self.candidacy, self.reporting)
            self.tasks.spawn(ways.keep(), "ways", eternal=True)

    async def close(self) -> None:
        """Stop taking part at once: afterwards nothing changes the state of the stage.
        :meth:`leave` is the polite way. Messages that are being carried out have
        :data:`node.coordinator.following.CARRIED_OUT_S` to be done."""
        self.following.stop()
        self.leading.close()
        # All are cancelled before any goes on: the end of one may begin another.
        await asyncio.gather(self.tasks.close(), self.following.end_epoch())
        await self.following.carried_out()
        ends = (self.following.end_epoch(), self.following.end_hearing())
        await asyncio.gather(self.tasks.close(), *ends)

    async def leave(self, reason: str, *, hands_over: bool = True) -> None:
        """Finish the epoch under way, let the next one be planned without this peer, and hand over
        the optimizer state of its parts. ``hands_over``: False where all others leave as well, so
        that nobody takes it.

        Bounded by the caller. ``reason`` is for the record.
        """
        self.kit.journal.emit("training", "leaving", f"this peer leaves: {reason}")
        self.candidacy.leaving = True
        self.leading.lead(ev.Resigning(True))
        await self.reporting.report()
        # A plan that counts on this peer may be on its way already.
        await asyncio.sleep(TICK_S)
        while self.following.busy or self.leader is not None:
            await asyncio.sleep(TICK_S)
            self.candidacy.take_or_drop_the_lead()
        await self.reporting.report()
        if hands_over:
            await self.kit.work.handed_over()

    def stay(self) -> None:
        """Take part again: leaving was given up."""
        self.candidacy.leaving = False
        self.leading.lead(ev.Resigning(False))

    # ----------------------------------------------------------- how cells average

    def change(self, text: str) -> Rules:
        """Read the owner's change to how cells average, from any sender, and return the settings in
        it. A newer change is kept, sent to the leader until a plan is made under it, and comes into
        force with the next plan. Raises Refused if the owner did not sign it for this run."""
        rules = self.kit.facts.make.read(text)
        if self.admission.changes.learns(rules):
            self.keep_change(rules)
            self.reporting.hurry()
            if self.leader is not None:
                self.leading.lead(ev.Changed(rules))
        return rules

    def keep_change(self, rules: Rules) -> None:
        """Keep a newer change and pass it on to the members of the plan in force. Revoked
        peers are refused at once, not only with the next plan. A peer with a revoked invite may
        come back with another invite."""
        revokes = self.admission.changes.revokes
        self.kit.callbacks.on_change(rules.change)
        self.kit.transport.expel(rules.revokes, revokes)
        if rules.revoked:
            # Not only through the leader, which may be a revoked peer.
            heard = self.reporting.own.heartbeat()
            heard = replace(heard, membership=replace(heard.membership, change=rules.change))
            word = self.reporting.own.note(heard, self.kit.me)
            plan = self.kit.work.plan
            if plan is None:
                return
            for member in plan.members:
                peer = member.peer
                if peer != self.kit.me and not revokes(peer):
                    # A peer that does not lead takes the change from it and refuses the rest.
                    self.tasks.spawn(self.messenger.notify(peer, word), "change")

    # ----------------------------------------------------------- who leads

    def has_reported_to(self, peer: PeerId) -> bool:
        """Return True if plans of ``peer`` may be followed here: this peer took it for its leader,
        and sent it a heartbeat, a short time ago."""
        return self.candidacy.heeds(peer)

    def leader_id(self) -> PeerId | None:
        """The leader by this peer's knowledge; None if it sees no ends peer."""
        return self.candidacy.leader_id()

    # ----------------------------------------------------------- equivocation

    def _learn(self, doubles: Sequence[DoubleVote]) -> None:
        """Keep proofs of double votes. Raises WireError if one proves nothing."""
        if not all([self.admission.trust.doubles.shown(d) for d in doubles]):
            raise WireError("two votes that do not prove that their peer has voted twice")
        self._bar()

    def _bar(self) -> frozenset[PeerId]:
        """Refuse for a while the peers that were newly found to have voted twice; their votes no
        longer count. Returns these peers."""
        found = self.admission.trust.doubles.news()
        for d in found:
            self.kit.journal.emit(
                "training",
                "voted-twice",
                f"{short(d.peer)} has voted for two results of term {d.one.term}",
                "warning",
                peer=d.peer,
                term=d.one.term,
                epoch=d.one.version.epoch,
            )
            if d.peer != self.kit.me:
                self.kit.transport.fault(d.peer, "voted for two results of one attempt", BARS)
        if found:
            self.reporting.hurry()
        return frozenset(d.peer for d in found)

    async def _clockwork(self) -> None:
        patience = self.kit.transport.patience
        while True:
            tick_s = IDLE_TICK_S
            if self.leader is not None:
                tick_s = TICK_S
            due = self.kit.clock.now() + tick_s
            await asyncio.sleep(tick_s)
            now = self.kit.clock.now()
            patience.woke(due, now)
            self.kit.work.mind_the_disk()
            if now - due > self.kit.facts.waits.late_s:
                self._stood_still(now - due)
            if self.leader is not None:
                self.leading.lead(
                    ev.ClockTick(
                        self.candidacy.view().coming,
                        self.kit.work.colleagues.all,
                        patience.slack(now),
                    )
                )

    def _stood_still(self, seconds: float) -> None:
        """This process did not run for ``seconds``. Others may follow another leader by now: look
        for it at once."""
        self.kit.journal.emit(
            "training",
            "stood-still",
            f"this process did not run for {seconds:.0f} s; others may go on without it",
            "warning",
            seconds=round(seconds, 1),
        )
        self.kit.callbacks.on_lead()
        self.reporting.hurry()

    # ----------------------------------------------------------- notes in and out

    async def Tell(self, request: pb.Note, context: Any) -> pb.NoteReply:
        """Handle a note from another peer. A note that does not parse counts as a fault of its
        sender."""
        peer = self.kit.transport.caller(context)
        self.messenger.heard(peer)
        try:
            reason = await self._hear(peer, request)
        except WireError as e:
            self.kit.transport.fault(peer, str(e), 1.0)
            reason = str(e)
        reply = pb.NoteReply(accepted=reason is None, reason=reason or "")
        if request.WhichOneof("say") == "ready" and reason is None and self.leader is not None:
            reply.waits_for = self.waiting_for()
            reply.lost.extend(self.kit.vitals.lost())
            if self.kit.facts.prove:
                reply.lacking.peers.extend(self.leader.roster.participants.lacking(peer))
        return reply

    async def _hear(self, peer: PeerId, note: pb.Note) -> str | None:
        match note.WhichOneof("say"):
            case None:  # a probe: answers that we live, and whether we follow the sender
                if peer != self.leader_id():
                    return "this peer follows another leader"
                return None
            case "plan":
                return await self._hear_plan(peer, note.plan)
            case "round":
                event = notes.round_event(note, peer)
                if why := self.kit.facts.bounds.of_round(event):
                    raise WireError(f"invalid round: {why}")
                heeded = self.candidacy.heeds(peer)
                if self.member.plan is None or self.member.leader != peer and not heeded:
                    return "only the leader of this epoch opens its rounds"
                # The round of a leader that took the epoch over may come before its takeover.
                if self.member.leader != peer and (
                    why := await self._hear_takeover(peer, event.plan_hash, event.dead)
                ):
                    return why
                return await self.following.told(event)
            case "takeover":
                taken = notes.takeover_event(note, peer)
                return await self._hear_takeover(
                    peer, taken.plan_hash, map(PeerId, note.takeover.dead)
                )
            case "dead":
                return self.hear_of_dead(peer, note.dead)
            case "move":
                # The peer that leads may have made no plan yet: then it is the leader by election.
                if peer not in (self.member.leader, self.leader_id()):
                    return "only the leader asks for a change of stage"
                return self.kit.callbacks.on_move(note.move.stage) or None
            case "lead" if note.lead.cell != self.cell:
                return "this peer is in another cell"
            case "lead":
                self.candidacy.election.says(peer, self.kit.clock.now())
                self.reporting.hurry()
                if peer != self.leader_id():
                    return "this peer follows another leader"
                return None
            case "ready":
                pass
            case _ if self.leader is None:
                return "this peer does not lead"
            case "finished":
                if why := self.kit.facts.bounds.of_results(len(note.finished.results)):
                    raise WireError(f"invalid results: {why}")
        event = notes.leader_event(note, peer)
        support = notes.parse_support(note.ready, peer)
        doubles = notes.parse_doubles(note.ready.doubles)
        if isinstance(event, ev.Heartbeat):
            self.kit.vitals.leaves(peer, event.leaving)
        if isinstance(event, ev.Heartbeat) and event.membership.change:
            try:
                self.change(event.membership.change)
            except Refused as e:
                raise WireError(e.what) from e
        if isinstance(event, ev.Heartbeat) and event.membership.cell not in (NO_CELL, self.cell):
            return "this peer is in another cell"
        if self.leader is None and isinstance(event, ev.Heartbeat):
            self.candidacy.claimed(peer)
            # A heartbeat of this peer may be on its way to a leader that is gone.
            self.reporting.at_once()
        if self.leader is None:
            return "this peer does not lead"
        if isinstance(event, ev.Heartbeat) and (why := self.kit.facts.bounds.of_heard(event)):
            raise WireError(f"invalid stage or version: {why}")
        if isinstance(event, ev.Heartbeat):
            self._learn(doubles)
            if support is not None:
                self.leading.supported(support)
        if isinstance(event, ev.Committed) and not self._counts(event, note.committed.vote):
            return "this peer has voted for two results of one attempt"
        if isinstance(event, ev.Committed) and (about := self.leader.votes_on(event)) is not None:
            try:
                self.credit.collect(peer, about[0], note.committed)
                self.leading.sketched(peer, note.committed)
            except WireError as e:  # its commit counts all the same
                self.kit.transport.fault(peer, str(e), 1.0)
        self.leading.lead(event)
        return None

    def _counts(self, e: ev.Committed, signature: bytes) -> bool:
        """Check a member's vote, and keep it if it is one on the epoch under way. Return False if
        the member has voted twice. Raises WireError if the signature is wrong."""
        vote = self.leading.vote_in(e)
        if vote is None:
            return True
        if not self.admission.trust.vote_is_signed(vote, e.peer, signature):
            raise WireError("a vote whose signature is wrong")
        self.admission.trust.doubles.saw(vote, e.peer, signature)
        if e.peer in self._bar():
            return False
        self.leading.mandate.cast(e.peer, vote, signature)
        return True

    async def _hear_plan(self, peer: PeerId, note: pb.PlanNote) -> str | None:
        # A leader knows us because we took it for the leader and sent it a heartbeat.
        heeded = self.candidacy.heeds(peer)
        try:
            found = await self._inbox.receive(peer, note, heeded, self._here)
        finally:
            self._bar()
        if isinstance(found, Refusal):
            if found.ground in (Ground.OUTDATED, Ground.UNSUPPORTED):
                self.reporting.hurry()
            return found.reason
        self.candidacy.election.forgive(peer)
        self.credit.heard(found, note)

        def undone() -> str:
            # The work of another leader's plan may have been committed since it was admitted.
            why = undoes(found, self._here())
            if why:
                self.reporting.hurry()
            return why

        return await self.following.told(ev.PlanArrived(found), undone)

    async def _hear_takeover(
        self, peer: PeerId, plan_hash: str, dead: Iterable[PeerId]
    ) -> str | None:
        """Another leader goes on with the epoch under way, without the members of ``dead``. It is
        the one that this peer takes for the leader by now, and not only one that it has reported to
        lately. Returns the reason of a refusal, or None."""
        if peer != self.leader_id() or not self.candidacy.heeds(peer):
            return OTHER_LEADER
        refused = await self.following.told(ev.TakenOver(peer, plan_hash))
        if refused is None:
            self.goes_on_without(plan_hash, dead)
        return refused

    def _here(self) -> Here:
        """This peer, as the receiver of a plan."""
        m = self.member
        follows = None
        # Neither leader of an epoch that was taken over is trusted without support.
        if m.plan is not None and m.leader == m.plan.leader:
            follows = m.leader
        committed = m.plan is not None and m.state is MemberState.DONE
        clock = self.kit.clock
        return Here(
            self.cell,
            m.at,
            follows,
            committed,
            self.reporting.contact.known,
            clock.now(),
            clock.wall(),
        )

    async def History(self, request: pb.HistoryRequest, context: Any) -> pb.HistoryReply:
        """Answer with the plan that this peer remembers behind a version."""
        peer = self.kit.transport.caller(context)
        async with blamed(self.kit.transport, peer, context):
            remembered = self.member.remembers(notes.parse_version(request.version))
            return notes.history_reply(
                *remembered, self.following.past.versions, self.admission.trust.certificate
            )

    def hear_of_dead(self, peer: PeerId, note: pb.DeadNote) -> str | None:
        """The leader has found members dead. Returns a reason if ``peer`` does not lead here."""
        plan = self.member.plan
        if plan is None or self.member.leader != peer or plan.hash != note.plan_hash:
            return "not the leader of the plan in force here"
        self.goes_on_without(note.plan_hash, map(PeerId, note.dead))
        return None

    def goes_on_without(self, plan_hash: str, dead: Iterable[PeerId]) -> None:
        """Nothing here waits for these members any longer, if this plan is in force."""
        plan = self.member.plan
        if plan is None or plan.hash != plan_hash:
            return
        gone = set(dead) - {self.kit.me}
        self._count_dead(gone)
        self.kit.work.lost(plan_hash, gone)

    def _count_dead(self, peers: Iterable[PeerId], since: float | None = None) -> None:
        """Show ``peers``, which another peer reported dead, as dead unless they were heard after
        ``since``. Peers that are neither members of the plan nor in sight are ignored."""
        plan = self.kit.work.plan
        members = set[PeerId]()
        if plan is not None:
            members = {m.peer for m in plan.members}
        now = self.kit.clock.now()
        for peer in (members | self.candidacy.view().hosts.keys()) & set(peers) - {self.kit.me}:
            self.kit.vitals.dead(peer, now, since)

    def _heartbeat_answered(self, peer: PeerId, reply: pb.NoteReply) -> None:
        """``peer`` replied to a heartbeat."""
        lacking: frozenset[PeerId] | None = None
        if reply.HasField("lacking"):
            lacking = frozenset(map(PeerId, reply.lacking.peers))
        self.reporting.contact.replied(LeaderReply(peer, printable(reply.waits_for), lacking))
        lost = [PeerId(p) for p in reply.lost[:MOST_LOST]]
        self._count_dead(lost, self.kit.clock.now() - HEARD_S)

    def lost(self, peer: PeerId) -> None:
        """The connection to ``peer`` broke."""
        self.messenger.lost(peer)
        self.accuse(peer)

    def accuse(self, peer: PeerId) -> None:
        """An engine could not get an answer from ``peer``: let the leader find out whether it is
        dead."""
        self.reporting.accuse(peer)

    # ----------------------------------------------------------- this peer, for its parts

    async def happens(self, event: Any) -> str | None:
        """Feed the member. Returns the reason of a refusal, or None."""
        return await self.following.happens(event)

    def follows(self, plan: Plan) -> None:
        """A plan is in force: receipts of the epoch before it count."""
        self.credit.follows(plan, self.admission.trust.certificate)

    def commits(self, plan: Plan, note: pb.Note) -> None:
        """The member has committed the version that ``plan`` made: its note to the leader gets a
        statement of this peer's work."""
        m = self.member
        tokens = m.tokens - plan.tokens
        leads = m.leader == self.kit.me
        self.credit.commits(plan, m.at, m.dropped, tokens, note, leads=leads, sample=m.sample)

    def leader_changed(self) -> None:
        """This peer follows another leader than before: its record names the leader."""
        self.kit.callbacks.on_lead()

    async def tell_leader(self, plan: Plan, note: pb.Note) -> bool:
        """Send a note that the leader of this plan must hear. Return False if it does not
        answer."""
        return await self.reporting.tell_leader(plan, note)

    def version_changed(self) -> None:
        """Another version is in place than the leader knows: report it at once."""
        self.reporting.at_once()

    def entered(self, plan: Plan) -> None:
        """This peer now belongs to the cell that ``plan`` founds."""
        self.candidacy.entered(plan)
        self.admission.trust.forget()
        self.kit.journal.emit(
            "training",
            "cell-entered",
            f"belongs to cell {short_cell(plan.cell_id)} from epoch {plan.epoch} on, with "
            f"{len(plan.members) - 1} other peers",
            cell=plan.cell_id,
            epoch=plan.epoch,
        )
        self.kit.callbacks.on_cell(plan.cell_id)
        self.reporting.hurry()

    # ----------------------------------------------------------- for people

    @property
    def seeks(self) -> bool:
        """True if this peer has taken part and now waits: others may have moved out of its
        sight."""
        return self.member.plan is not None and bool(self.waiting_for())

    @property
    def works(self) -> bool:
        """True if this peer leads, and does not wait."""
        return self.leader is not None and not self.waiting_for()

    def waiting(self) -> Wait | None:
        """The reason why no epoch is under way; None if one is, or was a moment ago."""
        state = self.member.state
        # A leader's own member may still be in an epoch that its leader has given up.
        if state is MemberState.FINISHED or (self.leader is None and self.member.busy):
            return None
        # A member that is done waits for others in the same epoch: for the expected time of their
        # round nobody is late.
        done = self.kit.work.rounds.figures.deadline_s / 2 if state is MemberState.DONE else 0.0
        if self.kit.clock.now() - self.following.moved < max(PAUSE_S, done):
            return None
        if self.leader is not None:
            if self.leader.phase is not Phase.GATHER:
                return None
            return self.leader.gathering.waiting
        leader = self.leader_id()
        if leader is None:
            return Wait(Lack.ENDS)
        return Wait(Lack.PLAN, peers=(leader,))

    def waiting_for(self) -> str:
        """:meth:`waiting` as text, empty for no reason."""
        wait = self.waiting()
        if wait is None:
            return ""
        return str(wait)

    def standing_of(self, peer: PeerId) -> tuple[Life, float]:
        """The signs of life of ``peer``, and for how many seconds it has been silent or lost."""
        now = self.kit.clock.now()
        life, seconds = self.kit.vitals.look(peer, now)
        if life is not Life.LIVES:
            return life, seconds
        if self.leader is not None:
            silent = self.leader.silent_s(peer, now)
            if silent:
                return Life.SILENT, silent
            return life, seconds
        unanswered_s = self.reporting.contact.silent_s(peer, now)
        if unanswered_s > ANSWER_S + self.kit.transport.patience.slack(now):
            return Life.SILENT, unanswered_s
        return life, seconds
