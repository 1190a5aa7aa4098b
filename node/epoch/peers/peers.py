"""The peers that the leader has heard of, by their newest heartbeats. Pure. Enters: heartbeats,
reports of commits, losses. Leaves: the peers of each stage. Never: their signs of life
(:mod:`node.epoch.peers.life`), the ways between them
(:mod:`node.epoch.peers.participants`)."""

from collections.abc import Collection, Mapping, Sequence
from copy import copy
from dataclasses import replace

from node.core.ids import PeerId
from node.core.journey import Plan, Version
from node.epoch import events as ev


class Peers:
    """Peers of a run of ``stages`` block stages, as the ``leader`` has heard. ``known``: peers that
    the leader has worked with."""

    def __init__(self, stages: int, leader: PeerId, known: frozenset[PeerId]) -> None:
        self._stages = stages
        self.leader = leader
        self.known = known
        self.candidates: dict[PeerId, ev.Heartbeat] = {}
        """The last heartbeat of each peer, updated with its commits since."""
        self.probation: frozenset[PeerId] = frozenset()
        """Peers on probation: they do no work if their stage can do without them."""
        self._present: dict[int, list[PeerId]] | None = None

    def met(self, known: frozenset[PeerId]) -> None:
        """The leader has worked with these peers."""
        self.known = known

    def put_on_probation(self, peers: frozenset[PeerId]) -> None:
        """These peers are on probation, and no others."""
        self.probation = peers

    def hear(self, e: ev.Heartbeat) -> bool:
        """Take a heartbeat. Returns True if the peer is new, or its stage or its leaving has
        changed."""
        old = self.candidates.get(e.peer)
        same = old is not None and (old.stage, old.leaving) == (e.stage, e.leaving)
        if not same:
            self._present = None
        self.candidates[e.peer] = e
        return not same

    def committed(self, e: ev.Committed, plan: Plan, made: Version, tokens: int) -> None:
        """A member reports that it holds the version that a plan made. ``tokens``: counted by this
        plan."""
        c = self.candidates.get(e.peer)
        member = plan.member(e.peer)
        if c is None or member is None:
            return
        reachable = c.reachable
        if member.current:
            # Sorted, as the member sorts them: another order would look like a change.
            reachable = tuple(sorted({*c.reachable, plan.base}))
        self.candidates[e.peer] = replace(
            c,
            at=made,
            digest=e.digest,
            capacity=replace(c.capacity, speed=e.speed or c.capacity.speed),
            reachable=reachable,
            tokens=plan.tokens + tokens,
            orphan=plan.electorate.orphan,
        )

    def gone(self, peer: PeerId) -> ev.Heartbeat | None:
        """The peer is here no more. Returns its last heartbeat, None for a stranger."""
        self._present = None
        return self.candidates.pop(peer, None)

    def without(self, away: Collection[PeerId]) -> "Peers":
        """A copy, as if these peers had left."""
        rest = copy(self)
        rest.candidates = {p: c for p, c in self.candidates.items() if p not in away}
        rest._present = None
        return rest

    def present(self) -> Mapping[int, Sequence[PeerId]]:
        """Peers that are here and do not leave, by stage."""
        if self._present is None:
            stages = self._present = {stage: list[PeerId]() for stage in range(self._stages + 1)}
            for peer in sorted(self.candidates):
                c = self.candidates[peer]
                if c.stage in stages and not c.leaving:
                    stages[c.stage].append(peer)
        return self._present

    def room(self, peers: Collection[PeerId]) -> dict[PeerId, int]:
        """Bytes of optimizer state that each of these peers can hold, where they are known."""
        return {p: room for p in peers if (room := self.candidates[p].capacity.room)}

    @property
    def leaving(self) -> set[PeerId]:
        """Peers that have said that they leave."""
        return {p for p, c in self.candidates.items() if c.leaving}
