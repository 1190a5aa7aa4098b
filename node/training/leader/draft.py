"""Who does what in a plan: everybody in a cell, every cell's parts with owners, and in an outer
round cells in groups. Pure. Enters: what the leader has heard of its peers, what goes with the
version. Leaves: members, owners, digests. Never: a micro-batch (that is the scheduler's), a
clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from node.core.ids import PeerId
from node.core.journey import PlanMember, Unit, Version, in_cell, of_cell
from node.training.leader.roster import Roster
from node.training.protocol.cells import ANY, arrange
from node.training.protocol.edges import mass_after, mass_of
from node.training.protocol.meetings import Meetings
from node.training.protocol.plan_context import PlanContext


@dataclass(frozen=True)
class Draft:
    """``before``: who owned each part of each cell until now, in the cell it was cut from if it is
    new. ``digests``: what every cell holds. ``reducers``: in an outer round, who averages which
    part in each group. ``worked``: what each cell has done since it last met others, and before it
    was cut from another the other. ``senders``, ``mass`` and ``fragment``: as in a plan."""

    members: tuple[PlanMember, ...]
    owners: dict[str, PeerId]
    before: dict[str, PeerId]
    digests: dict[Unit, str]
    reducers: dict[str, PeerId] = field(default_factory=dict)
    worked: dict[Unit, int] = field(default_factory=dict)
    senders: dict[Unit, tuple[int, ...]] = field(default_factory=dict)
    mass: dict[Unit, int] = field(default_factory=dict)
    fragment: int = 0

    @property
    def cells(self) -> dict[int, dict[int, list[tuple[PeerId, float]]]]:
        """Current members with their speeds, by stage and cell."""
        found: dict[int, dict[int, list[tuple[PeerId, float]]]] = {}
        for m in self.members:
            if m.current:
                found.setdefault(m.stage, {}).setdefault(m.cell, []).append((m.peer, m.speed))
        return found


def draft(
    roster: Roster,
    base: Version,
    past: PlanContext,
    assign: Callable[..., dict[str, PeerId]],
    most: int = 0,
    meetings: Meetings | None = None,
    outer: int = 0,
    sends: int = 0,
) -> Draft:
    """For a plan that starts from ``base``, on whose digests the roster has agreed. ``assign``
    places the parts of one cell; ``most`` peers are in a cell (0: all of a stage); ``meetings``: of
    cells, None where there is one only; ``outer``: number of the outer round that this is,
    ``sends``: of the one whose fragment is sent with this plan, 0 for none.

    Raises OutOfResources when the members' memory does not hold the optimizer's state.
    """
    mend = meetings is not None and base.epoch > 0 and meetings.number(base.epoch - 1) > 0
    members, parents = _members(roster, base, past, most, mend)
    units = sorted({(m.stage, m.cell) for m in members if m.current})
    owners: dict[str, PeerId] = {}
    before: dict[str, PeerId] = {}
    for stage, cell in units:
        able = [
            (m.peer, m.speed) for m in members if (m.stage, m.cell) == (stage, cell) and m.current
        ]
        room = {p: r for p, _ in able if (r := roster.candidates[p].room)}
        parent = parents.get((stage, cell), ANY)
        known = of_cell(past.owners, cell if parent == ANY else parent)
        # A cell that was cut from another begins with nobody's habits: half of the owners there are
        # elsewhere.
        previous = known if parent == ANY and known else None
        found = assign(stage, able, previous, *([room] if room else []))
        owners |= {in_cell(part, cell): peer for part, peer in found.items()}
        before |= {in_cell(part, cell): known[part] for part in found if part in known}
    agreed = {unit: roster.agreed.get((unit[0], parents.get(unit, unit[1]))) for unit in units}
    digests = {unit: digest for unit, digest in agreed.items() if digest is not None}
    worked = {
        unit: n
        for unit in units
        if (n := past.worked.get((unit[0], parents.get(unit, unit[1])), 0))
    }
    mass: dict[Unit, int] = {}
    if meetings is not None and meetings.settings.strategy == "push-sum":
        had = past.mass if past.flowed is None else mass_after(past.flowed, roster.arrived(base))
        mass = mass_of(had, members, parents, lambda peer: roster.candidates[peer].cell)
    if meetings is None or not (outer or sends):
        return Draft(members, owners, before, digests, worked=worked, mass=mass)
    fragment = meetings.fragment(base.epoch + (0 if outer else meetings.settings.overlap))
    grouped, reducers, senders = _meeting(meetings, members, outer or sends, fragment)
    return Draft(
        grouped, owners, before, digests, reducers, worked, senders, mass, fragment if outer else 0
    )


def _members(
    roster: Roster, base: Version, past: PlanContext, most: int, mend: bool
) -> tuple[tuple[PlanMember, ...], dict[Unit, int]]:
    """Everybody who takes part, each in a cell; and for every new cell the one it was cut from."""
    found: list[PlanMember] = []
    parents: dict[Unit, int] = {}
    for stage, peers in roster.replicas().items():
        stands = {p: roster.stands(p, base) for p in peers}
        if not any(stands.values()):
            # the epoch goes around this stage, and whoever is here has nobody to listen to
            continue
        homes = {p: roster.candidates[p].cell for p in peers}
        made = arrange(stands, homes, most, set(past.owners.values()), mend)
        found += [
            PlanMember(p, stage, roster.speed(p), p not in made.listeners, cell)
            for p, cell in made.cells.items()
        ]
        parents |= {(stage, new): old for new, old in made.parents.items()}
    return tuple(sorted(found, key=lambda m: m.peer)), parents


def _meeting(
    meetings: Meetings, members: Sequence[PlanMember], number: int, fragment: int
) -> tuple[tuple[PlanMember, ...], dict[str, PeerId], dict[Unit, tuple[int, ...]]]:
    """The members with their groups in an outer round, who averages which part of the fragment in
    each group, and along edges who sends to whom."""
    grouped: list[PlanMember] = []
    reducers: dict[str, PeerId] = {}
    senders: dict[Unit, tuple[int, ...]] = {}
    for stage in sorted({m.stage for m in members}):
        replicas = [m for m in members if m.stage == stage]
        cells = sorted({m.cell for m in replicas})
        groups, servers = meetings.groups(cells, number)
        senders |= {
            (stage, cell): sources for cell, sources in meetings.senders(cells, number).items()
        }
        grouped += [replace(m, group=groups[m.cell]) for m in replicas]
        for group in sorted(set(groups.values())):
            there = [m for m in replicas if groups[m.cell] == group]
            reducers |= {
                in_cell(n, group): p
                for n, p in meetings.averagers(stage, there, servers, fragment).items()
            }
    return tuple(sorted(grouped, key=lambda m: m.peer)), reducers, senders
