"""The peers of a run, as one peer knows them: established ones, met ones, and strangers, which
anybody can make up. Enters: the directory's view, the plan in force, connections. Leaves: peers.
Never: a decision about a peer."""

from collections.abc import Callable, Collection, Mapping

from node.coordinator.following import Following
from node.coordinator.kit import Kit
from node.coordinator.presence import View
from node.core.ids import PeerId
from node.core.journey import Plan
from node.epoch.pace import FEW_STRANGERS


class KnownPeers:
    """The other peers of the run. ``view()`` shows the peers that the directory lists as alive."""

    def __init__(self, kit: Kit, view: Callable[[], View], following: Following) -> None:
        self._kit = kit
        self._view = view
        self._following = following
        self._named: tuple[Plan | None, frozenset[PeerId]] = None, frozenset()
        """A plan, and the peers that it names."""

    def hosts(self) -> Mapping[PeerId, int]:
        """Peers that the directory lists, with their stages."""
        return self._view().hosts

    def is_established(self, peer: PeerId) -> bool:
        """Return True for a peer that this one works with, as opposed to a stranger: a colleague, a
        member of the plan in force, or one of a cell that it averages with."""
        return peer in self._kit.work.colleagues.all or peer in self._planned()

    def has_met(self, peer: PeerId) -> bool:
        """Return True for a peer that is established or was met by one side's call. The directory
        may name others that somebody made up."""
        return self.is_established(peer) or self._kit.transport.has_met(peer)

    def reportable(self, peers: Collection[PeerId]) -> set[PeerId]:
        """Peers to tell the user about: the met ones, and strangers while they are few. Of many
        strangers most are made up."""
        strangers = {peer for peer in peers if not self.has_met(peer)}
        if len(strangers) > FEW_STRANGERS:
            return set(peers) - strangers
        return set(peers)

    def unproven(self) -> list[PeerId]:
        """Peers of the run that do not answer this one, on any way."""
        silent = self._kit.work.engines.pipeline.timing.silent()
        return sorted(self.reportable(silent & self.hosts().keys() - {self._kit.me}))

    def _planned(self) -> frozenset[PeerId]:
        """The peers that the plan in force names."""
        plan = self._following.member.plan
        if plan is not self._named[0]:
            peers = set[PeerId]()
            if plan is not None:
                peers = {m.peer for m in plan.members}
                for partner in plan.window.partners:
                    peers.add(partner.leader)
                    peers.update(h.peer for hosts in partner.hosts.values() for h in hosts)
            self._named = plan, frozenset(peers)
        return self._named[1]
