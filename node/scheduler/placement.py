"""Which stage a peer should host: at joining, and later when the swarm has grown lopsided."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from node.core.ids import PeerId
from node.scheduler.quotas import working_speeds

View = Mapping[int, Mapping[PeerId, float]]
"""Stage -> its replicas, joining ones included, with their speeds in micro-batches per second (0: unknown)."""


def _loads(view: View, stages: Iterable[int]) -> dict[int, float]:
    """Total speed of every stage; a peer of unknown speed counts as the median of the whole swarm."""
    everybody = [((stage, peer), speed) for stage, replicas in view.items() for peer, speed in replicas.items()]
    # working_speeds wants one key per entry; a peer that hosts two stages has one entry in each.
    speeds = working_speeds([(PeerId(f"{stage}/{peer}"), speed) for (stage, peer), speed in everybody])
    return {stage: sum(speeds[PeerId(f"{stage}/{peer}")] for peer in view.get(stage, {})) for stage in stages}


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
    others = {stage: {p: s for p, s in replicas.items() if p != me} for stage, replicas in view.items()}
    loads = _loads(others, stages)

    def need(stage: int) -> tuple[bool, float, int, bytes]:
        replicas = len(others.get(stage, {}))
        return replicas > 0, loads[stage], replicas, hashlib.sha256(f"{stage}/{me}".encode()).digest()

    return min(stages, key=need)


@dataclass(frozen=True, slots=True)
class Move:
    """``peer`` should change from stage ``source`` to stage ``target``; ``gain`` is new over old swarm speed."""

    peer: PeerId
    source: int
    target: int
    gain: float


def choose_move(
    view: View, movable: Iterable[int], *, download_s: float, horizon_s: float, at_least: float = 1.1
) -> Move | None:
    """The one change of stage that helps the swarm most, or None when none is worth its price.

    The swarm is as fast as its slowest stage. A move pays when what is gained over ``horizon_s`` is more than what
    the mover does not do during the ``download_s`` it needs to fetch the new stage, and when the swarm gets faster
    by ``at_least`` that factor (a smaller gain would be undone by the next wobble of a measurement). The mover is
    assumed to be as fast in the new stage as in the old one. A stage is never left empty, and only stages in
    ``movable`` give or take peers.
    """
    stages = sorted(view)
    allowed = set(movable)
    speeds = {
        stage: working_speeds([(p, s) for p, s in view[stage].items()]) if view[stage] else {} for stage in stages
    }
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
            without = {**loads, source: loads[source] - speed}
            after = min({**without, target: loads[target] + speed}.values())
            lost = max(0.0, before - min(without.values())) * download_s
            if after < before * at_least or (after - before) * horizon_s <= lost:
                continue
            gain = after / before if before > 0 else float("inf")
            if best is None or gain > best.gain:
                best = Move(peer, source, target, gain)
    return best
