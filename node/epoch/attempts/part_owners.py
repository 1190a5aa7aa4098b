"""Owners of the parts during one attempt at an epoch: the plan's owners, and members that step in
for dead or stuck ones. Pure. Enters: reports of incomplete rounds. Leaves: the owners of the next
round. Never: the choice of owners in a plan (:mod:`node.epoch.leader.planning`)."""

from collections.abc import Collection, Mapping, Sequence

from node.core.ids import PeerId
from node.core.journey import Plan, PlanMember
from node.epoch import events as ev
from node.epoch.facts import Assign
from node.epoch.pace import ALL_OWN

STUCK_ROUNDS = 2
"""Rounds in a row without its parts after which an owner that lives, but does not step, owns
nothing in this epoch."""


class PartOwners:
    """Owners of the parts of ``plan``."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.changed: dict[str, PeerId] = {}
        """Owners that differ from the plan's, by part."""
        self._stuck: dict[PeerId, int] = {}
        """Rounds in a row in which a living owner did not get its parts stepped."""

    def parts(self, peer: PeerId) -> set[str]:
        """The parts that a peer owns."""
        return {part for part, owner in self._all().items() if owner == peer}

    def holders(self, ended: Mapping[PeerId, ev.Incomplete]) -> dict[str, PeerId]:
        """For each part that members hold fresh, the first of them that is not its owner, which may
        give it to nobody."""
        owners = self._all()
        found: dict[str, PeerId] = {}
        for peer, outcome in ended.items():
            for part in outcome.holds:
                if owners.get(part) != peer:
                    found.setdefault(part, peer)
        return found

    def blame(self, ended: Mapping[PeerId, ev.Incomplete]) -> None:
        """Count a round that nobody completed as stuck, for each living owner that did not step its
        parts: its own report lacks some of them, or most of the others report that it gave them
        nothing."""
        now: set[PeerId] = set()
        for peer, outcome in ended.items():
            mine = self.parts(peer)
            accusers = sum(peer in o.failed for other, o in ended.items() if other != peer)
            if not mine <= set(outcome.holds) or (mine and 2 * accusers > len(ended) - 1):
                now.add(peer)
        self._stuck = {p: rounds for p, rounds in self._stuck.items() if p not in ended} | {
            p: self._stuck.get(p, 0) + 1 for p in now
        }

    def reown(
        self,
        stage: int,
        living: Sequence[PlanMember],
        dead: Collection[PeerId],
        holders: Mapping[str, PeerId],
        assign: Assign,
    ) -> dict[str, PeerId]:
        """Move the parts of ``dead`` owners, and of owners stuck for :data:`STUCK_ROUNDS`, to a
        peer that holds them fresh, else to the one that ``assign`` chooses among the ``living``
        members of the stage. If all living owners are stuck, only parts of dead owners move.
        Returns the stage's owners that differ from the plan's."""
        peers = {m.peer for m in self._plan.stage(stage)}
        current = {
            part: self.changed.get(part, owner)
            for part, owner in self._plan.owners.items()
            if owner in peers
        }
        able_here = [(m.peer, m.speed) for m in living if m.current]
        if not able_here:
            return {}
        hung = {p for p, rounds in self._stuck.items() if rounds >= STUCK_ROUNDS}
        if len(peers) > ALL_OWN:
            # Only of the owners it is known that every other replica reaches them.
            owning = set(current.values()) - hung
            able_here = [(p, speed) for p, speed in able_here if p in owning] or able_here
        able = [(p, speed) for p, speed in able_here if p not in hung]
        useless = {*dead, *hung}
        if not able:
            useless = set(dead)
            able = able_here
        orphans = {p for p, o in current.items() if o in useless}
        if orphans:
            kept = {part: owner for part, owner in current.items() if part not in orphans}
            repaired = assign(stage, able, kept, {})
            for part in orphans:
                self.changed[part] = holders.get(part, repaired[part])
        return {part: self.changed[part] for part in current if part in self.changed}

    def _all(self) -> dict[str, PeerId]:
        """The owner of each part of every stage."""
        return {**self._plan.owners, **self.changed}
