"""Ownership of parts: computed by everybody, negotiated by nobody. ``node/partition`` makes the
plans.

Without previous owners it is a fresh plan; with them it is repaired: a peer that stays keeps its
parts while that is near the least makespan, because optimizer state moves with its part. All peers
derive the same map.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

from node.core.errors import OutOfResources
from node.core.ids import PeerId
from node.optim.parts import ParameterPart
from node.partition.plan import assign_units, plan_hash

WORK = 5_000
"""Comparisons for one plan. It is made between two epochs, while the whole swarm waits."""
REMEMBERED = 256
EVEN = 1.08
"""Most state of a peer, as a multiple of the share that its speed gives it, ..."""
SLOWER = 1.05
"""... while that makes no step longer than this multiple of the time without it."""


def assign(
    parts: Sequence[ParameterPart],
    members: Sequence[tuple[PeerId, float]],
    previous: Mapping[str, PeerId] | None = None,
    room: Mapping[PeerId, int] | None = None,
) -> dict[str, PeerId]:
    """Exactly one owner among ``members`` (peer, speed) for every part, by name; 0 for an unknown
    speed counts as the mean.

    ``previous`` is repaired if any of its owners is still a member. ``room``: bytes of optimizer
    state, of the members it is known of. Raises UsageFault for no members, a member or a part named
    twice, or a speed that is not a finite number; OutOfResources when the state does not fit.
    """
    if not parts:
        return {}
    living = {peer for peer, _ in members}
    kept = {}
    if previous:
        kept = {p.name: previous[p.name] for p in parts if p.name in previous}
    if not living.intersection(kept.values()):
        kept = {}
    return dict(
        _assigned(tuple(parts), tuple(members), tuple(kept.items()), tuple((room or {}).items()))
    )


@lru_cache(REMEMBERED)
def _assigned(
    parts: tuple[ParameterPart, ...],
    members: tuple[tuple[PeerId, float], ...],
    previous: tuple[tuple[str, PeerId], ...],
    room: tuple[tuple[PeerId, int], ...],
) -> Mapping[str, PeerId]:
    units = [p.unit for p in parts]
    plan = assign_units(units, members, dict(previous), dict(room), WORK)
    known = [speed for _, speed in members if speed > 0] or [1.0]
    typical = math.fsum(known) / len(known)
    speeds = {peer: speed or typical for peer, speed in members}
    # Shares of the whole first: bytes over a tiny sum of speeds would be infinite.
    largest = max(u.bytes for u in units)
    total = math.fsum(speeds.values())
    even = EVEN * sum(u.bytes for u in units)
    most = {peer: max(largest, int(even * (s / total))) for peer, s in speeds.items()}
    held = dict.fromkeys(speeds, 0)
    for u in units:
        held[plan[u.name]] += u.bytes
    if any(held[peer] > most[peer] for peer in held):
        try:
            flat = assign_units(
                units,
                members,
                dict(previous),
                most | {p: min(most[p], r) for p, r in room if p in most},
                WORK,
            )
        except OutOfResources:
            return plan
        if makespan(parts, speeds.items(), flat) <= SLOWER * makespan(parts, speeds.items(), plan):
            return flat
    return plan


def ownership_hash(
    parts: Sequence[ParameterPart], owners: Mapping[str, PeerId], method: str
) -> str:
    """Hex sha256 over method, shapes and owners, whatever their order; travels with every
    exchange."""
    return plan_hash(method, [p.unit for p in parts], owners)


def makespan(
    parts: Sequence[ParameterPart],
    members: Iterable[tuple[PeerId, float]],
    owners: Mapping[str, PeerId],
) -> float:
    """Time of the slowest owner, in units of cost over speed; every member's speed must be
    known."""
    speeds = dict(members)
    loads = dict.fromkeys(speeds, 0.0)
    for part in parts:
        loads[owners[part.name]] += part.cost
    return max(loads[peer] / speed for peer, speed in speeds.items())
