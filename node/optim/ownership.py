"""Who owns which part: computed by everybody, negotiated by nobody.

From scratch it is longest-processing-time-first on machines of different speeds: the most expensive part goes where it
would be done first. When members come or go the ownership is *repaired*: what has a living owner stays, orphans are
placed by the same rule, then single parts leave the slowest owner while that helps. Repair moves about 1/n of the bytes
where planning anew moves most of them, and optimizer state moves with its part.

Pure Python and exact: ties are broken by cost, bytes, name and PeerId, so all peers derive the same map.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from node.core.ids import PeerId
from node.optim.parts import Part

WORTH_MOVING = 0.02
"""A part moves only if that shortens its two owners' time by this share of the ideal time."""


def assign(
    parts: Sequence[Part],
    members: Sequence[tuple[PeerId, float]],
    previous: Mapping[str, PeerId] | None = None,
) -> dict[str, PeerId]:
    """Exactly one owner among ``members`` (peer, speed) for every part, by name; 0 for an unknown speed counts as the mean.

    ``previous`` is repaired if any of its owners is still a member. Raises ValueError for no members, a member or a part named
    twice, or a speed that is not a finite number.
    """
    speeds = _speeds(members)
    if len({p.name for p in parts}) != len(parts):
        raise ValueError("a part is named twice")
    kept = {p.name: previous[p.name] for p in parts if previous and previous.get(p.name) in speeds} if previous else {}
    by_name = {p.name: p for p in parts}
    loads = dict.fromkeys(sorted(speeds), 0.0)
    for name in sorted(kept):
        loads[kept[name]] += by_name[name].cost
    owners = dict(kept)
    for part in sorted((p for p in parts if p.name not in kept), key=lambda p: (-p.cost, -p.bytes, p.name)):
        owner = min(loads, key=lambda peer: ((loads[peer] + part.cost) / speeds[peer], peer))
        owners[part.name] = owner
        loads[owner] += part.cost
    if kept:
        _relieve(owners, loads, speeds, by_name)
    return {name: owners[name] for name in sorted(owners)}


def ownership_hash(owners: Mapping[str, PeerId]) -> str:
    """Hex sha256 of the map, whatever the order of its items; travels with every exchange."""
    return hashlib.sha256(json.dumps(dict(sorted(owners.items())), separators=(",", ":")).encode()).hexdigest()


def makespan(parts: Sequence[Part], members: Sequence[tuple[PeerId, float]], owners: Mapping[str, PeerId]) -> float:
    """Time of the slowest owner, in units of cost over speed."""
    speeds = _speeds(members)
    loads = dict.fromkeys(speeds, 0.0)
    for part in parts:
        loads[owners[part.name]] += part.cost
    return max(loads[peer] / speeds[peer] for peer in loads)


def _relieve(
    owners: dict[str, PeerId], loads: dict[PeerId, float], speeds: dict[PeerId, float], parts: dict[str, Part]
) -> None:
    """Single moves off the slowest owner, the best first. Each lowers the two owners' later finish, so this ends."""
    gain = WORTH_MOVING * sum(loads.values()) / sum(speeds.values())
    if gain <= 0:
        return
    while True:
        slowest = max(loads, key=lambda peer: (loads[peer] / speeds[peer], peer))
        now = loads[slowest] / speeds[slowest]
        moves = (
            (
                max((loads[slowest] - part.cost) / speeds[slowest], (loads[peer] + part.cost) / speeds[peer]),
                part.bytes,
                name,
                peer,
            )
            for name, part in ((n, parts[n]) for n, owner in owners.items() if owner == slowest)
            for peer in loads
            if peer != slowest
        )
        best = min(moves, default=None)
        if best is None or best[0] > now - gain:
            return
        _, _, name, peer = best
        owners[name] = peer
        loads[slowest] -= parts[name].cost
        loads[peer] += parts[name].cost


def _speeds(members: Sequence[tuple[PeerId, float]]) -> dict[PeerId, float]:
    if not members:
        raise ValueError("nobody to own anything")
    if len({peer for peer, _ in members}) != len(members):
        raise ValueError("a member is named twice")
    if not all(0 <= speed < 1e18 for _, speed in members):
        raise ValueError("a speed is a finite number that is not negative")
    known = [speed for _, speed in sorted(members) if speed > 0]
    typical = sum(known) / len(known) if known else 1.0
    return {peer: speed if speed > 0 else typical for peer, speed in sorted(members)}
