"""An outer round along directed edges at one simulated member, as ``node.training.rounds.edge``
does it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from node.core.ids import PeerId
from node.core.journey import Plan, Unit
from node.optim.ownership import ownership_hash
from node.sim.rounds import Request
from node.sim.values import Share, Value
from node.training.protocol import events as ev
from node.training.protocol.edges import arrived, party, targets
from node.training.protocol.meetings import speakers

if TYPE_CHECKING:
    from node.sim.peer import SimPeer

Ended = Callable[[dict[str, Value], tuple[str, ...], tuple[PeerId, ...], tuple[str, ...]], None]


def along(
    peer: SimPeer,
    base: Request,
    plan: Plan,
    r: ev.RoundArrived,
    share: Share | None,
    step: Any,
    then: Ended,
) -> None:
    """The round of this cell, and what it gives to those of others; ``then`` when all of it is
    over. ``share``: what the cell has, None for a listener. Raises ValueError for a round that is
    not newer than the last."""
    me, rounds, labour = peer.name, peer.rounds, peer.labour
    stage = labour.stage
    member = plan.member(me)
    unit = plan.unit_of(member) if member is not None else (stage, 0)
    under_way, outcome = [1], list[Any]()

    def weighed(to: Unit, **changes: Any) -> Request:
        cell, weigh = party(plan, to, r.attempt, r.dead)
        mine = share._replace(tokens=weigh[me]) if share is not None and me in weigh else None
        members, most = tuple(sorted(cell | weigh.keys())), max(weigh.values(), default=1)
        return replace(
            base, members=members, listeners=cell - {me}, total=most, share=mine, **changes
        )

    def over() -> None:
        under_way[0] -= 1
        if not under_way[0]:
            then(*outcome)

    def ended(fresh: dict[str, Value], missing: tuple[str, ...], *more: Any) -> None:
        outcome.extend((fresh, missing, *more))
        if not missing:
            by = rounds.contributors(plan.epoch)
            labour.arrived = arrived(plan, unit, [by.get(name, ()) for name in labour.names])
        over()

    rounds.run(weighed(unit, inward=True), step, ended)
    if r.attempt or share is None or me not in speakers(plan, unit, r.dead):
        return
    for cell in targets(plan, unit):
        planned = plan.averagers((stage, cell))
        owners = {name: planned[name] for name in labour.names}
        hashed = ownership_hash(labour.setup.parts[stage], owners, "simulated")
        gift = weighed((stage, cell), owners=owners, ownership_hash=hashed)
        if gift.share is not None:
            under_way[0] += 1
            rounds.give(gift, lambda *_: over())
