"""Reports of one peer to its leader: heartbeats, and messages that the leader must hear. Enters:
the state of this peer, time. Leaves: messages to the leader, or events for the own one. Never: the
choice of the leader (:mod:`node.coordinator.candidacy`)."""

import asyncio
import contextlib
from typing import Any, NamedTuple

from node.consensus.admission import Admission
from node.consensus.votes import Supporter
from node.coordinator import notes
from node.coordinator.candidacy import Candidacy
from node.coordinator.following import Following
from node.coordinator.kit import Kit
from node.coordinator.leading import Leading
from node.coordinator.messenger import Messenger
from node.coordinator.statements import Statements
from node.core.errors import PeerFault
from node.core.ids import PeerId, short
from node.core.journey import Plan, Version
from node.core.newest import Newest
from node.epoch import events as ev
from node.epoch.pace import (
    ACCUSE_EVERY_S,
    BEAT_AT_MOST_S,
    CALM_AFTER_S,
    CALM_BEAT_S,
    HEARTBEAT_S,
    PROBE_TIMEOUT_S,
    REDIAL_MOST_S,
    TELL_TRIES,
    TICK_S,
    beat_s,
)
from node.identity.faults import PEERS_KEPT
from protos import training_pb2 as pb

PAUSE_S = 5.0
"""Seconds between two epochs, evaluation included, after which a peer is said to wait."""


class LeaderReply(NamedTuple):
    """The last reply to a heartbeat. ``waits_for``: the leader's reason for planning no epoch;
    ``lacking``: peers of the own stage to which the leader waits for ways from here, None if it
    does not say."""

    leader: PeerId | None = None
    waits_for: str = ""
    lacking: frozenset[PeerId] | None = None


class LeaderContact:
    """Contact of one peer with its leader by heartbeats."""

    def __init__(self) -> None:
        self.known: tuple[PeerId, Version] | None = None
        """The leader that accepted our last heartbeat, and the version that it reported."""
        self._unanswered: tuple[PeerId, float] | None = None
        """Leader to which a heartbeat is on its way, and the time at which it was sent."""
        self.reply = LeaderReply()
        self._reached: Newest[PeerId, tuple[int, float]] = Newest(PEERS_KEPT)
        """By ends peer, calls that it answered since a leader last accepted a heartbeat, and the
        time of the last one."""

    def asks(self, leader: PeerId, now: float) -> None:
        """A heartbeat is on its way to ``leader``."""
        self._unanswered = leader, now

    def ends(self) -> None:
        """The heartbeat was answered, or given up."""
        self._unanswered = None

    def accepted(self, leader: PeerId, version: Version) -> None:
        """``leader`` accepted a heartbeat with this version."""
        self.known = leader, version
        self._reached.clear()

    def reached(self, peer: PeerId, now: float) -> float:
        """``peer`` answered a call, but no heartbeat. Returns the pause in seconds until the next
        heartbeat to it: none after the first call, then twice as long after each, at most
        :data:`CALM_BEAT_S`. A leader that lives may have no room for messages of strangers."""
        calls, last = self._reached.get(peer, (0, now))
        if now - last > CALM_AFTER_S:
            calls = 0
        self._reached[peer] = calls + 1, now
        if not calls:
            return 0.0
        return min(CALM_BEAT_S, TICK_S * 2.0 ** min(calls - 1, 10))

    def replied(self, reply: LeaderReply) -> None:
        """A leader replied to a heartbeat."""
        self.reply = reply

    def silent_s(self, peer: PeerId, now: float) -> float:
        """Seconds for which ``peer`` has not answered the heartbeat that is on its way to it; 0 for
        none."""
        if self._unanswered is None or self._unanswered[0] != peer:
            return 0.0
        return now - self._unanswered[1]

    def needed_ways(self, leader: PeerId) -> frozenset[PeerId] | None:
        """The peers of the own stage to which ``leader`` waits for ways from here; None if it does
        not say. Raises LookupError before it has answered."""
        if self.reply.leader != leader:
            raise LookupError(f"{leader} has not answered")
        return self.reply.lacking


class Novelty:
    """News in a peer's heartbeats: the time at which what it says of itself last changed."""

    def __init__(self, now: float) -> None:
        self._said: Any = None
        self.at = now
        """Time of the last news."""

    def says(self, what: Any, now: float) -> None:
        """The next heartbeat says ``what``."""
        if what != self._said:
            self._said = what
            self.at = now


class SelfReport:
    """The heartbeats of one peer: its version, speed, connections, votes and wishes."""

    def __init__(
        self,
        kit: Kit,
        admission: Admission,
        statements: Statements,
        following: Following,
        candidacy: Candidacy,
    ) -> None:
        self._kit = kit
        self._admission = admission
        self._statements = statements
        self._following = following
        self._candidacy = candidacy

    def heartbeat(self, leader: PeerId | None = None) -> ev.Heartbeat:
        """This peer's heartbeat to ``leader``, or to itself if None."""
        kit = self._kit
        m = self._following.member
        work = kit.work
        return ev.Heartbeat(
            kit.me,
            kit.stage,
            m.at,
            work.stage.digest,
            ev.Capacity(
                work.speed(),
                work.room,
                tuple(sorted(work.engines.pipeline.timing.rates().items())),
                work.costs(),
                self._following.running(),
            ),
            m.reachable,
            m.term,
            # A peer that went back to an older version may remember more tokens than that history
            # can have counted.
            kit.facts.bounds.counted(m.at.epoch, m.tokens),
            self._candidacy.leaving,
            ev.OuterReport(work.windows.mean, work.anchor.name),
            m.orphan,
            ev.Membership(self._candidacy.cell, self._admission.changes.tells(leader or kit.me)),
        )

    def note(self, heard: ev.Heartbeat, leader: PeerId) -> pb.Note:
        """A heartbeat as a message to ``leader``, with what this peer signs for it."""
        return notes.ready_note(heard, self.support(leader), self._admission.untold(leader))

    def support(self, leader: PeerId) -> Supporter:
        """This peer's signed support for ``leader``."""
        term = self._following.member.term
        return self._statements.support(self._candidacy.cell, leader, term)

    def state(self) -> tuple[Any, ...]:
        """The state that a leader must hear of soon when it changes."""
        m = self._following.member
        work = self._kit.work
        return (
            m.at,
            m.term,
            m.reachable,
            work.stage.digest,
            self._candidacy.leaving,
            self._candidacy.leader_id(),
            self._admission.changes.known.revision,
            work.windows.mean,
            work.anchor.name,
        )


class Reporting:
    """Heartbeats and other messages of one peer to its leader. ``own``: the heartbeats."""

    def __init__(
        self,
        kit: Kit,
        own: SelfReport,
        messenger: Messenger,
        following: Following,
        leading: Leading,
        candidacy: Candidacy,
    ) -> None:
        self._kit = kit
        self.own = own
        self._messenger = messenger
        self._following = following
        self._leading = leading
        self._candidacy = candidacy
        self.contact = LeaderContact()
        self._novelty = Novelty(kit.clock.now())
        self._order: dict[PeerId, asyncio.Lock] = {}
        """Locks of the leaders: one message to each at a time."""
        self._accused: Newest[PeerId, float] = Newest(PEERS_KEPT)
        self._hurry = asyncio.Event()
        self._looking: set[PeerId] = set()
        """Ends peers that are called because nobody leads."""

    def hurry(self) -> None:
        """Report soon: after the heartbeat that may be under way."""
        self._hurry.set()

    # ----------------------------------------------------------- heartbeats

    async def beat(self) -> None:
        """Report again and again."""
        while True:
            self._hurry.clear()
            await self.report()
            self._look_for_leaders()
            await asyncio.sleep(BEAT_AT_MOST_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.beat_s() - BEAT_AT_MOST_S):
                    await self._hurry.wait()

    def beat_s(self) -> float:
        """Seconds until the next heartbeat: more while this peer has nothing new to report, in a
        swarm that waits as in a long epoch."""
        now = self._kit.clock.now()
        self._novelty.says(self.own.state(), now)
        calm = now - max(self._novelty.at, self._following.moved) > CALM_AFTER_S
        answering = len(self._kit.work.engines.pipeline.timing.ways(now))
        return beat_s(answering, calm)

    async def report(self) -> None:
        """Send a heartbeat to the leader, and to the next one if that does not lead."""
        asked: set[PeerId] = set()
        candidacy = self._candidacy
        while (leader := candidacy.take_or_drop_the_lead()) is not None and leader not in asked:
            asked.add(leader)
            # One message to a leader at a time: an old heartbeat must not arrive after the news of
            # a commit.
            election = candidacy.election
            async with self._order.setdefault(leader, asyncio.Lock()):
                # A peer that has entered another cell meanwhile does not report to this leader.
                if election is not candidacy.election:
                    return
                # The message before this one may have found that the leader does not answer.
                silent = election.is_silent(leader, self._kit.clock.now())
                if not silent and await self._report_to(leader):
                    return

    async def _report_to(self, leader: PeerId) -> bool:
        """Send a heartbeat. Return False if ``leader`` does not answer or does not lead, so that
        another peer may be the leader."""
        heard = self.own.heartbeat(leader)
        clock = self._kit.clock
        # This peer may enter another cell, with a new election, before the heartbeat is answered.
        election = self._candidacy.election
        if leader == self._kit.me:
            self._report_here(heard)
            return True
        election.tells(leader, clock.now())
        self.contact.asks(leader, clock.now())
        try:
            refused = await self._send(leader, self.own.note(heard, leader))
        except PeerFault:
            return False
        finally:
            self.contact.ends()
        if refused is not None:
            election.doubt(leader, clock.now())
            return False
        election.answered(leader, clock.now())
        self.contact.accepted(leader, heard.at)
        self._following.answered(leader)
        return True

    def at_once(self) -> None:
        """Report at once: the own leader hears it before this returns."""
        self.hurry()
        if self._leading.leader is not None:
            self._report_here(self.own.heartbeat())

    def _report_here(self, heard: ev.Heartbeat) -> None:
        """Give this peer's heartbeat to its own leader."""
        self._leading.supported(self.own.support(self._kit.me))
        self._leading.lead(heard)

    # ----------------------------------------------------------- other messages

    async def tell_leader(self, plan: Plan, note: pb.Note) -> bool:
        """Send a note that the leader of this plan must hear, the one that made it or that took it
        over. Return False if it was not told: it does not answer, or no longer leads by this peer's
        knowledge."""
        candidacy = self._candidacy
        for _ in range(TELL_TRIES):
            leader = self._following.leader_of(plan)
            async with self._order.setdefault(leader, asyncio.Lock()):
                if leader == self._kit.me:
                    self._leading.hear_own(note)
                    return True
                if candidacy.election.is_silent(leader, self._kit.clock.now()):
                    return False
                with contextlib.suppress(PeerFault):
                    await self._send(leader, note)
                    return True
            if candidacy.leader_id() != leader:
                return False
            await asyncio.sleep(TICK_S)
        return False

    def accuse(self, peer: PeerId) -> None:
        """An engine could not get an answer from ``peer``: let the leader find out whether it is
        dead."""
        plan = self._following.member.plan
        now = self._kit.clock.now()
        if plan is None or now - self._accused.get(peer, -1e9) < ACCUSE_EVERY_S:
            return
        leads = peer == self._candidacy.leader_id()
        if not leads and plan.member(peer) is None:
            return
        self._accused[peer] = now
        if leads:
            self.hurry()  # nobody else can be told: the next heartbeat shows whether it lives
            return
        note = pb.Note(epoch=plan.epoch, term=plan.term, fault=pb.FaultNote(about=peer))
        self._kit.tasks.spawn(self.tell_leader(plan, note), "accuse")

    async def _send(self, leader: PeerId, note: pb.Note) -> str | None:
        """Send a note with a retry. A leader that does not answer is not taken for the leader for a
        while. Raises PeerFault."""
        election = self._candidacy.election
        try:
            return await self._messenger.send_with_retry(leader, note, 2 * PROBE_TIMEOUT_S)
        except PeerFault as e:
            election.shun(leader, self._kit.clock.now())
            self.hurry()
            self._kit.journal.emit(
                "training",
                "leader-silent",
                f"leader {short(leader)}: {e.reason}",
                "warning",
                peer=leader,
            )
            raise

    # ----------------------------------------------------------- nobody leads

    def _look_for_leaders(self) -> None:
        """Call the ends peers that did not answer, while no leader accepts heartbeats of this peer,
        or while it has led for a moment and cannot plan: it may have been cut off from all of them.
        Otherwise they show by a new record that they are back."""
        election = self._candidacy.election
        alone = not election.accepted
        if self._leading.leader is not None:
            alone = self._leading.stuck_s(self._following.moved) >= PAUSE_S
        if alone:
            for peer in election.shunned():
                if peer not in self._looking:
                    self._looking.add(peer)
                    self._kit.tasks.spawn(self._look_for(peer), f"look for {short(peer)}")

    async def _look_for(self, peer: PeerId) -> None:
        election = self._candidacy.election
        kit = self._kit
        try:
            async with asyncio.timeout(REDIAL_MOST_S):
                await kit.transport.ping(peer, REDIAL_MOST_S)
        except (PeerFault, TimeoutError):
            await asyncio.sleep(HEARTBEAT_S)
        else:
            now = kit.clock.now()
            kit.vitals.alive(peer, now)
            await asyncio.sleep(self.contact.reached(peer, now))
            election.forgive(peer)
            self.hurry()
        finally:
            self._looking.discard(peer)
