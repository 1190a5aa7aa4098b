"""News from other machines of a peer for its leader: quorum certificates, equivocation, checkpoints
on the disk, admission. Pure. Enters: the next event of the leader. Leaves: the events that the
leader must take before it, and the event itself with what this peer knows of its sender.
Never: a decision of the leader.

A leader that takes these events decides by nothing else, so its recording can be played again."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from node.consensus.trust import Trust
from node.consensus.voters import Quorum
from node.core.ids import ENDS, PeerId
from node.core.journey import Version
from node.epoch import events as ev
from node.epoch.plan_context import PlanContext


class Briefing:
    """The news of one leader. ``trust``: certificates and proofs that its peer has seen.
    ``saved()``: versions on the disk; ``recall(version)``: the context in a checkpoint;
    ``may_lead(peer)``: True if the run lets that peer lead."""

    def __init__(
        self,
        trust: Trust,
        saved: Callable[[], tuple[Version, ...]],
        recall: Callable[[Version], PlanContext | None],
        may_lead: Callable[[PeerId], bool],
    ) -> None:
        self._trust = trust
        self._saved = saved
        self._recall = recall
        self._may_lead = may_lead
        self._quorum = Quorum()
        self._void: frozenset[PeerId] = frozenset()
        self._versions: tuple[Version, ...] = ()

    def before(self, event: Any) -> list[Any]:
        """The news since the last call, then ``event`` as the leader may take it."""
        if isinstance(event, ev.Heartbeat) and event.stage == ENDS:
            if not self._may_lead(event.peer):
                membership = replace(event.membership, may_lead=False)
                event = replace(event, membership=membership)
        return [*self._news(), event]

    def _news(self) -> list[Any]:
        news: list[Any] = []
        quorum = self._trust.quorum
        if quorum != self._quorum:
            self._quorum = quorum
            news.append(ev.QuorumChanged(quorum))
        void = self._trust.doubles.peers
        if void != self._void:
            self._void = void
            news.append(ev.Equivocated(void))
        versions = self._saved()
        if versions != self._versions:
            self._versions = versions
            contexts = [(v, context) for v in versions if (context := self._recall(v)) is not None]
            news.append(ev.ContextsKept(tuple(contexts)))
        return news
