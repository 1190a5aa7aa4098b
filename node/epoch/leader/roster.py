"""The roster of one leader: the peers that are here, their signs of life, their speeds, which of
them take part, and the versions that they hold. Pure. Enters: heartbeats, losses. Leaves: the view
that plans are made from. Never: a plan."""

import hashlib
from collections import Counter
from collections.abc import Collection, Mapping
from copy import copy
from types import MappingProxyType

from node.core.ids import PeerId
from node.epoch import events as ev
from node.epoch.facts import Waits
from node.epoch.peers.life import SignsOfLife
from node.epoch.peers.participants import Participants
from node.epoch.peers.peers import Peers
from node.epoch.peers.speeds import Speeds
from node.epoch.peers.versions import Stood, Versions

NO_LEADER = PeerId("")
NO_OWNERS: Mapping[int, set[PeerId]] = MappingProxyType({})


class Roster:
    """The roster of ``leader`` in a run of ``stages`` block stages. ``prove``: only peers take part
    that are proven to reach the leader and every owner of their stage; ``known``: peers that the
    leader has worked with; ``owning``: owners in the last plan, by stage; ``stood`` as for
    :class:`Versions`; ``late_s`` as for :class:`SignsOfLife`; ``coarsest`` as for
    :class:`Speeds`."""

    def __init__(
        self,
        stages: int,
        leader: PeerId = NO_LEADER,
        prove: bool = False,
        known: frozenset[PeerId] = frozenset(),
        owning: Mapping[int, set[PeerId]] = NO_OWNERS,
        *,
        stood: Stood = lambda version: {},
        late_s: float = Waits.late_s,
        coarsest: float = 1.0,
    ) -> None:
        self.life = SignsOfLife(late_s)
        self.peers = Peers(stages, leader, known)
        self.participants = Participants(self.peers, prove, owning)
        self.versions = Versions(self.peers, self.participants, stood)
        self.speeds = Speeds(self.peers, coarsest)

    def hear(self, e: ev.Heartbeat, now: float) -> None:
        """Take a peer's heartbeat."""
        moved = self.peers.hear(e)
        self.participants.heard(e, moved)
        self.speeds.heard()
        self.life.probed(e.peer)
        self.life.alive(e.peer, now)

    def gone(self, peer: PeerId) -> ev.Heartbeat | None:
        """The peer is here no more. Returns its last heartbeat, None for a stranger."""
        self.participants.gone(peer)
        self.speeds.heard()
        self.life.forget(peer)
        return self.peers.gone(peer)

    def without(self, away: Collection[PeerId]) -> "Roster":
        """A copy of this roster for planning, as if these peers had left. It takes no
        heartbeats."""
        rest = copy(self)
        rest.peers = self.peers.without(away)
        rest.participants = self.participants.over(rest.peers)
        rest.versions = self.versions.over(rest.peers, rest.participants)
        rest.speeds = self.speeds.over(rest.peers)
        return rest

    def anchor(self) -> str:
        """64 hex digits for the anchors of all stages, each as most replicas have it; empty if a
        stage has none."""
        said = []
        # On a copy: to be asked from outside must not change the choice of replicas.
        rest = self.without(())
        for stage, peers in sorted(rest.participants.by_stage().items()):
            votes = Counter(c for p in peers if (c := self.peers.candidates[p].outer.anchor))
            if not votes:
                return ""
            said.append(f"{stage}:{min(votes, key=lambda name: (-votes[name], name))}")
        if not said:
            return ""
        return hashlib.sha256("/".join(said).encode()).hexdigest()
