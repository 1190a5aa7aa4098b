"""The messages of the epoch: election, notes between peers, signs of life. Feeds the member and
carries out its actions, as :class:`~node.coordinator.leading.LeaderService` does for the leader.
The work itself (pipeline, round, optimizer, state) is done by
:class:`~node.stage.runtime.StageRuntime`."""

import asyncio
import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from node.consensus.election import LOOK_S, Election
from node.consensus.rules import ChangeStatus, Rules
from node.consensus.votes import (
    DoubleVote,
    Supporter,
    Trust,
    Vote,
    names,
    signing_domain,
    support_said,
)
from node.coordinator import notes
from node.coordinator.ledger import VoteLedger
from node.coordinator.presence import View
from node.coordinator.version_history import VersionHistory
from node.coordinator.vitals import MOST_LOST, Life, Vitals
from node.core.clock import Clock
from node.core.errors import PeerFault, Refused, WireError
from node.core.ids import ENDS, NO_CELL, CellId, PeerId, short, short_cell
from node.core.journey import Plan, Version
from node.core.tasks import Tasks
from node.epoch import events as ev
from node.epoch.bounds import Terms
from node.epoch.facts import RunFacts
from node.epoch.leader.conduct import Record
from node.epoch.leader.leader import Leader, Phase
from node.epoch.member import Member, MemberState
from node.epoch.pace import (
    ACCUSE_EVERY_S,
    BEAT_AT_MOST_S,
    CALM_AFTER_S,
    COMPANY,
    FACING,
    FEW_STRANGERS,
    HEARTBEAT_S,
    LARGE_STAGE,
    PROBE_AGAIN_S,
    PROBE_FAILED_S,
    PROBE_TIMEOUT_S,
    REDIAL_MOST_S,
    REDIAL_TIMEOUT_S,
    SPARE_WAY_S,
    STANDS_S,
    TELL_TRIES,
    TICK_S,
    WAY_TIMEOUT_S,
    WAYS_AT_ONCE,
    StrangerTurns,
    beat_s,
    facing,
    whom_to_measure,
)
from node.epoch.waiting import Lack, Wait
from node.identity.faults import TokenBucket
from node.identity.keys import Signer, is_signed
from node.pipeline.events import MicroBatchDone
from node.stage.runtime import StageRuntime
from node.telemetry.events import Journal
from node.transport.port import TransportPort, answers, blamed, printable
from node.wire.limits import RESULTS
from protos import training_pb2 as pb
from protos import training_pb2_grpc as rpc

BROKEN_S = 60.0
"""Seconds after which a broken connection no longer suggests that its peer is dead."""
BLIND_S = 10.0
"""Seconds that a leader that cannot plan has to see nobody before it lets another peer lead."""
BLIND_FOR_S = 60.0
"""Seconds for which it lets another peer lead while it sees nobody. Then it may be alone."""
SUPPORT_S = 30.0
"""Seconds after which a statement of support is signed anew."""
CARRIED_OUT = ("plan", "round")
"""Messages that are carried out before they are answered; all others are answered at once."""
CARRIED_OUT_S = 5.0
"""Seconds that a stopping peer gives to a message that is being carried out."""
PAUSE_S = 5.0
"""Seconds between two epochs, evaluation included, after which a peer is said to wait."""
BARS = 3.0
"""Weight of a fault that bars a peer at once."""
ANSWER_S = 3.0
"""Seconds without an answer to a heartbeat after which a leader is shown as silent."""
HEARD_S = 5.0
"""Seconds for which a peer that this one heard is not shown as lost, whatever the leader says."""
SAY_AGAIN_S = 60.0
"""Seconds between two reports of plans that are not followed."""
LARGE_PLAN = 256 << 10
"""Bytes from which a plan is parsed and checked beside the event loop."""

R = TypeVar("R")


class Unheard(PeerFault):
    """No answer from a peer, not even over a new connection; the attempt began at ``since`` of the
    own clock."""

    def __init__(self, fault: PeerFault, since: float) -> None:
        super().__init__(fault.peer, fault.reason, fault.weight)
        self.since = since


class Training(rpc.TrainingServicer):
    """One peer's part in the epochs of a run.

    ``view()`` shows the peers that the directory lists as alive;
    :class:`~node.consensus.election.Election` says which of them leads.
    """

    def __init__(
        self,
        identity: Signer,
        stage: int,
        facts: RunFacts,
        transport: TransportPort,
        work: StageRuntime,
        view: Callable[[], View],
        clock: Clock,
        journal: Journal,
        on_error: Callable[[str, BaseException], None] | None = None,
        *,
        member: Callable[..., Member] = Member,
        leader: Callable[..., Leader] = Leader,
        ledger: VoteLedger | None = None,
        vitals: Vitals | None = None,
    ) -> None:
        self.vitals = vitals if vitals is not None else Vitals()
        self.identity = identity
        self.me = identity.peer_id
        self.stage = stage
        self.facts = facts
        self.transport = transport
        self.work = work
        self._view = view
        self.clock = clock
        self.journal = journal
        self._make_leader = leader
        self.member = member(
            self.me, work.stage.version, work.local_checkpoints.versions(), work.tokens
        )
        self._ledger = ledger or VoteLedger()
        self.trust = Trust(facts.run_id, partial(is_signed, identity))
        self._leader_knows: tuple[PeerId | None, frozenset[PeerId]] = None, frozenset()
        """A leader, and the peers that its last plan proved to have voted twice."""
        self._said_refused = float("-inf")
        self._parsing = asyncio.Lock()
        self._support: dict[tuple[CellId, PeerId, int], Supporter] = {}
        """The support signed last, by cell, leader and term."""
        self._conduct: Mapping[PeerId, Record] = {}
        """Records of the members from when this peer led last."""
        self.past = VersionHistory(transport, journal, facts.bounds)
        self.terms = Terms()
        self._election = Election(self.me, clock.now())
        self.leader: Leader | None = None
        self.leaving = False
        self.started = False
        self._closed = False
        self.tasks, self._epoch_tasks, self._hearing = (
            Tasks("training", on_error) for _ in range(3)
        )
        self._member_lock = asyncio.Lock()
        self._order: dict[PeerId, asyncio.Lock] = {}
        self._moved = self._said_at = clock.now()
        self._said: Any = None
        self._accused: dict[PeerId, float] = {}
        self._hurry = asyncio.Event()
        self._led_since = clock.now()
        """Time at which this peer last began to lead."""
        self._sees_nobody_since: float | None = None
        self._blind_until = -math.inf
        """Time until which this peer lets another one lead because it sees nobody."""
        self._known: tuple[PeerId, Version] | None = None
        """The leader that accepted our last heartbeat, and the version that it reported."""
        self._broken: dict[PeerId, float] = {}
        """Time of the break, for each broken connection to a peer that has not answered since."""
        self._looking: set[PeerId] = set()
        """Ends peers that are called because nobody leads."""
        self._unanswered: tuple[PeerId, float] | None = None
        """Leader to which a heartbeat is on its way, and the time at which it was sent."""
        self.leader_waits: tuple[PeerId | None, str] = None, ""
        self._lacking: frozenset[PeerId] | None = None
        """The peers of the own stage to which the leader that answered last waits for ways from
        here; None if it does not say."""
        """The peer that answered the last heartbeat, and its reason for planning no epoch."""
        self.standing = ChangeStatus(facts.make.read(""))
        self.lead: Callable[[Any], None] = lambda event: None
        """Feeds the leader, if this peer leads."""
        self.finished = asyncio.Event()
        self.on_plan: Callable[[Plan], None] = lambda plan: None
        self.on_lead: Callable[[], None] = lambda: None
        self.cell = NO_CELL
        """The cell this peer belongs to; empty in a run of one cell. Set before the start."""
        self._named: tuple[Plan | None, frozenset[PeerId]] = None, frozenset()
        """A plan, and the peers that it names."""
        self.on_cell: Callable[[CellId], None] = lambda cell: None
        """This peer belongs to another cell from now on."""
        self.on_partners: Callable[[Plan], None] = lambda plan: None
        """A plan names partners of the cell, with the addresses of their hosts."""
        self.on_move: Callable[[int], str] = lambda stage: "this peer does not change its stage"
        """Asks this peer to host another stage; returns "" if it will, else the reason against."""
        self.on_change: Callable[[str], None] = lambda change: None
        """A newer change is known: keep it."""
        rpc.add_TrainingServicer_to_server(self, transport.server)

    def start(self) -> None:
        """Begin to take part: the state in place is what this peer offers."""
        self.started = True
        self._place(self._ledger.term(self.cell))
        self._election = Election(self.me, self.clock.now())
        self.tasks.spawn(self._beat(), "heartbeat", eternal=True)
        self.tasks.spawn(self._clockwork(), "clock", eternal=True)
        if self.facts.waits.probe_every_s:
            self.tasks.spawn(self._measure_ways(), "ways", eternal=True)

    async def _measure_ways(self) -> None:
        """Send a small message to other peers of the run, to new ones at once: a plan uses no pair
        of peers before both got an answer. Strangers have turns of their own, for anybody may write
        their records."""
        timing = self.work.engines.pipeline.timing
        measuring: set[PeerId] = set()
        turns = StrangerTurns()
        spare = TokenBucket(1.0 / SPARE_WAY_S, 1.0)
        strangers: set[PeerId] = set()
        chosen: list[PeerId] = []
        company: dict[PeerId, int] = {}
        seen: tuple[Mapping[PeerId, int], PeerId | None] | None = None

        async def measure(peer: PeerId) -> None:
            try:
                known = peer in timing.ways(self.clock.now())
                async with asyncio.timeout(WAY_TIMEOUT_S):
                    timing.probed(
                        peer, await self.transport.ping(peer, WAY_TIMEOUT_S), self.clock.now()
                    )
                self.vitals.alive(peer, self.clock.now())
                if not known and self._company() <= COMPANY:
                    self._hurry.set()  # the leader plans with ways that are proven
            except (PeerFault, TimeoutError):
                timing.unanswered(peer, self.clock.now())
                self.vitals.doubt(peer, self.clock.now())
            finally:
                measuring.discard(peer)

        while True:
            await asyncio.sleep(self.facts.waits.probe_every_s)
            now = self.clock.now()
            hosts = self._view().hosts
            about = (hosts, self.leader_id())
            if about != seen:
                strangers = set(hosts)
            met = {peer for peer in strangers if self.has_met(peer)}
            if about != seen or met:
                seen = about
                strangers -= met
                company = {peer: at for peer, at in hosts.items() if peer not in strangers}
                chosen = whom_to_measure(self.me, self.stage, company, self.leader_id())
            timing.keep({*chosen, *measuring})
            free = [peer for peer in chosen if peer not in measuring]
            known = timing.ways(now).keys()
            waits = self._spare_ways(company) - known
            asked = timing.due(free, now, PROBE_AGAIN_S, PROBE_FAILED_S)
            due = [p for p in asked if p not in waits][: WAYS_AT_ONCE - len(measuring)]
            slots = WAYS_AT_ONCE - len(measuring) - len(due)
            due += turns.next(strangers, measuring, slots, now)
            later = [p for p in asked if p in waits]
            if later and len(measuring) + len(due) < WAYS_AT_ONCE and spare.allow(self.me, now):
                due.append(later[0])
            for peer in due:
                measuring.add(peer)
                self.tasks.spawn(measure(peer), f"way {short(peer)}")

    def _spare_ways(self, company: Mapping[PeerId, int]) -> set[PeerId]:
        """Peers of large stages to which a way can be found later: the leader does not wait for
        it, and the peer is none of those of another stage that this one faces. ``company``: met
        peers with their stages."""
        leader = self.leader_id()
        if leader == self.me:
            return set()
        stages: dict[int, list[PeerId]] = {}
        for peer, stage in sorted({**company, self.me: self.stage}.items()):
            stages.setdefault(stage, []).append(peer)
        mates = stages[self.stage]
        spare = set[PeerId]()
        for stage, peers in stages.items():
            if len(peers) > LARGE_STAGE:
                spare |= set(peers)
                if stage != self.stage:
                    spare -= set(facing(self.me, mates, peers, FACING))
        # Until a leader has answered, nobody knows which ways it waits for.
        if leader is not None and self.leader_waits[0] == leader:
            if self._lacking is None:
                return set()
            spare -= self._lacking
        return spare - {leader}

    async def close(self) -> None:
        """Stop taking part at once: afterwards nothing changes the state of the stage.
        :meth:`leave` is the polite way. Messages that are being carried out have
        :data:`CARRIED_OUT_S` to be done."""
        self._closed = True
        # From now on a broken connection is no news to a leader that stops.
        self.lead = lambda event: None
        # All are cancelled before any goes on: the end of one may begin another.
        await asyncio.gather(self.tasks.close(), self._epoch_tasks.close())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CARRIED_OUT_S):
                async with self._member_lock:
                    pass
        await asyncio.gather(self.tasks.close(), self._epoch_tasks.close(), self._hearing.close())

    async def leave(self, reason: str) -> None:
        """Finish the epoch under way, let the next one be planned without this peer, and hand over
        the optimizer state of its parts.

        Bounded by the caller. ``reason`` is for the record.
        """
        self.journal.emit("training", "leaving", f"this peer leaves: {reason}")
        self.leaving = True
        self.lead(ev.Resigning(True))
        await self._say_ready()
        # A plan that counts on this peer may be on its way already.
        await asyncio.sleep(TICK_S)
        while self.member.busy or self._member_lock.locked() or self.leader is not None:
            await asyncio.sleep(TICK_S)
            self._take_or_drop_the_lead()
        await self._say_ready()
        await self.work.handed_over()

    def stay(self) -> None:
        """Take part again: leaving was given up."""
        self.leaving = False
        self.lead(ev.Resigning(False))

    # ----------------------------------------------------------- how cells average

    def change(self, text: str) -> Rules:
        """Read the owner's change to how cells average, from any sender, and return the settings in
        it. A newer change is kept, sent to the leader until a plan is made under it, and comes into
        force with the next plan. Raises Refused if the owner did not sign it for this run."""
        rules = self.facts.make.read(text)
        if self.standing.learns(rules):
            self._keep_change(rules)
            self._hurry.set()
            if self.leader is not None:
                self.lead(ev.Changed(rules))
        return rules

    def _keep_change(self, rules: Rules) -> None:
        """Keep a newer change and pass it on to the members of the plan in force. The peers that it
        revokes are refused at once, not only with the next plan."""
        self.on_change(rules.change)
        self.transport.expel(rules.revokes)
        if rules.revoked:
            # Not only through the leader, which may be a revoked peer.
            word = notes.ready_note(replace(self._heartbeat(), change=rules.change))
            plan = self.work.plan
            if plan is None:
                return
            for member in plan.members:
                peer = member.peer
                if peer != self.me and not rules.revokes(peer):
                    # A peer that does not lead takes the change from it and refuses the rest.
                    self.tasks.spawn(self.inform(peer, word), "change")

    # ----------------------------------------------------------- who leads

    def is_established(self, peer: PeerId) -> bool:
        """Return True for a peer that this one works with, as opposed to a stranger: a colleague, a
        member of the plan in force, or one of a cell that it averages with."""
        return peer in self.work.colleagues.all or peer in self._planned()

    def has_met(self, peer: PeerId) -> bool:
        """Return True for a peer that is established or was met by one side's call. The directory
        may name others that somebody made up."""
        return self.is_established(peer) or self.transport.has_met(peer)

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
        return self._election.heeds(peer, self.clock.now())

    def leader_id(self) -> PeerId | None:
        """The leader by this peer's knowledge; None if it sees no ends peer."""
        view = self._view()
        ends = {p: s for p, s in view.ends.items() if self._may_lead(p)}
        plan = self.member.plan
        order: tuple[PeerId, ...] = ()
        if plan is not None:
            order = plan.electorate.voters
        known = self.work.colleagues.all
        self._election.see(ends, view.follows, self.following, order, known)
        leads = self.leader is not None
        return self._election.leader(self.clock.now(), able=self._able, leads=leads)

    @property
    def _able(self) -> bool:
        """True if this peer can lead."""
        able = self.stage == ENDS and not self.leaving and self._may_lead(self.me)
        return able and self.clock.now() >= self._blind_until

    def _look_around(self) -> None:
        """Let another peer lead if this one leads, cannot plan, hears others, and has seen none of
        them in the directory for :data:`BLIND_S`: its cell waits for it. Its clock may be wrong, so
        that the records of others have expired for it, and its own for them."""
        now = self.clock.now()
        if self._view().everybody:
            self._blind_until = -math.inf
        elif self.leader is not None and self._holds_up(self.leader):
            if self._sees_nobody_since is None:
                self._sees_nobody_since = now
            if now - self._sees_nobody_since >= BLIND_S:
                self._blind_until = now + BLIND_FOR_S
                text = "this peer sees nobody in the directory, and lets another one lead"
                self.journal.emit("training", "blind", text, "warning")
            return
        self._sees_nobody_since = None

    def _holds_up(self, leader: Leader) -> bool:
        """Return True if others wait for this leader, one of them at the ends."""
        others = {p: c for p, c in leader.roster.candidates.items() if p != self.me}
        ends = any(c.stage == ENDS for c in others.values())
        return ends and leader.phase is Phase.GATHER and leader.waiting is not None

    def _may_lead(self, peer: PeerId) -> bool:
        return (
            peer not in self.trust.doubles
            and not self.standing.known.revokes(peer)
            and self.facts.may_lead(peer)
        )

    @property
    def following(self) -> PeerId | None:
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
            m = self.member
            self.leader = self._make_leader(
                self.me,
                self.facts,
                term=m.term,
                history=m.plan,
                dropped=m.dropped,
                rules=self.standing.known,
                known=self.work.colleagues.all,
                cell=self.cell,
                conduct=self._conduct,
            )
            self.journal.emit("training", "leading", "this peer leads the epochs", term=m.term)
            self._led_since = self.clock.now()
            self._gather()
            self.on_lead()
        elif not leads and self.leader is not None and (not self.leaving or self.leader.idle):
            self._stop_leading()
            self.journal.emit("training", "follows", "another peer leads the epochs now")
            self.on_lead()
        return leader

    def _stop_leading(self) -> None:
        if self.leader is not None:
            self._conduct = self.leader.conduct.records
        self.leader = None

    def _gather(self) -> None:
        """Ask the other members of the newest plan to report to this peer, which leads now. They
        may have asked it too early, or not know yet that the previous leader is gone."""
        plan = self.member.plan
        asked = set[PeerId]()
        if plan is not None:
            asked = {m.peer for m in plan.members}
        note = pb.Note(lead=pb.LeadNote(cell=self.cell))
        now = self.clock.now()
        for peer in sorted(asked - {self.me}):
            if not self._election.is_silent(peer, now):
                self.tasks.spawn(self.inform(peer, note), "gather")

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
        if self.leader is None:
            alone = not self._election.accepted
        else:
            waits = self.clock.now() - max(self._moved, self._led_since) >= PAUSE_S
            alone = waits and self.leader.phase is Phase.GATHER
        if alone:
            for peer in self._election.shunned():
                if peer not in self._looking:
                    self._looking.add(peer)
                    self.tasks.spawn(self._look_for(peer), f"look for {short(peer)}")

    async def _look_for(self, peer: PeerId) -> None:
        election = self._election
        try:
            async with asyncio.timeout(REDIAL_MOST_S):
                await self.transport.ping(peer, REDIAL_MOST_S)
        except (PeerFault, TimeoutError):
            await asyncio.sleep(HEARTBEAT_S)
        else:
            self.vitals.alive(peer, self.clock.now())
            election.forgive(peer)
            self._hurry.set()
        finally:
            self._looking.discard(peer)

    def _beat_s(self) -> float:
        """Seconds until the next heartbeat: more in a swarm that waits, while this peer has nothing
        new to report."""
        m = self.member
        now = self.clock.now()
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
        calm = now - max(self._said_at, self._moved) > CALM_AFTER_S
        return beat_s(self._company(), calm)

    def _company(self) -> int:
        """Number of peers that answered lately. The directory may name many that strangers made
        up."""
        return len(self.work.engines.pipeline.timing.ways(self.clock.now()))

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
                silent = election.is_silent(leader, self.clock.now())
                if not silent and await self._say_ready_to(leader):
                    return

    async def _say_ready_to(self, leader: PeerId) -> bool:
        """Send a heartbeat. Return False if ``leader`` does not answer or does not lead, so that
        another peer may be the leader."""
        heard = self._heartbeat(leader)
        # This peer may enter another cell, with a new election, before the heartbeat is answered.
        election = self._election
        if leader == self.me:
            self.lead(heard)
            return True
        election.tells(leader, self.clock.now())
        self._unanswered = leader, self.clock.now()
        try:
            refused = await self._word_to_leader(leader, notes.ready_note(heard))
        except PeerFault:
            return False
        finally:
            self._unanswered = None
        if refused is not None:
            election.doubt(leader, self.clock.now())
            return False
        election.answered(leader, self.clock.now())
        self._known = leader, heard.at
        return True

    async def _word_to_leader(self, leader: PeerId, note: pb.Note) -> str | None:
        """Send as :meth:`word` does. A leader that does not answer is not taken for the leader for
        a while. Raises PeerFault."""
        election = self._election
        try:
            return await self.word(leader, note, 2 * PROBE_TIMEOUT_S)
        except PeerFault as e:
            election.shun(leader, self.clock.now())
            self._hurry.set()
            self.journal.emit(
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
            self.support(leader or self.me),
            self._doubles_for(leader or self.me),
            self.cell,
        )

    # ----------------------------------------------------------- signed statements

    def support(self, leader: PeerId) -> Supporter:
        """This peer's signed support for ``leader``, signed anew after :data:`SUPPORT_S`
        seconds."""
        wall = max(0, int(self.clock.wall()))
        about = (self.cell, leader, self.member.term)
        signed = self._support.get(about)
        if signed is None or not 0 <= wall - signed.at < SUPPORT_S:
            said = support_said(*about, wall)
            signature = self.identity.sign(said, signing_domain("support", self.facts.run_id))
            signed = Supporter(self.me, self.member.term, wall, signature)
            self._support = {about: signed}
        return signed

    def _doubles_for(self, leader: PeerId) -> tuple[DoubleVote, ...]:
        """Proofs of double votes that the last plan of ``leader`` did not carry."""
        knows = frozenset[PeerId]()
        if self._leader_knows[0] == leader:
            knows = self._leader_knows[1]
        return tuple(d for d in self.trust.doubles.told() if d.peer not in knows)

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
            self.journal.emit(
                "training",
                "voted-twice",
                f"{short(d.peer)} has voted for two results of term {d.one.term}",
                "warning",
                peer=d.peer,
                term=d.one.term,
                epoch=d.one.version.epoch,
            )
            if d.peer != self.me:
                self.transport.fault(d.peer, "voted for two results of one attempt", BARS)
        if found:
            self._hurry.set()
        return bool(found)

    def _vote(self, action: ev.TellCommitted) -> bytes:
        """This peer's signature under the committed version; empty if it has voted otherwise."""
        plan = action.plan
        voters = names(action.plan.electorate.voters)
        at = self.member.at
        attempt = action.attempt
        vote = Vote(plan.cell_id, plan.term, attempt, at, voters, self.stage, action.digest)
        said = vote.said()
        try:
            self._ledger.cast(vote.cell, vote.term, vote.attempt, said)
        except Refused as e:
            self.journal.emit("training", "vote-refused", str(e), "warning", term=vote.term)
            return b""
        return self.identity.sign(said, signing_domain("vote", self.facts.run_id))

    async def _clockwork(self) -> None:
        patience = self.transport.patience
        while True:
            due = self.clock.now() + TICK_S
            await asyncio.sleep(TICK_S)
            now = self.clock.now()
            patience.woke(due, now)
            self.work.mind_the_disk()
            if now - due > self.facts.waits.late_s:
                self._stood_still(now - due)
            if self.leader is not None:
                self.lead(
                    ev.ClockTick(self._view().coming, self.work.colleagues.all, patience.slack(now))
                )

    def _stood_still(self, seconds: float) -> None:
        """This process did not run for ``seconds``. Others may follow another leader by now: look
        for it at once."""
        self.journal.emit(
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
        peer = self.transport.caller(context)
        self._broken.pop(peer, None)
        self.vitals.alive(peer, self.clock.now())
        try:
            reason = await self._hear(peer, request)
        except WireError as e:
            self.transport.fault(peer, str(e), 1.0)
            reason = str(e)
        reply = pb.NoteReply(accepted=reason is None, reason=reason or "")
        if request.WhichOneof("say") == "ready" and reason is None and self.leader is not None:
            reply.waits_for = self.waiting_for()
            reply.lost.extend(self.vitals.lost())
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
                heeded = self._election.heeds(peer, self.clock.now())
                if plan is None or plan.leader != peer and not heeded:
                    return "only the plan's leader opens its rounds"
                return await self._told(event)
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
                self._election.says(peer, self.clock.now())
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
        if isinstance(event, ev.Heartbeat):
            self.vitals.leaves(peer, event.leaving)
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
        vote = None
        if isinstance(event, ev.Committed):
            vote = self.leader.vote(event)
        if vote is not None and not self.trust.vote_is_signed(vote, peer, note.committed.vote):
            raise WireError("a vote whose signature is wrong")
        if isinstance(event, ev.Heartbeat):
            self._learn(event.doubles)
        if vote is not None:
            self.trust.doubles.saw(vote, peer, note.committed.vote)
            if self._bar():
                return "this peer has voted for two results of one attempt"
        self.lead(event)
        return None

    def _claimed(self, peer: PeerId) -> None:
        """``peer`` takes this peer, which does not lead, for the leader. If most voters do, the
        leader of the plan in force is gone, even if this peer's connection to it stands."""
        now = self.clock.now()
        leader = self.leader_id()
        plan = self.member.plan
        most = self._election.claims(peer, now)
        if most and self._able and plan is not None and plan.leader == leader:
            self._election.shun(plan.leader, now)
            self._take_or_drop_the_lead()
        self._hurry.set()

    async def _hear_plan(self, peer: PeerId, note: pb.PlanNote) -> str | None:
        # A leader knows us because we took it for the leader and sent it a heartbeat. Plans of
        # other peers are not followed, and large ones are not parsed.
        heeded = self._election.heeds(peer, self.clock.now())
        if not heeded and len(note.plan) > LARGE_PLAN:
            return "this peer follows another leader"
        if heeded and not self._may_lead(peer):
            return "in this run only peers that its owner has admitted may lead"
        if heeded and not is_signed(
            self.identity,
            peer,
            note.plan,
            note.signature,
            signing_domain("plan", self.facts.run_id),
        ):
            raise WireError("a plan whose signature is wrong")
        plan = await self._parse(note)
        if plan.leader != peer:
            raise WireError("a plan that its sender does not lead")
        if why := self.facts.bounds.of_plan(plan):
            raise WireError(f"invalid plan: {why}")
        if plan.term > (most := self.terms.most(self.clock.wall())):
            raise WireError(f"a plan of term {plan.term}, and at most {most} can have been reached")
        if not heeded:
            return "this peer follows another leader"
        if self.cell not in (plan.cell_id, plan.parent) or (plan.parent and not plan.cell_id):
            return f"a plan of cell {plan.cell_id or 'none'}, and this peer is in {self.cell}"
        if why := await self._beside(len(note.plan), self.work.objection, plan):
            raise WireError(f"invalid plan: {why}")
        if old := self.standing.refuses(plan, self.work.read(plan.change)):
            self._hurry.set()
            return old
        if why := self._undoes(plan) or self._distrusts(plan, note):
            self._hurry.set()
            return why
        self._election.forgive(peer)
        return await self._told(ev.PlanArrived(plan))

    async def _parse(self, note: pb.PlanNote) -> Plan:
        """The plan of a note, with its hash. One large plan is parsed at a time."""

        def parsed() -> Plan:
            plan = notes.parse_plan(note, self.facts.bounds.paths)
            _ = plan.hash
            return plan

        async with self._parsing:
            return await self._beside(len(note.plan), parsed)

    async def _beside(self, nbytes: int, work: Callable[..., R], *about: Any) -> R:
        """Run ``work`` on a plan of ``nbytes`` and return its result. A large plan is worked on in
        a thread, because the event loop would stand still meanwhile."""
        if nbytes > LARGE_PLAN:
            return await asyncio.to_thread(work, *about)
        return work(*about)

    def _distrusts(self, plan: Plan, note: pb.PlanNote) -> str:
        """The reason why the last voters do not support this plan, or "" if they do, by this peer's
        knowledge."""
        m = self.member
        warrant = notes.parse_warrant(note)
        self._learn(warrant.doubles)
        self._leader_knows = plan.leader, frozenset(d.peer for d in warrant.doubles)
        follows = m.plan.leader if m.plan is not None else None
        now = self.clock.now()
        wall = self.clock.wall()
        why = self.trust.objection(plan, warrant, follows, m.at, now, wall)
        self._bar()
        if why and now - self._said_refused >= SAY_AGAIN_S:
            self._said_refused = now
            self.journal.emit(
                "training",
                "plan-refused",
                f"a plan of {plan.leader} is not followed: {why}",
                "warning",
                term=plan.term,
            )
        return why

    def _undoes(self, plan: Plan) -> str:
        """The reason to refuse a new leader's plan if it would undo a version that this peer has
        reported as committed to the previous leader; "" otherwise. Others may have committed the
        same version, and together that may be a commit, so the new leader must hear of it first."""
        m = self.member
        if (
            m.plan is None
            or m.state is not MemberState.DONE
            or plan.leader == m.plan.leader
            or plan.base == m.at
            or self._known == (plan.leader, m.at)
        ):
            return ""
        return f"epoch {m.at.epoch} is committed here, and the leader does not know it"

    async def History(self, request: pb.HistoryRequest, context: Any) -> pb.HistoryReply:
        """Answer with the plan that this peer remembers behind a version."""
        peer = self.transport.caller(context)
        async with blamed(self.transport, peer, context):
            remembered = self.member.remembers(notes.parse_version(request.version))
            return notes.history_reply(*remembered, self.past.versions, self.trust.certificate)

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
        now = self.clock.now()
        for peer in (members | self._view().hosts.keys()) & set(peers) - {self.me}:
            self.vitals.dead(peer, now, since)

    async def word(
        self, peer: PeerId, note: pb.Note, floor_s: float, stands_s: float = STANDS_S
    ) -> str | None:
        """Send as :meth:`tell` does, with a time limit that depends on the connection. An open
        connection shows that the process lives, so over it the answer may take ``stands_s``. Over a
        new one it has ``floor_s``, or longer if this peer's answers were measured to take longer;
        where a connection has just broken, at most :meth:`_redial_s`. Raises Unheard when no answer
        came."""
        patience = self.transport.patience
        what = ("word", peer)
        broken = self.clock.now() - self._broken.get(peer, -BROKEN_S) < BROKEN_S
        if self.transport.path(peer):
            with contextlib.suppress(PeerFault):
                return await self.tell(
                    peer, note, patience.within(what, stands_s, self.clock.now())
                )
            self.vitals.doubt(peer, self.clock.now())
            self.transport.forget(peer)
            broken = True
        began = self.clock.now()
        limit = patience.within(what, floor_s, began)
        if broken and note.WhichOneof("say") not in CARRIED_OUT:
            limit = min(limit, self._redial_s(peer))
        try:
            return await self.tell(peer, note, limit)
        except PeerFault as e:
            self.vitals.doubt(peer, self.clock.now())
            raise Unheard(e, began) from e

    def _redial_s(self, peer: PeerId) -> float:
        """Seconds for an answer over a new connection, after the previous one broke. They are
        bounded: a cell must go on soon even if its leader answered slowly before it died."""
        patience = self.transport.patience
        now = self.clock.now()
        usual = REDIAL_TIMEOUT_S + patience.usual(("dial", peer))
        within = patience.within(("word", peer), usual, now)
        return min(within, REDIAL_MOST_S + patience.slack(now))

    async def tell(self, peer: PeerId, note: pb.Note, timeout: float) -> str | None:
        """Send a note. Returns None if the peer accepted, else its reason. Raises PeerFault when it
        did not answer in time."""
        patience = self.transport.patience
        began = patience.running(self.clock.now())
        async with answers(peer, timeout):
            stub = rpc.TrainingStub(await self.transport.channel(peer))
            reply = await stub.Tell(note, timeout=timeout)
        self._broken.pop(peer, None)
        self.vitals.alive(peer, self.clock.now())
        if note.WhichOneof("say") == "ready":
            self.leader_waits = peer, printable(reply.waits_for)
            self._lacking = None
            if reply.HasField("lacking"):
                self._lacking = frozenset(map(PeerId, reply.lacking.peers))
            lost = [PeerId(p) for p in reply.lost[:MOST_LOST]]
            self._count_dead(lost, self.clock.now() - HEARD_S)
        # Answers to other notes take as long as the work that they ask for.
        if note.WhichOneof("say") in (
            None,
            "ready",
        ):
            patience.took(("word", peer), patience.running(self.clock.now()) - began)
        if reply.accepted:
            return None
        return reply.reason

    async def inform(self, peer: PeerId, note: pb.Note) -> None:
        """Send a note that may get lost: a peer that misses it finds out by itself."""
        with contextlib.suppress(PeerFault):
            await self.word(peer, note, PROBE_TIMEOUT_S)

    async def _tell_leader(self, plan: Plan, note: pb.Note) -> None:
        """Send a note that the leader of this plan must hear. It is given up if the leader does not
        answer, or no longer leads by this peer's knowledge."""
        for _ in range(TELL_TRIES):
            async with self._order.setdefault(plan.leader, asyncio.Lock()):
                if plan.leader == self.me:
                    self.lead(notes.leader_event(note, self.me))
                    return
                if self._election.is_silent(plan.leader, self.clock.now()):
                    return
                with contextlib.suppress(PeerFault):
                    await self._word_to_leader(plan.leader, note)
                    return
            if self.leader_id() != plan.leader:
                return
            await asyncio.sleep(TICK_S)

    def lost(self, peer: PeerId) -> None:
        """The connection to ``peer`` broke."""
        now = self.clock.now()
        self._broken = {p: at for p, at in self._broken.items() if now - at < BROKEN_S}
        self._broken[peer] = now
        self.vitals.doubt(peer, now)
        self.accuse(peer)

    def accuse(self, peer: PeerId) -> None:
        """An engine could not get an answer from ``peer``: let the leader find out whether it is
        dead."""
        plan = self.member.plan
        now = self.clock.now()
        if plan is None or now - self._accused.get(peer, -1e9) < ACCUSE_EVERY_S:
            return
        self._accused[peer] = now
        if peer == self.leader_id():
            self._hurry.set()  # nobody else can be told: the next heartbeat shows whether it lives
            return
        self.tasks.spawn(
            self._tell_leader(
                plan,
                pb.Note(epoch=plan.epoch, term=plan.term, fault=pb.FaultNote(about=peer)),
            ),
            "accuse",
        )

    # ----------------------------------------------------------- taking part

    async def _told(self, event: Any) -> str | None:
        """Handle an event as :meth:`happens` does, but complete it even if the sender hangs up
        meanwhile: otherwise a half carried out plan would count as known when it is sent again."""
        return await asyncio.shield(self._hearing.spawn(self.happens(event), "told"))

    async def happens(self, event: Any) -> str | None:
        """Feed the member and carry out its actions in order. Returns the reason of a refusal, or
        None."""
        async with self._member_lock:
            if self._closed:
                return "this peer stops"
            if isinstance(event, ev.PlanArrived):
                event = replace(event, digest=self.work.stage.digest)
            queue = [event]
            refused = None
            while queue:
                for action in self.member.handle(queue.pop(0), self.clock.now()):
                    if isinstance(action, ev.RefuseCaller):
                        refused = action.reason
                    elif isinstance(action, ev.GoTo) and (refused := await self._go_to(action)):
                        break  # what follows is work on a version that is not here
                    elif isinstance(action, ev.GoTo):
                        continue
                    elif (follow := await self._act(action)) is not None:
                        queue.append(follow)
            self._moved = self.clock.now()
            return refused

    async def _go_to(self, action: ev.GoTo) -> str | None:
        """Put another version in place. If that fails, report what this peer holds instead and
        return why it failed."""
        await self._epoch_tasks.close()
        work = self.work
        try:
            await work.go_to(action.version, action.how)
        except Refused as e:
            self.journal.emit(
                "checkpoint", "restore-failed", str(e), "error", epoch=action.version.epoch
            )
            self._place()
            self._hurry.set()
            if self.leader is not None:
                self.lead(self._heartbeat())
            return f"epoch {action.version.epoch} cannot be put in place: {e}"
        return None

    def _place(self, term: int = 0) -> None:
        """Tell the member which version is in place. ``term``: the highest one in which this peer
        has voted, 0 for none."""
        work = self.work
        versions = work.local_checkpoints.versions()
        placed = ev.VersionPlaced(work.stage.version, versions, work.tokens, term)
        self.member.handle(placed, self.clock.now())

    async def _act(self, action: Any) -> Any:
        match action:
            case ev.Settle(epoch):
                await self.work.settle(epoch, self.member.plan)
                versions = self.work.local_checkpoints.versions()
                self.member.handle(ev.CheckpointsKept(versions), self.clock.now())
            case ev.BeginEpoch(plan, behind):
                await self._follow(plan, behind)
                self.on_plan(plan)
                if plan.window.number:
                    self.on_partners(plan)
                rules = self.work.read(plan.change)
                if self.standing.follows(plan.leader, rules):
                    self._keep_change(rules)
                await self.work.begin(plan, behind is not None)
                if self.stage == ENDS and behind is None and plan.paths:
                    self._epoch_tasks.spawn(self.work.run(plan, self._reports(plan)), "run")
            case ev.EnterCell(plan):
                await self._follow(plan)
                self.work.enter(plan)
                self._enter(plan)
            case ev.StartRound(plan, r, listener):
                self._epoch_tasks.spawn(self._end(plan, r, listener), "round")
            case ev.AdoptParts(plan, ended):
                digest = await self.work.adopt(plan)
                self.work.engines.meter.worked()
                return ev.Adopted(ended, digest)
            case ev.TellCommitted(plan):
                self.tasks.spawn(
                    self._tell_leader(
                        plan,
                        notes.committed_note(action, self.work.speed(), self._vote(action)),
                    ),
                    "committed",
                )
            case ev.TellIncomplete(plan, ended):
                for peer in ended.failed:
                    self.accuse(peer)
                self.tasks.spawn(
                    self._tell_leader(plan, notes.incomplete_note(action)), "incomplete"
                )
            case ev.Finish(plan):
                await self._follow(plan)
                await self.work.finish(plan)
                self.on_plan(plan)
                self.finished.set()
                self.journal.emit(
                    "training",
                    "run-finished",
                    f"the run is complete at epoch {plan.epoch}",
                    epoch=plan.epoch,
                )
        return None

    async def _follow(self, plan: Plan, behind: tuple[Version, int] | None = None) -> None:
        """The plan is in force. ``behind``: the version that this peer held and its tokens, if the
        plan is of another history."""
        await self._epoch_tasks.close()
        self.terms.saw(plan.term, self.clock.wall())
        self.work.colleagues.meet([m.peer for m in plan.members if m.current], self.clock.now())
        if self.work.plan is None or plan.leader != self.work.plan.leader:
            self.on_lead()  # the record names the leader that this peer follows
        if behind is not None:
            self.tasks.spawn(self.past.give_up(*behind, plan.leader), "give-up")
        else:
            self.past.stood(plan.base, plan.tokens)

    def _enter(self, plan: Plan) -> None:
        """This peer now belongs to the cell that ``plan`` founds. The cell has no leader yet: its
        first ends peer counts as leader until it turns out to be dead."""
        able = [m.peer for m in plan.stage(ENDS) if self._may_lead(m.peer)]
        now = self.clock.now()
        first = min(able, default=self.me)
        self.cell = plan.cell_id
        self._stop_leading()
        self.trust.forget()
        self._election = Election(self.me, now - LOOK_S)
        if first != self.me:
            self._election.answered(first, now)
        self.journal.emit(
            "training",
            "cell-entered",
            f"belongs to cell {short_cell(plan.cell_id)} from epoch {plan.epoch} on, with "
            f"{len(plan.members) - 1} other peers",
            cell=plan.cell_id,
            epoch=plan.epoch,
        )
        self.on_cell(plan.cell_id)
        self._hurry.set()

    async def _end(self, plan: Plan, r: ev.RoundArrived, listener: bool) -> None:
        """Run the round that ends the epoch, or copy its result from other members."""
        if r.sources:
            ended = await self.work.copy(plan, r)
        else:
            ended = await self.work.average(plan, r, listener)
        await self.happens(ended)

    def _reports(self, plan: Plan) -> Callable[[MicroBatchDone], None]:
        """A callback that reports each result of the plan to the leader. Results that come while a
        note is on its way travel in the next notes."""
        results: list[MicroBatchDone] = []

        async def tell() -> None:
            while results and self.member.plan is plan:
                batch = tuple(results[:RESULTS])
                await self._tell_leader(plan, notes.finished_note(plan, batch))
                del results[: len(batch)]

        def done(result: MicroBatchDone) -> None:
            results.append(result)
            if len(results) == 1:
                self.tasks.spawn(tell(), "results")

        return done

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
        if self.clock.now() - self._moved < max(PAUSE_S, done):
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
        now = self.clock.now()
        asked = self._unanswered
        life, seconds = self.vitals.look(peer, now)
        if life is not Life.LIVES:
            return life, seconds
        if self.leader is not None:
            silent = self.leader.silent_s(peer, now)
            if silent:
                return Life.SILENT, silent
            return life, seconds
        late_s = ANSWER_S + self.transport.patience.slack(now)
        if asked is not None and asked[0] == peer and now - asked[1] > late_s:
            return Life.SILENT, now - asked[1]
        return life, seconds
