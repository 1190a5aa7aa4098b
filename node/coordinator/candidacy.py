"""Election of the leader as one peer takes part in it. Enters: the directory's view, plans in
force, what other peers say of their leader. Leaves: the leader; this peer begins or stops to lead.
Never: a heartbeat (:mod:`node.coordinator.reporting`), a decision of the leader."""

from collections.abc import Callable

from node.consensus.admission import Admission
from node.consensus.blindness import Blindness
from node.consensus.election import LOOK_S, Election
from node.coordinator.following import Following
from node.coordinator.kit import Kit
from node.coordinator.leading import Leading
from node.coordinator.messenger import Messenger
from node.coordinator.presence import View
from node.core.ids import ENDS, NO_CELL, CellId, PeerId
from node.core.journey import Plan
from node.epoch.leader.leader import Leader, Phase
from protos import training_pb2 as pb


class Candidacy:
    """The election at one peer. ``view()`` shows the peers that the directory lists as alive."""

    def __init__(
        self,
        kit: Kit,
        view: Callable[[], View],
        admission: Admission,
        messenger: Messenger,
        following: Following,
        leading: Leading,
    ) -> None:
        self._kit = kit
        self.view = view
        self._admission = admission
        self._messenger = messenger
        self._following = following
        self._leading = leading
        self.election = Election(kit.me, kit.clock.now())
        self.cell = NO_CELL
        """The cell this peer belongs to; empty in a run of one cell."""
        self.leaving = False
        self.leader: PeerId | None = None
        """The leader by this peer's last look, a heartbeat ago at most."""
        self._blindness = Blindness()

    def start(self) -> None:
        """Begin to take part."""
        self.election = Election(self._kit.me, self._kit.clock.now())

    def leader_id(self) -> PeerId | None:
        """The leader by this peer's knowledge; None if it sees no ends peer."""
        view = self.view()
        ends = {p: s for p, s in view.ends.items() if self._admission.may_lead(p)}
        plan = self._following.member.plan
        order: tuple[PeerId, ...] = ()
        if plan is not None:
            order = plan.electorate.voters
        known = self._kit.work.colleagues.all
        follows = view.follows
        counts = self._admission.trust.counts
        if not all(map(counts, follows)):
            follows = {p: leader for p, leader in follows.items() if counts(p)}
        self.election.keep(self._admission.may_lead)
        self.election.see(ends, follows, self.follows, order, known)
        leads = self._leading.leader is not None
        self.leader = self.election.leader(self._kit.clock.now(), able=self.able, leads=leads)
        return self.leader

    @property
    def able(self) -> bool:
        """True if this peer can lead."""
        kit = self._kit
        able = kit.stage == ENDS and not self.leaving and self._admission.may_lead(kit.me)
        return able and not self._blindness.lasts(kit.clock.now())

    @property
    def follows(self) -> PeerId | None:
        """The leader of the plan in force here, or this peer if it leads."""
        if self._leading.leader is not None:
            return self._kit.me
        return self._following.member.leader

    def heeds(self, peer: PeerId) -> bool:
        """Return True if plans of ``peer`` may be followed here: this peer took it for its leader,
        and sent it a heartbeat, a short time ago."""
        return self.election.heeds(peer, self._kit.clock.now())

    def take_or_drop_the_lead(self) -> PeerId | None:
        """Begin or stop to lead as the election says. Returns the leader."""
        self._look_around()
        leader = self.leader_id()
        leads = leader == self._kit.me
        led = self._leading.leader
        if leads and led is None:
            self._leading.begin(self._admission.changes.known)
            self._gather()
            self._kit.callbacks.on_lead()
        elif not leads and led is not None and (not self.leaving or led.idle):
            self._leading.end()
            text = "another peer leads the epochs now"
            self._kit.journal.emit("training", "follows", text)
            self._kit.callbacks.on_lead()
        return leader

    def claimed(self, peer: PeerId) -> None:
        """``peer`` takes this peer, which does not lead, for the leader. If most voters do, the
        leader of the plan in force is gone, even if this peer's connection to it stands."""
        now = self._kit.clock.now()
        leader = self.leader_id()
        followed = self._following.member.leader
        most = self.election.claims(peer, now)
        if most and self.able and followed is not None and followed == leader:
            self.election.shun(followed, now)
            self.take_or_drop_the_lead()

    def entered(self, plan: Plan) -> None:
        """This peer now belongs to the cell that ``plan`` founds. The cell has no leader yet: its
        first ends peer counts as leader until it turns out to be dead."""
        me = self._kit.me
        able = [m.peer for m in plan.stage(ENDS) if self._admission.may_lead(m.peer)]
        now = self._kit.clock.now()
        first = min(able, default=me)
        self.cell: CellId = plan.cell_id
        self._leading.end()
        self.election = Election(me, now - LOOK_S)
        if first != me:
            self.election.answered(first, now)

    def _look_around(self) -> None:
        """Let another peer lead if this one leads, cannot plan, hears others, and sees none of them
        in the directory: its cell waits for it."""
        sees = bool(self.view().everybody)
        leader = self._leading.leader
        holds_up = not sees and leader is not None and self._holds_up(leader)
        if self._blindness.look(self._kit.clock.now(), sees=sees, holds_up=holds_up):
            text = "this peer sees nobody in the directory, and lets another one lead"
            self._kit.journal.emit("training", "blind", text, "warning")

    def _holds_up(self, leader: Leader) -> bool:
        """Return True if others wait for this leader, one of them at the ends."""
        others = {p: c for p, c in leader.roster.peers.candidates.items() if p != self._kit.me}
        ends = any(c.stage == ENDS for c in others.values())
        return ends and leader.phase is Phase.GATHER and leader.gathering.waiting is not None

    def _gather(self) -> None:
        """Ask the other members of the newest plan to report to this peer, which leads now. They
        may have asked it too early, or not know yet that the previous leader is gone."""
        plan = self._following.member.plan
        asked = set[PeerId]()
        if plan is not None:
            asked = {m.peer for m in plan.members}
        note = pb.Note(lead=pb.LeadNote(cell=self.cell))
        now = self._kit.clock.now()
        for peer in sorted(asked - {self._kit.me}):
            if not self.election.is_silent(peer, now):
                self._kit.tasks.spawn(self._messenger.notify(peer, note), "gather")
