"""One peer's part in the epochs of a run: who leads, heartbeats, messages from other peers. Enters:
messages and time. Leaves: events for the leader (:mod:`node.coordinator.leading`) and the member
(:mod:`node.coordinator.following`) of this peer, heartbeats. Never: a decision of either; work of
the stage."""

import asyncio
import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from node.consensus.admission import Admission, Ground, Here, Refusal
from node.consensus.election import LOOK_S, Election
from node.consensus.equivocation import DoubleVote
from node.consensus.rules import ChangeStatus, Rules
from node.consensus.terms import Terms
from node.consensus.version_history import VersionHistory
from node.consensus.votes import Supporter, vote_on
from node.coordinator import notes
from node.coordinator.following import Following
from node.coordinator.kit import Kit
from node.coordinator.leading import Leading, PeerMachines
from node.coordinator.ledger import VoteLedger
from node.coordinator.messenger import Messenger
from node.coordinator.plan_inbox import PlanInbox
from node.coordinator.presence import View
from node.coordinator.recalling import Recalling
from node.coordinator.statements import Statements
from node.coordinator.vitals import MOST_LOST, Life
from node.coordinator.ways import Ways
from node.core.errors import PeerFault, Refused, WireError
from node.core.ids import ENDS, NO_CELL, CellId, PeerId, short, short_cell
from node.core.journey import Plan, Version
from node.core.tasks import Tasks
from node.epoch import events as ev
from node.epoch.leader.leader import Leader, Phase
from node.epoch.member import Member, MemberState
from node.epoch.pace import (
    ACCUSE_EVERY_S,
    BEAT_AT_MOST_S,
    CALM_AFTER_S,
    FEW_STRANGERS,
    HEARTBEAT_S,
    PROBE_TIMEOUT_S,
    REDIAL_MOST_S,
    TELL_TRIES,
    TICK_S,
    beat_s,
)
from node.epoch.waiting import Lack, Wait
from node.identity.keys import Signer
from node.stage.runtime import StageRuntime
from node.transport.port import blamed, printable
from protos import training_pb2 as pb
from protos import training_pb2_grpc as rpc

BLIND_S = 10.0
"""Seconds that a leader that cannot plan has to see nobody before it lets another peer lead."""
BLIND_FOR_S = 60.0
"""Seconds for which it lets another peer lead while it sees nobody. Then it may be alone."""
PAUSE_S = 5.0
"""Seconds between two epochs, evaluation included, after which a peer is said to wait."""
BARS = 3.0
"""Weight of a fault that bars a peer at once."""
ANSWER_S = 3.0
"""Seconds without an answer to a heartbeat after which a leader is shown as silent."""
HEARD_S = 5.0
"""Seconds for which a peer that this one heard is not shown as lost, whatever the leader says."""


class LeaderReply(NamedTuple):
    """The last reply to a heartbeat. ``waits_for``: the leader's reason for planning no epoch;
    ``lacking``: peers of the own stage to which the leader waits for ways from here, None if it
    does not say."""

    leader: PeerId | None = None
    waits_for: str = ""
    lacking: frozenset[PeerId] | None = None


class Training(rpc.TrainingServicer):
    """One peer's part in the epochs of a run.

    ``view()`` shows the peers that the directory lists as alive;
    :class:`~node.consensus.election.Election` says which of them leads. ``ledger`` keeps votes;
    None: in memory only.
    """

    def __init__(
        self,
        kit: Kit,
        identity: Signer,
        work: StageRuntime,
        view: Callable[[], View],
        machines: PeerMachines | None = None,
        ledger: VoteLedger | None = None,
    ) -> None:
        machines = machines or PeerMachines()
        self.kit = kit
        self.me = kit.me
        self.stage = kit.stage
        self.facts = kit.facts
        self.work = work
        self._view = view
        self.statements = Statements(identity, kit.facts.run_id, ledger or VoteLedger(), kit.clock)
        self.trust = self.statements.trust()
        self.standing = ChangeStatus(kit.facts.make.read(""))
        self.admission = Admission(Terms(), self.trust, self.standing, kit.facts.may_lead)
        self._inbox = PlanInbox(
            self.admission, self.statements, kit.facts.bounds, work, kit.clock, kit.journal
        )
        self.messenger = Messenger(kit.transport, kit.clock, kit.vitals, self._heartbeat_answered)
        recalling = Recalling(kit.transport, kit.journal, kit.facts.bounds, VersionHistory())
        member = machines.member(
            self.me, work.stage.version, work.local_checkpoints.versions(), work.tokens
        )
        self.following = Following(
            kit, member, work, self.admission, self.statements, recalling, self
        )
        self.leading = Leading(
            kit,
            self,
            work,
            self.trust,
            self.statements,
            self.messenger,
            recalling,
            machines,
        )
        self._ways = Ways(self, kit, work.engines.pipeline)
        self._election = Election(self.me, kit.clock.now())
        self.leaving = False
        self.started = False
        self._order: dict[PeerId, asyncio.Lock] = {}
        self._said_at = kit.clock.now()
        self._said: Any = None
        self._accused: dict[PeerId, float] = {}
        self._hurry = asyncio.Event()
        self._sees_nobody_since: float | None = None
        self._blind_until = -math.inf
        """Time until which this peer lets another one lead because it sees nobody."""
        self._known: tuple[PeerId, Version] | None = None
        """The leader that accepted our last heartbeat, and the version that it reported."""
        self._looking: set[PeerId] = set()
        """Ends peers that are called because nobody leads."""
        self._unanswered: tuple[PeerId, float] | None = None
        """Leader to which a heartbeat is on its way, and the time at which it was sent."""
        self.reply = LeaderReply()
        self.on_lead: Callable[[], None] = lambda: None
        """This peer leads or follows another leader from now on."""
        self.cell = NO_CELL
        """The cell this peer belongs to; empty in a run of one cell. Set before the start."""
        self._named: tuple[Plan | None, frozenset[PeerId]] = None, frozenset()
        """A plan, and the peers that it names."""
        self.on_cell: Callable[[CellId], None] = lambda cell: None
        """This peer belongs to another cell from now on."""
        self.on_move: Callable[[int], str] = lambda stage: "this peer does not change its stage"
        """Asks this peer to host another stage; returns "" if it will, else the reason against."""
        self.on_change: Callable[[str], None] = lambda change: None
        """A newer change is known: keep it."""
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
    def tasks(self) -> Tasks:
        """The tasks that last as long as this peer takes part."""
        return self.kit.tasks

    def start(self) -> None:
        """Begin to take part: the state in place is what this peer offers."""
        self.started = True
        self.following.place(self.statements.term(self.cell))
        self._election = Election(self.me, self.kit.clock.now())
        self.tasks.spawn(self._beat(), "heartbeat", eternal=True)
        self.tasks.spawn(self._clockwork(), "clock", eternal=True)
        if self.facts.waits.probe_every_s:
            self.tasks.spawn(self._ways.keep(), "ways", eternal=True)

    async def close(self) -> None:
        """Stop taking part at once: afterwards nothing changes the state of the stage.
        :meth:`leave` is the polite way. Messages that are being carried out have
        :data:`node.coordinator.following.CARRIED_OUT_S` to be done."""
        self.following.stop()
        self.leading.close()
        # All are cancelled before any goes on: the end of one may begin another.
        await asyncio.gather(self.tasks.close(), self.following.end_epoch())
        await self.following.carried_out()
        await asyncio.gather(self.tasks.close(), self.following.close())

    async def leave(self, reason: str) -> None:
        """Finish the epoch under way, let the next one be planned without this peer, and hand over
        the optimizer state of its parts.

        Bounded by the caller. ``reason`` is for the record.
        """
        self.kit.journal.emit("training", "leaving", f"this peer leaves: {reason}")
        self.leaving = True
        self.leading.lead(ev.Resigning(True))
        await self._say_ready()
        # A plan that counts on this peer may be on its way already.
        await asyncio.sleep(TICK_S)
        while self.following.busy or self.leader is not None:
            await asyncio.sleep(TICK_S)
            self._take_or_drop_the_lead()
        await self._say_ready()
        await self.work.handed_over()

    def stay(self) -> None:
        """Take part again: leaving was given up."""
        self.leaving = False
        self.leading.lead(ev.Resigning(False))

    # ----------------------------------------------------------- how cells average

    def change(self, text: str) -> Rules:
        """Read the owner's change to how cells average, from any sender, and return the settings in
        it. A newer change is kept, sent to the leader until a plan is made under it, and comes into
        force with the next plan. Raises Refused if the owner did not sign it for this run."""
        rules = self.facts.make.read(text)
        if self.standing.learns(rules):
            self.keep_change(rules)
            self._hurry.set()
            if self.leader is not None:
                self.leading.lead(ev.Changed(rules))
        return rules

    def keep_change(self, rules: Rules) -> None:
        """Keep a newer change and pass it on to the members of the plan in force. The peers that it
        revokes are refused at once, not only with the next plan."""
        self.on_change(rules.change)
        self.kit.transport.expel(rules.revokes)
        if rules.revoked:
            # Not only through the leader, which may be a revoked peer.
            heard = replace(self._heartbeat(), change=rules.change)
            word = notes.ready_note(heard, self._support(self.me), self.admission.untold(self.me))
            plan = self.work.plan
            if plan is None:
                return
            for member in plan.members:
                peer = member.peer
                if peer != self.me and not rules.revokes(peer):
                    # A peer that does not lead takes the change from it and refuses the rest.
                    self.tasks.spawn(self.messenger.notify(peer, word), "change")

    # ----------------------------------------------------------- who leads

    def is_established(self, peer: PeerId) -> bool:
        """Return True for a peer that this one works with, as opposed to a stranger: a colleague, a
        member of the plan in force, or one of a cell that it averages with."""
        return peer in self.work.colleagues.all or peer in self._planned()

    def has_met(self, peer: PeerId) -> bool:
        """Return True for a peer that is established or was met by one side's call. The directory
        may name others that somebody made up."""
        return self.is_established(peer) or self.kit.transport.has_met(peer)

    def reportable(self, peers: Collection[PeerId]) -> set[PeerId]:
        """Peers to tell the user about: the met ones, and strangers while they are few. Of many
        strangers most are made up."""
        strangers = {peer for peer in peers if not self.has_met(peer)}
        if len(strangers) > FEW_STRANGERS:
            return set(peers) - strangers
        return set(peers)

    def _planned(self) -> frozenset[PeerId]:
        """The peers that the plan in force names."""
        plan = self.member.plan
        if plan is not self._named[0]:
            peers = set[PeerId]()
            if plan is not None:
                peers = {m.peer for m in plan.members}
                for partner in plan.window.partners:
                    peers.add(partner.leader)
                    peers.update(h.peer for hosts in partner.hosts.values() for h in hosts)
            self._named = plan, frozenset(peers)
        return self._named[1]

    def has_reported_to(self, peer: PeerId) -> bool:
        """Return True if plans of ``peer`` may be followed here: this peer took it for its leader,
        and sent it a heartbeat, a short time ago."""
        return self._election.heeds(peer, self.kit.clock.now())

    def leader_id(self) -> PeerId | None:
        """The leader by this peer's knowledge; None if it sees no ends peer."""
        view = self._view()
        ends = {p: s for p, s in view.ends.items() if self.admission.may_lead(p)}
        plan = self.member.plan
        order: tuple[PeerId, ...] = ()
        if plan is not None:
            order = plan.electorate.voters
        known = self.work.colleagues.all
        self._election.see(ends, view.follows, self.follows, order, known)
        leads = self.leader is not None
        return self._election.leader(self.kit.clock.now(), able=self._able, leads=leads)

    @property
    def _able(self) -> bool:
        """True if this peer can lead."""
        able = self.stage == ENDS and not self.leaving and self.admission.may_lead(self.me)
        return able and self.kit.clock.now() >= self._blind_until

    def _look_around(self) -> None:
        """Let another peer lead if this one leads, cannot plan, hears others, and has seen none of
        them in the directory for :data:`BLIND_S`: its cell waits for it. Its clock may be wrong, so
        that the records of others have expired for it, and its own for them."""
        now = self.kit.clock.now()
        if self._view().everybody:
            self._blind_until = -math.inf
        elif self.leader is not None and self._holds_up(self.leader):
            if self._sees_nobody_since is None:
                self._sees_nobody_since = now
            if now - self._sees_nobody_since >= BLIND_S:
                self._blind_until = now + BLIND_FOR_S
                text = "this peer sees nobody in the directory, and lets another one lead"
                self.kit.journal.emit("training", "blind", text, "warning")
            return
        self._sees_nobody_since = None

    def _holds_up(self, leader: Leader) -> bool:
        """Return True if others wait for this leader, one of them at the ends."""
        others = {p: c for p, c in leader.roster.candidates.items() if p != self.me}
        ends = any(c.stage == ENDS for c in others.values())
        return ends and leader.phase is Phase.GATHER and leader.waiting is not None

    @property
    def follows(self) -> PeerId | None:
        """The leader of the plan in force here, or this peer if it leads."""
        if self.leader is not None:
            return self.me
        plan = self.member.plan
        if plan is None:
            return None
        return plan.leader

    def _take_or_drop_the_lead(self) -> PeerId | None:
        """Begin or stop to lead as the election says. Returns the leader."""
        self._look_around()
        leader = self.leader_id()
        leads = leader == self.me
        if leads and self.leader is None:
            self.leading.begin(self.standing.known)
            self._gather()
            self.on_lead()
        elif not leads and self.leader is not None and (not self.leaving or self.leader.idle):
            self.leading.end()
            self.kit.journal.emit("training", "follows", "another peer leads the epochs now")
            self.on_lead()
        return leader

    def _gather(self) -> None:
        """Ask the other members of the newest plan to report to this peer, which leads now. They
        may have asked it too early, or not know yet that the previous leader is gone."""
        plan = self.member.plan
        asked = set[PeerId]()
        if plan is not None:
            asked = {m.peer for m in plan.members}
        note = pb.Note(lead=pb.LeadNote(cell=self.cell))
        now = self.kit.clock.now()
        for peer in sorted(asked - {self.me}):
            if not self._election.is_silent(peer, now):
                self.tasks.spawn(self.messenger.notify(peer, note), "gather")

    async def _beat(self) -> None:
        while True:
            self._hurry.clear()
            await self._say_ready()
            self._look_for_leaders()
            await asyncio.sleep(BEAT_AT_MOST_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._beat_s() - BEAT_AT_MOST_S):
                    await self._hurry.wait()

    def _look_for_leaders(self) -> None:
        """Call the ends peers that did not answer, while no leader accepts heartbeats of this peer,
        or while it has led for a moment and cannot plan: it may have been cut off from all of them.
        Otherwise they show by a new record that they are back."""
        alone = not self._election.accepted
        if self.leader is not None:
            alone = self.leading.stuck_s(self.following.moved) >= PAUSE_S
        if alone:
            for peer in self._election.shunned():
                if peer not in self._looking:
                    self._looking.add(peer)
                    self.tasks.spawn(self._look_for(peer), f"look for {short(peer)}")

    async def _look_for(self, peer: PeerId) -> None:
        election = self._election
        try:
            async with asyncio.timeout(REDIAL_MOST_S):
                await self.kit.transport.ping(peer, REDIAL_MOST_S)
        except (PeerFault, TimeoutError):
            await asyncio.sleep(HEARTBEAT_S)
        else:
            self.kit.vitals.alive(peer, self.kit.clock.now())
            election.forgive(peer)
            self._hurry.set()
        finally:
            self._looking.discard(peer)

    def _beat_s(self) -> float:
        """Seconds until the next heartbeat: more in a swarm that waits, while this peer has nothing
        new to report."""
        m = self.member
        now = self.kit.clock.now()
        says = (
            m.at,
            m.term,
            m.reachable,
            self.work.stage.digest,
            self.leaving,
            self.leader_id(),
            self.standing.known.revision,
            self.work.windows.mean,
            self.work.anchor.name,
        )
        if says != self._said or m.busy:
            self._said = says
            self._said_at = now
        calm = now - max(self._said_at, self.following.moved) > CALM_AFTER_S
        return beat_s(self._ways.answering(), calm)

    async def _say_ready(self) -> None:
        asked: set[PeerId] = set()
        while (leader := self._take_or_drop_the_lead()) is not None and leader not in asked:
            asked.add(leader)
            # One message to a leader at a time: an old heartbeat must not arrive after the news of
            # a commit.
            election = self._election
            async with self._order.setdefault(leader, asyncio.Lock()):
                # A peer that has entered another cell meanwhile does not report to this leader.
                if election is not self._election:
                    return
                # The message before this one may have found that the leader does not answer.
                silent = election.is_silent(leader, self.kit.clock.now())
                if not silent and await self._say_ready_to(leader):
                    return

    async def _say_ready_to(self, leader: PeerId) -> bool:
        """Send a heartbeat. Return False if ``leader`` does not answer or does not lead, so that
        another peer may be the leader."""
        heard = self._heartbeat(leader)
        # This peer may enter another cell, with a new election, before the heartbeat is answered.
        election = self._election
        if leader == self.me:
            self._report_here(heard)
            return True
        election.tells(leader, self.kit.clock.now())
        self._unanswered = leader, self.kit.clock.now()
        try:
            doubles = self.admission.untold(leader)
            note = notes.ready_note(heard, self._support(leader), doubles)
            refused = await self._word_to_leader(leader, note)
        except PeerFault:
            return False
        finally:
            self._unanswered = None
        if refused is not None:
            election.doubt(leader, self.kit.clock.now())
            return False
        election.answered(leader, self.kit.clock.now())
        self._known = leader, heard.at
        return True

    def _report_here(self, heard: ev.Heartbeat) -> None:
        """Give this peer's heartbeat to its own leader."""
        self.leading.supported(self._support(self.me))
        self.leading.lead(heard)

    def _support(self, leader: PeerId) -> Supporter:
        """This peer's signed support for ``leader``."""
        return self.statements.support(self.cell, leader, self.member.term)

    async def _word_to_leader(self, leader: PeerId, note: pb.Note) -> str | None:
        """Send a note with a retry. A leader that does not answer is not taken for the leader for
        a while. Raises PeerFault."""
        election = self._election
        try:
            return await self.messenger.send_with_retry(leader, note, 2 * PROBE_TIMEOUT_S)
        except PeerFault as e:
            election.shun(leader, self.kit.clock.now())
            self._hurry.set()
            self.kit.journal.emit(
                "training",
                "leader-silent",
                f"leader {short(leader)}: {e.reason}",
                "warning",
                peer=leader,
            )
            raise

    def _heartbeat(self, leader: PeerId | None = None) -> ev.Heartbeat:
        """This peer's heartbeat to ``leader``, or to itself if None."""
        m = self.member
        return ev.Heartbeat(
            self.me,
            self.stage,
            m.at,
            self.work.stage.digest,
            self.work.speed(),
            m.reachable,
            m.term,
            # A peer that went back to an older version may remember more tokens than that history
            # can have counted.
            self.facts.bounds.counted(m.at.epoch, m.tokens),
            self.leaving,
            tuple(sorted(self.work.engines.pipeline.timing.rates().items())),
            self.work.room,
            self.work.costs(),
            self.standing.tells(leader or self.me),
            self.work.windows.mean,
            m.orphan,
            self.work.anchor.name,
            self.cell,
        )

    # ----------------------------------------------------------- equivocation

    def _learn(self, doubles: Sequence[DoubleVote]) -> None:
        """Keep proofs of double votes. Raises WireError if one proves nothing."""
        if not all([self.trust.doubles.shown(d) for d in doubles]):
            raise WireError("two votes that do not prove that their peer has voted twice")
        self._bar()

    def _bar(self) -> bool:
        """Refuse for a while the peers that were newly found to have voted twice; their votes no
        longer count. Return True if there are any."""
        found = self.trust.doubles.news()
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
            if d.peer != self.me:
                self.kit.transport.fault(d.peer, "voted for two results of one attempt", BARS)
        if found:
            self._hurry.set()
        return bool(found)

    async def _clockwork(self) -> None:
        patience = self.kit.transport.patience
        while True:
            due = self.kit.clock.now() + TICK_S
            await asyncio.sleep(TICK_S)
            now = self.kit.clock.now()
            patience.woke(due, now)
            self.work.mind_the_disk()
            if now - due > self.facts.waits.late_s:
                self._stood_still(now - due)
            if self.leader is not None:
                self.leading.lead(
                    ev.ClockTick(self._view().coming, self.work.colleagues.all, patience.slack(now))
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
        self.on_lead()
        self._hurry.set()

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
            if self.facts.prove:
                reply.lacking.peers.extend(self.leader.roster.lacking(peer))
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
                if why := self.facts.bounds.of_round(event):
                    raise WireError(f"invalid round: {why}")
                plan = self.member.plan
                heeded = self._election.heeds(peer, self.kit.clock.now())
                if plan is None or plan.leader != peer and not heeded:
                    return "only the plan's leader opens its rounds"
                return await self.following.told(event)
            case "dead":
                return self.hear_of_dead(peer, note.dead)
            case "move":
                plan = self.member.plan
                # The peer that leads may have made no plan yet: then it is the leader by election.
                if peer not in (plan and plan.leader, self.leader_id()):
                    return "only the leader asks for a change of stage"
                return self.on_move(note.move.stage) or None
            case "lead" if note.lead.cell != self.cell:
                return "this peer is in another cell"
            case "lead":
                self._election.says(peer, self.kit.clock.now())
                self._hurry.set()
                if peer != self.leader_id():
                    return "this peer follows another leader"
                return None
            case "ready":
                pass
            case _ if self.leader is None:
                return "this peer does not lead"
            case "finished":
                if why := self.facts.bounds.of_results(len(note.finished.results)):
                    raise WireError(f"invalid results: {why}")
        event = notes.leader_event(note, peer)
        support = notes.parse_support(note.ready, peer)
        doubles = notes.parse_doubles(note.ready.doubles)
        if isinstance(event, ev.Heartbeat):
            self.kit.vitals.leaves(peer, event.leaving)
        if isinstance(event, ev.Heartbeat) and event.change:
            try:
                self.change(event.change)
            except Refused as e:
                raise WireError(e.what) from e
        if isinstance(event, ev.Heartbeat) and event.cell not in (NO_CELL, self.cell):
            return "this peer is in another cell"
        if self.leader is None and isinstance(event, ev.Heartbeat):
            self._claimed(peer)
        if self.leader is None:
            return "this peer does not lead"
        if isinstance(event, ev.Heartbeat) and (why := self.facts.bounds.of_heard(event)):
            raise WireError(f"invalid stage or version: {why}")
        if isinstance(event, ev.Heartbeat):
            self._learn(doubles)
            if support is not None:
                self.leading.supported(support)
        if isinstance(event, ev.Committed) and not self._counts(event, note.committed.vote):
            return "this peer has voted for two results of one attempt"
        self.leading.lead(event)
        return None

    def _counts(self, e: ev.Committed, signature: bytes) -> bool:
        """Check a member's vote, and keep it if it is one on the epoch under way. Return False if
        the member has voted twice. Raises WireError if the signature is wrong."""
        leader = self.leader
        about = leader.votes_on(e) if leader is not None else None
        member = about[0].member(e.peer) if about is not None else None
        if about is None or member is None:
            return True
        vote = vote_on(*about, e.attempt, member.stage, e.digest)
        if e.peer == self.me:  # signed here just now, or not at all
            self.leading.tally.cast(e.peer, vote, signature)
            return True
        if not self.trust.vote_is_signed(vote, e.peer, signature):
            raise WireError("a vote whose signature is wrong")
        self.trust.doubles.saw(vote, e.peer, signature)
        if self._bar():
            return False
        self.leading.tally.cast(e.peer, vote, signature)
        return True

    def _claimed(self, peer: PeerId) -> None:
        """``peer`` takes this peer, which does not lead, for the leader. If most voters do, the
        leader of the plan in force is gone, even if this peer's connection to it stands."""
        now = self.kit.clock.now()
        leader = self.leader_id()
        plan = self.member.plan
        most = self._election.claims(peer, now)
        if most and self._able and plan is not None and plan.leader == leader:
            self._election.shun(plan.leader, now)
            self._take_or_drop_the_lead()
        self._hurry.set()

    async def _hear_plan(self, peer: PeerId, note: pb.PlanNote) -> str | None:
        # A leader knows us because we took it for the leader and sent it a heartbeat.
        heeded = self._election.heeds(peer, self.kit.clock.now())
        try:
            found = await self._inbox.receive(peer, note, heeded, self._here)
        finally:
            self._bar()
        if isinstance(found, Refusal):
            if found.ground in (Ground.OUTDATED, Ground.UNSUPPORTED):
                self._hurry.set()
            return found.reason
        self._election.forgive(peer)
        return await self.following.told(ev.PlanArrived(found))

    def _here(self) -> Here:
        """This peer, as the receiver of a plan."""
        m = self.member
        follows = None
        if m.plan is not None:
            follows = m.plan.leader
        committed = follows is not None and m.state is MemberState.DONE
        clock = self.kit.clock
        return Here(self.cell, m.at, follows, committed, self._known, clock.now(), clock.wall())

    async def History(self, request: pb.HistoryRequest, context: Any) -> pb.HistoryReply:
        """Answer with the plan that this peer remembers behind a version."""
        peer = self.kit.transport.caller(context)
        async with blamed(self.kit.transport, peer, context):
            remembered = self.member.remembers(notes.parse_version(request.version))
            return notes.history_reply(
                *remembered, self.following.past.versions, self.trust.certificate
            )

    def hear_of_dead(self, peer: PeerId, note: pb.DeadNote) -> str | None:
        """The leader has found members dead. Returns a reason if ``peer`` does not lead here."""
        plan = self.member.plan
        if plan is None or plan.leader != peer or plan.hash != note.plan_hash:
            return "not the leader of the plan in force here"
        dead = {PeerId(p) for p in note.dead} - {self.me}
        self._count_dead(dead)
        self.work.lost(dead)
        return None

    def _count_dead(self, peers: Iterable[PeerId], since: float | None = None) -> None:
        """Show ``peers``, which another peer reported dead, as dead unless they were heard after
        ``since``. Peers that are neither members of the plan nor in sight are ignored."""
        plan = self.work.plan
        members = set[PeerId]()
        if plan is not None:
            members = {m.peer for m in plan.members}
        now = self.kit.clock.now()
        for peer in (members | self._view().hosts.keys()) & set(peers) - {self.me}:
            self.kit.vitals.dead(peer, now, since)

    def _heartbeat_answered(self, peer: PeerId, reply: pb.NoteReply) -> None:
        """``peer`` replied to a heartbeat."""
        lacking: frozenset[PeerId] | None = None
        if reply.HasField("lacking"):
            lacking = frozenset(map(PeerId, reply.lacking.peers))
        self.reply = LeaderReply(peer, printable(reply.waits_for), lacking)
        lost = [PeerId(p) for p in reply.lost[:MOST_LOST]]
        self._count_dead(lost, self.kit.clock.now() - HEARD_S)

    async def tell_leader(self, plan: Plan, note: pb.Note) -> None:
        """Send a note that the leader of this plan must hear. It is given up if the leader does not
        answer, or no longer leads by this peer's knowledge."""
        for _ in range(TELL_TRIES):
            async with self._order.setdefault(plan.leader, asyncio.Lock()):
                if plan.leader == self.me:
                    event = notes.leader_event(note, self.me)
                    if isinstance(event, ev.Committed):
                        self._counts(event, note.committed.vote)
                    self.leading.lead(event)
                    return
                if self._election.is_silent(plan.leader, self.kit.clock.now()):
                    return
                with contextlib.suppress(PeerFault):
                    await self._word_to_leader(plan.leader, note)
                    return
            if self.leader_id() != plan.leader:
                return
            await asyncio.sleep(TICK_S)

    def lost(self, peer: PeerId) -> None:
        """The connection to ``peer`` broke."""
        self.messenger.lost(peer)
        self.accuse(peer)

    def accuse(self, peer: PeerId) -> None:
        """An engine could not get an answer from ``peer``: let the leader find out whether it is
        dead."""
        plan = self.member.plan
        now = self.kit.clock.now()
        if plan is None or now - self._accused.get(peer, -1e9) < ACCUSE_EVERY_S:
            return
        self._accused[peer] = now
        if peer == self.leader_id():
            self._hurry.set()  # nobody else can be told: the next heartbeat shows whether it lives
            return
        self.tasks.spawn(
            self.tell_leader(
                plan,
                pb.Note(epoch=plan.epoch, term=plan.term, fault=pb.FaultNote(about=peer)),
            ),
            "accuse",
        )

    # ----------------------------------------------------------- this peer, for its parts

    async def happens(self, event: Any) -> str | None:
        """Feed the member. Returns the reason of a refusal, or None."""
        return await self.following.happens(event)

    def leader_changed(self) -> None:
        """This peer follows another leader than before: its record names the leader."""
        self.on_lead()

    def version_changed(self) -> None:
        """Another version is in place than the leader knows: report it at once."""
        self._hurry.set()
        if self.leader is not None:
            self._report_here(self._heartbeat())

    def hosts(self) -> Mapping[PeerId, int]:
        """Peers that the directory lists, with their stages."""
        return self._view().hosts

    def needed_ways(self, leader: PeerId) -> frozenset[PeerId] | None:
        """The peers of the own stage to which ``leader`` waits for ways from here; None if it does
        not say. Raises LookupError before it has answered."""
        if self.reply.leader != leader:
            raise LookupError(f"{leader} has not answered")
        return self.reply.lacking

    def way_found(self) -> None:
        """A peer was reached for the first time: the leader hears of it at once."""
        self._hurry.set()

    def entered(self, plan: Plan) -> None:
        """This peer now belongs to the cell that ``plan`` founds. The cell has no leader yet: its
        first ends peer counts as leader until it turns out to be dead."""
        able = [m.peer for m in plan.stage(ENDS) if self.admission.may_lead(m.peer)]
        now = self.kit.clock.now()
        first = min(able, default=self.me)
        self.cell = plan.cell_id
        self.leading.end()
        self.trust.forget()
        self._election = Election(self.me, now - LOOK_S)
        if first != self.me:
            self._election.answered(first, now)
        self.kit.journal.emit(
            "training",
            "cell-entered",
            f"belongs to cell {short_cell(plan.cell_id)} from epoch {plan.epoch} on, with "
            f"{len(plan.members) - 1} other peers",
            cell=plan.cell_id,
            epoch=plan.epoch,
        )
        self.on_cell(plan.cell_id)
        self._hurry.set()

    # ----------------------------------------------------------- for people

    def unproven(self) -> list[PeerId]:
        """Peers of the run that do not answer this one, on any way."""
        silent = self.work.engines.pipeline.timing.silent()
        return sorted(self.reportable(silent & self._view().hosts.keys() - {self.me}))

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
        done = self.work.rounds.deadline_s / 2 if state is MemberState.DONE else 0.0
        if self.kit.clock.now() - self.following.moved < max(PAUSE_S, done):
            return None
        if self.leader is not None:
            if self.leader.phase is not Phase.GATHER:
                return None
            return self.leader.waiting
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
        asked = self._unanswered
        life, seconds = self.kit.vitals.look(peer, now)
        if life is not Life.LIVES:
            return life, seconds
        if self.leader is not None:
            silent = self.leader.silent_s(peer, now)
            if silent:
                return Life.SILENT, silent
            return life, seconds
        late_s = ANSWER_S + self.kit.transport.patience.slack(now)
        if asked is not None and asked[0] == peer and now - asked[1] > late_s:
            return Life.SILENT, now - asked[1]
        return life, seconds
