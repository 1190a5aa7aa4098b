"""Tokens the plan gives to each replica of a stage: what a gradient can honestly stand for.
Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from node.core.ids import ENDS, PeerId
from node.core.journey import Plan


@dataclass(frozen=True, slots=True)
class Assigned:
    """``allowed``: tokens by member of the stage. ``total``: tokens of the micro-batches that
    count. ``most``: tokens of all micro-batches, counted or not: nobody can honestly have more
    behind its gradients."""

    allowed: dict[PeerId, int]
    total: int
    most: int


def assigned(plan: Plan, stage: int, sequence: int, dropped: Collection[int] = ()) -> Assigned:
    """For ``stage``, with samples of ``sequence`` tokens; ``dropped``: micro-batches that do not
    count.

    The same at every member, because it depends on the plan and the leader's note alone. A
    micro-batch counts for whom the plan names, also when a dead hop was replaced:
    :func:`node.averaging.reducers.weights.weights` leaves room for that.
    """
    allowed = {m.peer: 0 for m in plan.stage(stage) if m.current}
    total = most = 0
    for path in plan.paths:
        tokens = len(path.samples) * sequence
        most += tokens
        total += tokens * (path.index not in dropped)
        peers = (
            {path.origin}
            if stage == ENDS
            else {hop.peer for hop in path.hops if hop.stage == stage}
        )
        for peer in peers & allowed.keys():
            allowed[peer] += tokens
    return Assigned(allowed, total, most)
