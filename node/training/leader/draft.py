"""Who does what in a plan: who starts from its version, who owns which part. Pure. Enters: what the
leader has heard of its peers, what goes with the version. Leaves: members, owners, digests. Never:
a micro-batch (that is the scheduler's), a clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from node.core.ids import PeerId
from node.core.journey import PlanMember, Version
from node.training.leader.roster import Roster
from node.training.protocol.plan_context import PlanContext


@dataclass(frozen=True)
class Draft:
    """``before``: who owned each part until now. ``digests``: what every stage holds."""

    members: tuple[PlanMember, ...]
    owners: dict[str, PeerId]
    before: dict[str, PeerId]
    digests: dict[int, str]

    @property
    def by_stage(self) -> dict[int, list[tuple[PeerId, float]]]:
        """Current members with their speeds."""
        found: dict[int, list[tuple[PeerId, float]]] = {}
        for m in self.members:
            if m.current:
                found.setdefault(m.stage, []).append((m.peer, m.speed))
        return found


def draft(
    roster: Roster, base: Version, past: PlanContext, assign: Callable[..., dict[str, PeerId]]
) -> Draft:
    """For a plan that starts from ``base``, on whose digests the roster has agreed. ``assign``
    places the parts of one stage.

    Raises OutOfResources when the members' memory does not hold the optimizer's state.
    """
    members: list[PlanMember] = []
    owners: dict[str, PeerId] = {}
    for stage, peers in roster.replicas().items():
        able = [(p, roster.speed(p)) for p in peers if roster.can_start(p, base)]
        if not able:
            # the epoch goes around this stage, and whoever is here has nobody to listen to
            continue
        current = {p for p, _ in able}
        members += [PlanMember(p, stage, roster.speed(p), p in current) for p in peers]
        room = {p: r for p in current if (r := roster.candidates[p].room)}
        owners |= assign(stage, able, past.owners or None, *([room] if room else []))
    stages = {m.stage for m in members}
    return Draft(
        tuple(sorted(members, key=lambda m: m.peer)),
        owners,
        {part: past.owners[part] for part in owners if part in past.owners},
        {stage: digest for stage, digest in roster.agreed.items() if stage in stages},
    )
