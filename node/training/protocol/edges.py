"""Outer rounds along directed edges: what every cell weighs in what another one makes of it, and
what it weighs afterwards. Pure. Enters: a plan with its senders and masses, what arrived. Leaves:
weights, the masses of the next plan. Never: which edges there are (the strategy's), a tensor.

Every cell is the receiver of a group of its own: its owners give what it has, one member of each
cell that sends to it gives what that has, only it gathers the mean. All give what they had before
the round.

On a ring all weigh the same. Push-sum (Kempe et al. 2003; SGP, Assran et al. 2019): a cell has a
value z and a mass w. It gives each cell it sends to the share w // (1 + targets), and keeps the
rest; the new value of a cell is the mean of what came, weighted by these shares, and its new mass
their sum. Masses are whole numbers, so their sum stays what it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from node.core.ids import PeerId
from node.core.journey import Plan, PlanMember, Unit
from node.training.protocol.cells import ANY
from node.training.protocol.meetings import speakers

WHOLE = 1 << 20
"""The mass a cell begins with."""


def targets(plan: Plan, unit: Unit) -> tuple[int, ...]:
    """The cells of its stage that this cell sends to."""
    return tuple(
        sorted(
            cell
            for (stage, cell), senders in plan.senders.items()
            if stage == unit[0] and unit[1] in senders
        )
    )


def flows(plan: Plan, unit: Unit) -> dict[int, int]:
    """What each cell weighs in the mean that this cell makes, itself included; a cell whose share
    is nothing is not in it."""
    return _flows(plan, unit, _fans(plan))


def party(
    plan: Plan, unit: Unit, attempt: int, dead: Sequence[PeerId]
) -> tuple[frozenset[PeerId], dict[PeerId, int]]:
    """The round of one cell: (its living members, who gather; what those weigh who give). Any of
    its current members may own a part and give what the cell has of it. The speakers of other cells
    give once: a repair is for what owners left behind."""
    stage, here = unit
    flow = flows(plan, unit)
    cell = [m for m in plan.unit(unit) if m.peer not in dead]
    weigh = {m.peer: flow[here] for m in cell if m.current}
    if not attempt:
        weigh |= {
            peer: flow[c] for c in flow if c != here for peer in speakers(plan, (stage, c), dead)
        }
    return frozenset(m.peer for m in cell), weigh


def arrived(
    plan: Plan, unit: Unit, contributors: Collection[Collection[PeerId]]
) -> tuple[int, ...]:
    """The cells of which every part has something, this cell itself included; ``contributors``: of
    each part."""
    cells = [{plan.home(peer) for peer in behind} for behind in contributors]
    return tuple(sorted({unit[1], *(set.intersection(*cells) if cells else ())}))


def mass_after(plan: Plan, told: Mapping[Unit, Collection[int]]) -> dict[Unit, int]:
    """The masses when ``plan``, a round along edges, is done. ``told``: by receiver, whose share
    has arrived there. What has not arrived, or is not told of, stays with its sender."""
    moved: dict[Unit, int] = {}
    fans = _fans(plan)
    for unit in plan.senders:
        for cell, share in _flows(plan, unit, fans).items():
            if cell != unit[1] and cell in told.get(unit, ()):
                moved[unit] = moved.get(unit, 0) + share
                moved[unit[0], cell] = moved.get((unit[0], cell), 0) - share
    return {unit: mass + moved.get(unit, 0) for unit, mass in plan.mass.items()}


def mass_of(
    before: Mapping[Unit, int],
    members: Sequence[PlanMember],
    parents: Mapping[Unit, int],
    home: Callable[[PeerId], int],
) -> dict[Unit, int]:
    """The masses of the cells that ``members`` are in now. ``parents``: what new ones were cut
    from; ``home``: where a peer was.

    Cells that were cut share what they had. That of a cell that is no more goes where its peers
    went, and is gone with the dead; once half of a stage's is gone, all that is left counts twice.
    Who has none begins with :data:`WHOLE`; nobody has less than 1.
    """
    cells = sorted({(m.stage, m.cell) for m in members if m.current})
    came: dict[Unit, list[Unit]] = {}
    for stage, cell in cells:
        parent = parents.get((stage, cell), ANY)
        came.setdefault((stage, cell if parent == ANY else parent), []).append((stage, cell))
    mass: dict[Unit, int] = {}
    for origin, here in came.items():
        whole = before.get(origin, len(here) * WHOLE)
        for i, unit in enumerate(here):
            mass[unit] = max(1, whole // len(here) + (i < whole % len(here)))
    for origin in sorted(before.keys() - came.keys()):
        went = [
            m for m in members if (m.stage, m.cell) in mass and (m.stage, home(m.peer)) == origin
        ]
        if went:
            first = min(went, key=lambda m: (not m.current, m.peer))
            mass[first.stage, first.cell] += before[origin]
    for stage in {stage for stage, _ in cells}:
        here = [unit for unit in cells if unit[0] == stage]
        while 2 * sum(mass[unit] for unit in here) <= len(here) * WHOLE:
            mass |= {unit: 2 * mass[unit] for unit in here}
    return mass


def adds_up(plan: Plan, before: Plan) -> bool:
    """Whether the masses of a plan can be what ``before``, the plan that made its version, leaves,
    by :func:`mass_of`.

    Where every cell of a stage goes on their sum stays. A cell that is no more may have taken its
    mass along; a new one was cut from another or brings :data:`WHOLE`. All begin anew where nobody
    remembered the plan before.
    """
    for stage in {stage for stage, _ in before.mass}:
        now = {unit: mass for unit, mass in plan.mass.items() if unit[0] == stage}
        if all(mass == WHOLE for mass in now.values()):
            continue
        had = {unit: mass for unit, mass in before.mass.items() if unit[0] == stage}
        stayed = {(m.peer, m.cell) for m in plan.stage(stage) if m.current}
        there = {
            (stage, m.cell) for m in before.stage(stage) if m.current and (m.peer, m.cell) in stayed
        }
        # Cells that hold the same were cut from one another, and one of them may have the number of
        # another that is gone.
        held = [digest for unit, digest in plan.digests.items() if unit[0] == stage]
        least = (
            sum(had.values())
            if had.keys() <= now.keys() & there and len({*held}) == len(held)
            else 0
        )
        most = (
            sum(had.values())
            + WHOLE * len(now.keys() - had.keys())
            + sum(mass == 1 for mass in now.values())
        )
        full = len(now) * WHOLE
        if 2 * least <= full:
            most = max(most, full)  # it may have been doubled
        if not least <= sum(now.values()) <= most:
            return False
    return True


def _fans(plan: Plan) -> Counter[Unit]:
    """How many cells each cell sends to."""
    return Counter(
        (stage, cell) for (stage, _), senders in plan.senders.items() for cell in senders
    )


def _flows(plan: Plan, unit: Unit, fans: Mapping[Unit, int]) -> dict[int, int]:
    """:func:`flows`, with :func:`_fans` counted once for all."""
    stage, here = unit
    senders = plan.senders.get(unit, ())
    if not plan.mass:
        return dict.fromkeys((here, *senders), 1)
    shares = {cell: _share(plan, (stage, cell), fans) for cell in (here, *senders)}
    kept = plan.mass.get(unit, WHOLE) - fans.get(unit, 0) * shares.pop(here)
    return {here: kept, **{cell: share for cell, share in shares.items() if share}}


def _share(plan: Plan, unit: Unit, fans: Mapping[Unit, int]) -> int:
    """What a cell gives to each that it sends to: less than all it has, so that it never has
    nothing."""
    return plan.mass.get(unit, WHOLE) // (1 + fans.get(unit, 0))
