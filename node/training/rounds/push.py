"""An outer round without a barrier at one member: its cell pushes to who serves; who serves answers
each cell by itself. Enters: a plan, who takes part in an attempt, what it would ask with a barrier.
Leaves: what it asks of the exchange. Never: what becomes of a push
(:mod:`node.averaging.strategies.pushes`), what a server keeps
(:mod:`node.training.rounds.serving`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from node.averaging.exchange.request import RoundRequest
from node.averaging.strategies.diloco import pushed
from node.core.ids import PeerId
from node.core.journey import Plan, PlanMember
from node.training.rounds.anchor import Anchor
from node.training.state.engines import Engines


def pushing(
    base: RoundRequest,
    plan: Plan,
    members: Sequence[PlanMember],
    heard: Mapping[str, Tensor],
    anchor: Anchor,
    engines: Engines,
    me: PeerId,
) -> RoundRequest:
    """``base`` without a barrier. ``members`` take part in the attempt; who is none of them serves,
    and asks for nothing. ``heard``: what earlier attempts under this plan have brought here, which
    a part that is served here from now on begins with.
    """
    settings, bound = anchor.settings, anchor.settings.staleness
    # All pushes of a round together are one step along their mean, as with a barrier.
    unit = next(plan.unit_of(m) for m in plan.members if m.peer == me)
    rate = settings.lr / max(1, len({m.cell for m in plan.unit(unit) if m.current}))
    mine = {name for name, owner in base.owners.items() if owner == me}

    def step(value: Tensor, delta: Tensor) -> Tensor:
        return pushed(value, delta, rate)

    def apply(cell: int, names: tuple[str, ...], deltas: Mapping[str, Tensor]) -> dict[str, Tensor]:
        values, age = anchor.serving.take(plan.hash, cell, names, deltas, bound, step)
        if deltas:
            engines.metrics.pushes_total.labels(result="refused" if age else "applied").inc()
        if age:
            engines.journal.emit(
                "averaging",
                "push-refused",
                f"a push of cell {cell} is not applied: {age} others were since its last pull",
                "warning",
                epoch=plan.epoch,
                cell=cell,
                age=age,
            )
        return values

    begun = anchor.serving.opens(
        plan.hash, mine, lambda name: heard[name] if name in heard else anchor.pulled(name)
    )
    if begun:
        text = f"begins to serve {len(begun)} parts with what its cell has pulled last"
        engines.journal.emit("averaging", "serving-begun", text, epoch=plan.epoch, parts=len(begun))
    owners, taking_part = set(base.owners.values()), {m.peer for m in members}
    cells = {m.peer: m.cell for m in members} | {me: plan.home(me)}
    everybody = owners | cells.keys()
    return replace(
        base,
        members=tuple(sorted(everybody)),
        cells=cells,
        apply=apply,
        form=replace(base.form, down="fp32"),
        gathers=me in taking_part,
        listeners=base.listeners | (everybody - taking_part),
    )
