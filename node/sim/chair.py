"""The leader's side of a simulated peer: carries out what :class:`Leader` decides, as
``node.training.leader.chair`` does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from node.core.ids import PeerId
from node.scheduler.router import search
from node.sim.world import HEAD
from node.training.protocol import events as ev
from node.training.protocol.pace import PROBE_TIMEOUT_S, SEARCH_S, TELL_TIMEOUT_S

if TYPE_CHECKING:
    from node.sim.peer import SimPeer

EVALUATE_S = 0.1
"""An evaluation takes so long."""
MOVES = 40
"""Plans that a search for better paths tries."""


class Chair:
    """What a leader says to the others."""

    def __init__(self, peer: SimPeer) -> None:
        self.peer = peer
        self._probing: set[PeerId] = set()

    def lead(self, event: Any) -> None:
        """Feed the leader, if this is one, and carry out what it decides."""
        leader = self.peer.leader
        if leader is None or event is None:
            return
        watch = self.peer.swarm.watch
        before = watch.before_leader(self.peer, leader, event)
        actions = leader.handle(event, self.peer.world.now)
        watch.after_leader(self.peer, leader, event, actions, before)
        for a in actions:
            match a:
                case ev.SendPlan(plan):
                    size = 64 * (len(plan.members) + len(plan.paths)) + 48 * len(plan.owners)
                    for m in plan.members:
                        self._deliver(m.peer, ev.PlanArrived(plan), size)
                case ev.SendRound():
                    r = ev.RoundArrived(
                        self.peer.name,
                        a.plan.epoch,
                        a.plan.term,
                        a.plan.hash,
                        a.attempt,
                        a.dead,
                        a.owners,
                        a.sources,
                        a.dropped,
                        a.deadline_s,
                        a.digest,
                        a.tokens,
                        a.among,
                    )
                    for to in a.to:
                        self._deliver(to, r, HEAD + 48 * len(a.owners))
                case ev.SendLost():
                    for to in a.to:
                        if to == self.peer.name:
                            self.peer.hear(to, a, lambda _: None)
                        else:
                            # Good to know and no more.
                            self.peer.tell(to, a, TELL_TIMEOUT_S, lambda _: None, lambda _: None)
                case ev.Probe(peer):
                    self._probe(peer)
                case ev.Recall(version, holders):
                    plan, dropped = self.peer.member.remembers(version)
                    if plan is not None:
                        self.peer.after(0.0, self.lead, ev.Recalled(version, plan, dropped))
                    else:
                        self.peer.past.recall(version, list(holders), self.lead)
                case ev.Move(peer, _):
                    self._ask_to_move(a)
                case ev.Search(job):
                    self.peer.after(
                        SEARCH_S, self.lead, ev.Searched(job, *search(job, moves=MOVES))
                    )
                case ev.Evaluate(epoch, _):
                    self.peer.after(EVALUATE_S, self.lead, ev.Evaluated(epoch, 2.0))
                case ev.Report():
                    self.peer.swarm.watch.report(self.peer, a)

    def _deliver(self, peer: PeerId, event: Any, nbytes: int) -> None:
        def failed(why: str | None, since: float = 0.0) -> None:
            if why is not None:
                self.lead(ev.Unreachable(peer))

        if peer == self.peer.name:
            self.peer.after(0.0, lambda: failed(self.peer.happens(event)))
        else:
            self.peer.word(peer, event, TELL_TIMEOUT_S, failed, failed, nbytes)

    def _probe(self, peer: PeerId) -> None:
        if peer in self._probing:
            return
        self._probing.add(peer)

        def lives(reason: str | None) -> None:
            self._probing.discard(peer)
            self.lead(ev.Answered(peer, reason is None))

        def dead(why: str, since: float) -> None:
            self._probing.discard(peer)
            self.lead(ev.Unreachable(peer, since))

        self.peer.word(peer, None, PROBE_TIMEOUT_S, lives, dead)

    def _ask_to_move(self, move: ev.Move) -> None:
        def ended(refused: str | None) -> None:
            if refused is not None:
                self.lead(ev.MoveRefused(move.peer))

        if move.peer == self.peer.name:
            ended(self.peer.swarm.move(self.peer, move.stage))
        else:
            # Who does not answer may be on its way.
            self.peer.tell(move.peer, move, TELL_TIMEOUT_S, ended, lambda _: None)
