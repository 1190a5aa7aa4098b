"""The peers that take part in the plans of a leader: which of those that are here are proven to
reach the leader and the owners of their stage. Pure. Enters: the peers, the connections that they
report. Leaves: replicas and possible owners of each stage, missing connections. Never: a version of
the parameters (:mod:`node.epoch.peers.versions`)."""

from collections.abc import Mapping, Sequence
from copy import copy

from node.core.ids import PeerId
from node.epoch import events as ev
from node.epoch.pace import ALL_OWN, MOST_LACKING
from node.epoch.peers.peers import Peers


class Participants:
    """The choice of replicas among these peers. ``prove``: only peers take part that are proven to
    reach the leader and every owner of their stage; ``owning``: owners in the last plan, by
    stage."""

    def __init__(self, peers: Peers, prove: bool, owning: Mapping[int, set[PeerId]]) -> None:
        self._peers = peers
        self._prove = prove
        self._together: dict[int, set[PeerId]] = {}
        self._owning = dict(owning)
        self._wanted: dict[int, list[PeerId]] = {}
        """The owners of each stage, and those that would be the next."""
        self._reach: dict[PeerId, frozenset[PeerId]] = {}
        self._taking: dict[int, list[PeerId]] | None = None

    def over(self, peers: Peers) -> "Participants":
        """The choice among other peers, with the same past. It takes no heartbeats."""
        rest = copy(self)
        rest._peers = peers
        rest._together = dict(self._together)
        rest._owning = dict(self._owning)
        rest._wanted = dict(self._wanted)
        rest._taking = None
        return rest

    def heard(self, e: ev.Heartbeat, moved: bool) -> None:
        """A peer reports its connections. ``moved``: it is new, or its stage or its leaving has
        changed."""
        reach = frozenset(p for p, _ in e.capacity.costs.ways)
        if moved or reach != self._reach.get(e.peer):
            self._reach[e.peer] = reach
            self._taking = None

    def gone(self, peer: PeerId) -> None:
        """A peer is here no more."""
        self._taking = None
        self._reach.pop(peer, None)

    def by_stage(self) -> Mapping[int, Sequence[PeerId]]:
        """Replicas that take part, by stage."""
        present = self._peers.present()
        if not self._prove:
            return present
        if self._taking is None:
            self._taking = {s: self._joined(s, peers) for s, peers in present.items()}
        return self._taking

    def all(self) -> list[PeerId]:
        """Replicas that take part, one stage after another."""
        return [p for peers in self.by_stage().values() for p in peers]

    def proven(self, a: PeerId, b: PeerId) -> bool:
        """Return True if two peers reach each other: both say so. Always True if no proof is asked
        for."""
        return (
            not self._prove
            or a == b
            or (b in self._reach.get(a, ()) and a in self._reach.get(b, ()))
        )

    def may_own(self, stage: int) -> set[PeerId]:
        """Replicas of a stage that may own parts of it: every other replica reaches them."""
        taking = self.by_stage()[stage]
        if self._prove:
            return self._owning[stage]
        return set(taking)

    def apart(self) -> list[tuple[PeerId, PeerId]]:
        """Pairs of peers without proof that they reach each other. Each pair keeps its first peer
        out; the second is the leader, if it is heard itself, or an owner of the same stage."""
        taking = self.by_stage()
        return [
            (peer, other)
            for stage, peers in self._peers.present().items()
            for peer in peers
            if peer not in taking[stage]
            for other in dict.fromkeys([self._peers.leader, *sorted(self._owning[stage])])
            if other in self._peers.candidates and not self.proven(peer, other)
        ]

    def lacking(self, peer: PeerId) -> list[PeerId]:
        """Peers to which ``peer`` should find a way, at most :data:`MOST_LACKING`: the peers of any
        stage with a way to it; for an owner also all replicas of its stage, for others the owners,
        and while these are few their successors. The last choice of replicas decides; this method
        makes no new one, because no recording holds the moment of a question."""
        here = self._peers.candidates.get(peer)
        present = self._peers.present()
        if not self._prove or here is None or here.stage not in present:
            return []
        wanted = dict.fromkeys(self._wanted.get(here.stage, ()))
        if peer in wanted:
            leader = self._peers.leader
            wanted = dict.fromkeys(p for p in present[here.stage] if self.proven(p, leader))
        # Those that have found a way themselves first: an owner's list may be full of others.
        wanted = dict.fromkeys(p for p, reach in self._reach.items() if peer in reach) | wanted
        return [p for p in wanted if p != peer and p not in self._reach[peer]][:MOST_LACKING]

    def _joined(self, stage: int, peers: Sequence[PeerId]) -> list[PeerId]:
        """Replicas that reach the leader and every owner of the stage, so that each can give to
        every owner. Peers chosen before stay as long as that holds, before others come in.

        The owners reach each other: :data:`ALL_OWN` replicas, and all that owned parts before.
        Every replica that all chosen ones reach becomes an owner too.
        """
        leader = self._peers.leader
        before = self._together.get(stage, set())
        owned = self._owning.get(stage, set())
        here = {p for p in peers if self.proven(p, leader)}
        # A peer reports few ways, so this is no look at every pair.
        reached = {
            p: {p} | {other for other in self._reach[p] & here if p in self._reach[other]}
            for p in here
        }

        def rank(peer: PeerId) -> tuple[bool, bool, bool, bool, bool, int, PeerId]:
            # Peers that the leader has worked with come before a crowd that vouches for itself.
            new = peer not in owned, peer not in before, peer not in self._peers.known
            tried = peer in self._peers.probation
            return peer != leader, *new, tried, -len(reached[peer]), peer

        order = sorted(here, key=rank)
        owners: set[PeerId] = set()
        for peer in order:
            if (len(owners) < ALL_OWN or peer in owned) and owners <= reached[peer]:
                owners.add(peer)
        chosen = {p for p in here if owners <= reached[p]}
        next_ones = [p for p in order if p not in owners]
        self._wanted[stage] = [*sorted(owners), *next_ones[: max(0, ALL_OWN - len(owners))]]
        self._owning[stage] = owners | {p for p in chosen if chosen <= reached[p]}
        self._together[stage] = chosen
        return sorted(chosen)
