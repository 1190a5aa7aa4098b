"""Which stage a peer should host: at joining, and later when the swarm has grown lopsided."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass

from node.core.ids import PeerId
from node.scheduler.quotas import stand_in

View = Mapping[int, Mapping[PeerId, float]]
"""Stage -> its replicas, joining ones included, with their speeds in micro-batches per second (0: unknown)."""


def _speeds(view: View) -> dict[int, dict[PeerId, float]]:
    """The view with every unknown speed replaced by the median of the swarm: an empty stage has no median."""
    unknown = stand_in(speed for replicas in view.values() for speed in replicas.values())
    return {
        stage: {peer: speed if 0 < speed < math.inf else unknown for peer, speed in replicas.items()}
        for stage, replicas in view.items()
    }


def choose_stage(view: View, able: Iterable[int], me: PeerId) -> int:
    """The stage that most needs the joiner ``me``, among those it is ``able`` to host.

    An empty stage comes first, for without it nobody trains; else the one with the least total speed, for it is
    the bottleneck (Ryabinin et al., arXiv 2301.11913, section 3.2: a newcomer joins the most loaded stage), then
    the one with the fewest replicas. What is still equal is settled by a hash of PeerId and stage: peers that
    join at the same moment and cannot see each other yet spread out instead of all taking the first stage.
    Raises ValueError when ``able`` is empty.
    """
    stages = sorted(set(able))
    if not stages:
        raise ValueError("there is no stage this peer can host")
    others = _speeds({stage: {p: s for p, s in replicas.items() if p != me} for stage, replicas in view.items()})

    def need(stage: int) -> tuple[bool, float, int, bytes]:
        replicas = others.get(stage, {})
        tie = hashlib.sha256(f"{stage}/{me}".encode()).digest()
        return bool(replicas), sum(replicas.values()), len(replicas), tie

    return min(stages, key=need)


@dataclass(frozen=True, slots=True)
class Move:
    """``peer`` should change from stage ``source`` to stage ``target``; ``gain`` is new over old swarm speed."""

    peer: PeerId
    source: int
    target: int
    gain: float


def choose_move(
    view: View,
    movable: Iterable[int],
    *,
    download_s: float,
    horizon_s: float,
    at_least: float = 1.1,
    stay: Container[PeerId] = (),
) -> Move | None:
    """The one change of stage that helps the swarm most, or None when none is worth its price.

    The swarm is as fast as its slowest stage. A move pays when what is gained over ``horizon_s`` is more than what
    the mover does not do during the ``download_s`` it needs to fetch the new stage, and when the swarm gets faster
    by ``at_least`` that factor (a smaller gain would be undone by the next wobble of a measurement). The mover is
    assumed to be as fast in the new stage as in the old one. A stage is never left empty, and only stages in
    ``movable`` give or take peers; those in ``stay`` do not move.
    """
    stages, allowed = sorted(view), set(movable)
    speeds = _speeds(view)
    loads = {stage: sum(speeds[stage].values()) for stage in stages}
    if len(stages) < 2:
        return None
    before = min(loads.values())
    target = min(stages, key=lambda s: (loads[s], s))
    if target not in allowed:
        return None
    best: Move | None = None
    for source in stages:
        if source == target or source not in allowed or len(speeds[source]) < 2:
            continue
        for peer, speed in sorted(speeds[source].items()):
            if peer in stay:
                continue
            without = {**loads, source: loads[source] - speed}
            after = min({**without, target: loads[target] + speed}.values())
            lost = max(0.0, before - min(without.values())) * download_s
            if after < before * at_least or (after - before) * horizon_s <= lost:
                continue
            gain = after / before if before > 0 else float("inf")
            if best is None or gain > best.gain:
                best = Move(peer, source, target, gain)
    return best
