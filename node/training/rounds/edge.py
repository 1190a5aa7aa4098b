"""An outer round along directed edges at one member: its cell's own round, and what it gives to the
rounds of others. Enters: a plan, the leader's word on an attempt, what this cell has. Leaves: what
its round brought. Never: who sends to whom, and what that weighs
(:mod:`node.training.protocol.edges`).

In its own round every owner gives what the cell has for the parts it owns, so that nothing of it
has to travel and nobody's death takes it away; the speakers of the cells that send here give
theirs. What a speaker gives elsewhere is what it had before the round: its own round is over only
when that has gone out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from node.averaging.exchange.request import RoundOutcome, RoundRequest
from node.averaging.exchange.service import CellRound
from node.core.ids import PeerId
from node.core.journey import Plan, Unit
from node.training.protocol import events as ev
from node.training.protocol.edges import party, targets
from node.training.protocol.meetings import speakers
from node.training.rounds.common import Rounds


async def along(
    exchange: CellRound,
    base: RoundRequest,
    plan: Plan,
    r: ev.RoundArrived,
    rounds: Rounds,
    me: PeerId,
) -> RoundOutcome:
    """One attempt. ``base``: what the rounds have in common, with ``owners`` of this cell, and what
    it has as ``gradients``.

    Raises ValueError for a note that contradicts the plan.
    """
    unit = rounds.unit(plan)
    elsewhere: list[RoundRequest] = []
    if not r.attempt and base.gradients is not None and me in speakers(plan, unit, r.dead):
        elsewhere = [
            _elsewhere(base, plan, r, (unit[0], cell), rounds, me) for cell in targets(plan, unit)
        ]
    here = _here(base, plan, r, unit, me)
    outcome, sent = await asyncio.gather(
        exchange.run(here, None), _give(exchange, elsewhere), return_exceptions=True
    )
    if isinstance(outcome, BaseException):
        raise outcome
    if isinstance(sent, BaseException):
        raise sent
    return replace(outcome, nbytes=outcome.nbytes + sent)


async def _give(exchange: CellRound, requests: Sequence[RoundRequest]) -> int:
    """Give to the rounds of others, side by side, until the last one has it: the tensor bytes that
    went. Raises ValueError."""
    found = await asyncio.gather(
        *(exchange.give(r) for r in requests if r.tokens), return_exceptions=True
    )
    for wrong in found:
        if isinstance(wrong, BaseException):
            raise wrong
    return sum(n for n in found if isinstance(n, int))


def _here(
    base: RoundRequest, plan: Plan, r: ev.RoundArrived, unit: Unit, me: PeerId
) -> RoundRequest:
    return replace(_weighed(base, plan, r, unit, me), inward=True)


def _elsewhere(
    base: RoundRequest, plan: Plan, r: ev.RoundArrived, unit: Unit, rounds: Rounds, me: PeerId
) -> RoundRequest:
    """The round of a cell that this one sends to."""
    planned = plan.averagers(unit)
    if not rounds.shapes.keys() <= planned.keys():
        raise ValueError(
            f"cell {unit[1]}, which this one is to send to, has parts that nobody averages"
        )
    owners = {name: planned[name] for name in rounds.shapes}
    # With a momentum beside it a part travels as two, to one owner.
    both = {name: owners[name.partition("#")[0]] for name in base.shapes}
    return _weighed(
        replace(base, owners=both, ownership_hash=rounds.hash_of(owners)), plan, r, unit, me
    )


def _weighed(
    base: RoundRequest, plan: Plan, r: ev.RoundArrived, unit: Unit, me: PeerId
) -> RoundRequest:
    """Who takes part in the round of a cell, and what each weighs there."""
    cell, weigh = party(plan, unit, r.attempt, r.dead)
    return replace(
        base,
        members=tuple(sorted(cell | weigh.keys())),
        listeners=cell - {me},
        tokens=0 if base.gradients is None else weigh.get(me, 0),
        caps=replace(base.caps, most=max(weigh.values(), default=1), allowed=weigh),
    )
