"""Journeys with holes: which hop comes next when stages are left out, and which journeys a plan
allows. Pure functions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median

from node.core.ids import ENDS, PeerId
from node.core.journey import Hop, Path, Plan, PlanMember
from node.pipeline.events import Claim, Direction

NOBODY = PeerId("")
"""The peer of a hop that a journey leaves out. The hop keeps its position, so keys mean the same to
everybody."""


def fewest_hops(stages: int, may_skip: float) -> int:
    """The block stages a journey must visit when ``may_skip`` of ``stages`` may be left out: one at
    least."""
    return max(1, stages - math.floor(may_skip * stages + 1e-9))


def visited(journey: Sequence[Hop]) -> int:
    """Block stages this journey visits."""
    return sum(hop.stage != ENDS and hop.peer != NOBODY for hop in journey)


def skipped(journey: Sequence[Hop], position: int) -> tuple[int, ...]:
    """The positions before ``position`` that are left out. Two tensors of one micro-batch are equal
    when these are."""
    return tuple(i for i in range(position) if journey[i].peer == NOBODY)


def beside(journey: Sequence[Hop], position: int, way: Direction) -> int:
    """The next position that is visited, onwards for FORWARD, back for BACKWARD; -1 or
    ``len(journey)`` beyond the ends."""
    step = 1 if way is Direction.FORWARD else -1
    at = position + step
    while 0 <= at < len(journey) and journey[at].peer == NOBODY:
        at += step
    return at


def current(plan: Plan) -> dict[int, list[PlanMember]]:
    """By stage the members that hold it in the plan's parameters, in PeerId order."""
    found: dict[int, list[PlanMember]] = {}
    for m in sorted(plan.members, key=lambda m: m.peer):
        if m.current:
            found.setdefault(m.stage, []).append(m)
    return found


def predicted(plan: Plan) -> tuple[dict[PeerId, float], dict[PeerId, float]]:
    """By peer of a block stage, the seconds of one micro-batch, and when one more than the plan
    gives it would be done, by the plan's speeds. A peer that was not measured counts with its
    stage's median; where none was, all count alike."""
    peers = {stage: cell for stage, cell in current(plan).items() if stage != ENDS}
    usual = {
        s: median(known) if (known := [m.speed for m in row if m.speed > 0]) else 1.0
        for s, row in peers.items()
    }
    each = {m.peer: 1 / (m.speed or usual[s]) for s, row in peers.items() for m in row}
    work = Counter(hop.peer for path in plan.paths for hop in path.hops)
    return each, {p: (work[p] + 1) * seconds for p, seconds in each.items()}


def misfit(
    path: Path,
    claim: Claim,
    way: Direction,
    me: PeerId,
    caller: PeerId,
    fewest: int,
    replicas: Callable[[int], Sequence[PeerId]],
) -> str:
    """Why this journey is not the plan's with replicas swapped and hops left out, or not
    ``caller``'s to send; or empty.

    ``replicas(stage)`` are the peers that may stand in for each other at a block stage.
    """
    planned, journey = path.journey, claim.journey
    if len(planned) != len(journey):
        return "the journey is not the plan's"
    for hop, meant in zip(journey, planned, strict=True):
        swapped = meant.stage != ENDS and (hop.peer == NOBODY or hop.peer in replicas(meant.stage))
        if hop.stage != meant.stage or (hop.peer != meant.peer and not swapped):
            return "the journey is not the plan's"
    if visited(journey) < min(fewest, len(path.hops)):
        return "the journey leaves out too much"
    sender = beside(
        journey,
        claim.position,
        Direction.BACKWARD if way is Direction.FORWARD else Direction.FORWARD,
    )
    if not (0 <= claim.position < len(planned) and 0 <= sender < len(planned)):
        return "no such position"
    if journey[claim.position].peer != me:
        return "not for me"
    return "" if journey[sender].peer == caller else "not from the hop before it"
