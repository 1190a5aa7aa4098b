"""Choice of a peer's stage: at joining, and later if the swarm has grown lopsided."""

import hashlib
import math
from collections.abc import Collection, Container, Iterable, Mapping
from dataclasses import dataclass

from node.core.ids import PeerId
from node.scheduler.quotas import stand_in

View = Mapping[int, Mapping[PeerId, float]]
"""Stage -> its replicas, joining ones included, with their speeds in micro-batches per second (0:
unknown)."""
AT_LEAST = 1.03
"""Least gain of moves between stages that serve already."""


def _speeds(view: View) -> dict[int, dict[PeerId, float]]:
    """The view with every unknown speed replaced by the median of the swarm: an empty stage has no
    median."""
    unknown = stand_in(speed for replicas in view.values() for speed in replicas.values())
    return {
        stage: {
            peer: speed if 0 < speed < math.inf else unknown for peer, speed in replicas.items()
        }
        for stage, replicas in view.items()
    }


def choose_stage(
    view: View, able: Iterable[int], me: PeerId, closed: Container[PeerId] = ()
) -> int:
    """The stage that most needs the joiner ``me``, among those it is ``able`` to host.

    An empty stage comes first, because nobody trains without it. Then comes the stage with the
    least total speed, because it is the bottleneck (Ryabinin et al., arXiv 2301.11913, section 3.2:
    a newcomer joins the most loaded stage), then the stage with the fewest replicas. A peer in
    ``closed``, which nobody can dial, then prefers the stage with the fewest such peers beside it,
    because tensors between two of them go through a relay. A hash of PeerId and stage settles the
    remaining ties: peers that join at the same moment and cannot see each other yet spread out
    instead of all taking the first stage. Raises ValueError if ``able`` is empty.
    """
    stages = sorted(set(able))
    if not stages:
        raise ValueError("there is no stage this peer can host")
    others = _speeds(
        {stage: {p: s for p, s in replicas.items() if p != me} for stage, replicas in view.items()}
    )

    ring = max([*others, *stages]) + 1

    def need(stage: int) -> tuple[bool, float, int, int, bytes]:
        replicas = others.get(stage, {})
        # The last block stage sends to the ends, and the ends to the first.
        closed_beside = 0
        if me in closed:
            for s in {(stage - 1) % ring, (stage + 1) % ring}:
                closed_beside += sum(p in closed for p in others.get(s, ()))
        tie = hashlib.sha256(f"{stage}/{me}".encode()).digest()
        # fsum: the same in whatever order a reader has heard of the replicas.
        return (
            bool(replicas),
            math.fsum(replicas.values()),
            len(replicas),
            closed_beside,
            tie,
        )

    return min(stages, key=need)


def spread(
    view: View, choosers: Mapping[PeerId, Collection[int]], closed: Container[PeerId] = ()
) -> dict[PeerId, int]:
    """A stage for each of the peers that choose at the same time; ``choosers``: the stages that
    each can host; ``closed``: peers that nobody can dial.

    One after another chooses by :func:`choose_stage`, with the earlier ones counted at unknown
    speeds. Peers that can host the fewest stages choose first, then a hash of the PeerIds settles
    the order. So peers that see the same peers compute the same stages. Raises ValueError if a peer
    can host no stage.
    """
    filled = {stage: dict(replicas) for stage, replicas in view.items()}
    chosen: dict[PeerId, int] = {}
    for peer in sorted(choosers, key=lambda p: (len(choosers[p]), _turn(p))):
        stage = chosen[peer] = choose_stage(filled, choosers[peer], peer, closed)
        filled.setdefault(stage, {})[peer] = 0.0
    return chosen


def _turn(peer: PeerId) -> bytes:
    return hashlib.sha256(peer.encode()).digest()


@dataclass(frozen=True, slots=True)
class StageTerms:
    """Terms of moves from and to one stage. ``visits``: share of the micro-batches that visit the
    stage; ``keep``: least number of serving peers that it keeps; ``barred``: peers that do not move
    to the stage; ``fetch_s``: seconds in which a peer fetches the stage, 0 if unknown."""

    visits: float = 1.0
    keep: int = 1
    barred: Container[PeerId] = ()
    fetch_s: float = 0.0


USUAL = StageTerms()


@dataclass(frozen=True, slots=True)
class Move:
    """``peer`` should change from stage ``source`` to stage ``target``; ``gain`` is new over old
    swarm speed, with all moves that were chosen together."""

    peer: PeerId
    source: int
    target: int
    gain: float


def level(
    view: View, free: Mapping[PeerId, Collection[int]], lacking: Collection[int] | None = None
) -> list[Move]:
    """The changes of stage after which none of the ``free`` peers could make the stages more even.

    Repeatedly, the stage with the least total speed gets a peer from the fastest stage that can
    spare one. A stage can spare a peer if it is faster without it than the other stage is now, by
    at least half of the peer's speed (measured speeds are never equal), or by anything if the other
    stage is empty; so every stage keeps a peer. Where all speeds are unknown, the stages that can
    give and take end with numbers of replicas that differ by at most one. If ``lacking`` is given,
    only these stages get peers, one each.

    ``free``: the peers that may move, each once, and the stages that they could host. The slowest
    peer of a stage goes first, an unknown speed counting as slowest; then the last peer in the
    order of :func:`spread`.
    """
    cells = _speeds(view)
    for stage in lacking or ():
        cells.setdefault(stage, {})
    home = {peer: stage for stage, replicas in view.items() for peer in replicas if peer in free}
    waits = sorted(home, key=_turn, reverse=True)
    waits.sort(key=lambda peer: view[home[peer]][peer])
    targets = set(cells)
    if lacking is not None:
        targets = set(lacking)
    loads = {stage: math.fsum(replicas.values()) for stage, replicas in cells.items()}
    before = min(loads.values(), default=0.0)
    steps = list[tuple[PeerId, int, int]]()
    while (step := _step(cells, loads, waits, home, free, targets)) is not None:
        peer, source, target = step
        steps.append(step)
        waits.remove(peer)
        cells[target][peer] = cells[source].pop(peer)
        for stage in (source, target):
            loads[stage] = math.fsum(cells[stage].values())
        if lacking is not None:
            targets.discard(target)
    gain = math.inf
    if before > 0:
        gain = min(loads.values(), default=0.0) / before
    return [Move(peer, source, target, gain) for peer, source, target in steps]


def _step(
    cells: View,
    loads: Mapping[int, float],
    waits: Iterable[PeerId],
    home: Mapping[PeerId, int],
    free: Mapping[PeerId, Collection[int]],
    targets: Iterable[int],
) -> tuple[PeerId, int, int] | None:
    """The move that helps the neediest target that can be helped, as (peer, from, to); None if no
    move helps."""
    able: dict[int, list[tuple[PeerId, float, float]]] = {stage: [] for stage in cells}
    for peer in waits:
        cell = cells[home[peer]]
        rest = math.fsum(speed for other, speed in cell.items() if other != peer)
        able[home[peer]].append((peer, rest, cell[peer] / 2))
    for target in sorted(targets, key=lambda stage: (loads[stage], stage)):
        for source in sorted(cells, key=lambda stage: (-loads[stage], -stage)):
            for peer, rest, margin in able[source]:
                least = loads[target] + margin if cells[target] else 0.0
                if target in free[peer] and rest > least:
                    return peer, source, target
    return None


def choose_moves(
    view: View,
    *,
    download_s: float,
    horizon_s: float,
    stay: Container[PeerId] = (),
    away: Container[PeerId] = (),
    most: int = 4,
    terms: Mapping[int, StageTerms] | None = None,
) -> list[Move]:
    """The changes of stage that help the swarm most, at most ``most`` of them at once; empty if
    none are worth their price.

    The swarm is as fast as its slowest stage: the one with the least total speed over its share of
    visits. At each step that stage gets the peer by whose change the slower of the two stages gains
    most. The number of steps is the one that pays best: where two stages are equally slow, the
    first step alone gains nothing. The return of the steps is the gain over ``horizon_s`` less the
    loss of the swarm while the movers fetch their new stage (``download_s`` at least): the work
    that the slowest stage does not do then, and the movers' share of the work. The swarm must get
    faster by the factor :data:`AT_LEAST`: the next wobble of a measurement would undo a smaller
    gain.

    A mover is assumed to be as fast in the new stage as in the old one. Peers in ``away`` are on
    their way to the stage they are listed in: they count there later, not now. They and the peers
    in ``stay`` do not move. ``terms``: by stage, :data:`USUAL` where none are given.
    """
    stages = sorted(view)
    given = terms or {}
    by_stage = {s: given.get(s, USUAL) for s in stages}
    visits = {s: by_stage[s].visits for s in stages}
    cells = _speeds(view)
    here = {s: {p: v for p, v in cells[s].items() if p not in away} for s in stages}
    free = {s: [(v, p) for p, v in sorted(here[s].items()) if p not in stay] for s in stages}
    loads, serving = (
        {s: sum(cell[s].values()) / visits[s] for s in stages} for cell in (cells, here)
    )
    before = min(loads.values())
    quiet = min(serving.values())
    took = {s: max(download_s, by_stage[s].fetch_s) for s in stages}
    price = {s: took[s] / sum(visits.values()) for s in stages}
    steps: list[tuple[PeerId, int, int]] = []
    best = 0
    paid = 0.0
    gain = 1.0
    work = 0.0
    longest = 0.0
    while len(steps) < most:
        target = min(stages, key=lambda s: (loads[s], s))
        worth = 0.0
        found = None
        for source in stages:
            if source == target or len(here[source]) <= by_stage[source].keep:
                continue
            for speed, peer in free[source]:
                if peer in by_stage[target].barred:
                    continue
                lower = min(
                    loads[source] - speed / visits[source], loads[target] + speed / visits[target]
                )
                net = (lower - loads[target]) * horizon_s - speed * price[target]
                if lower > loads[target] and (found is None or net > worth):
                    worth = net
                    found = (speed, peer, source)
        if found is None:
            break
        speed, peer, source = found
        steps.append((peer, source, target))
        free[source].remove((speed, peer))
        del here[source][peer]
        loads[source] -= speed / visits[source]
        loads[target] += speed / visits[target]
        serving[source] -= speed / visits[source]
        work += speed * price[target]
        longest = max(longest, took[target])
        after = min(loads.values())
        lost = max(0.0, quiet - min(serving.values())) * longest + work
        pays = (after - before) * horizon_s - lost
        if after >= before * AT_LEAST and pays > paid:
            best = len(steps)
            paid = pays
            gain = math.inf
            if before > 0:
                gain = after / before
    return [Move(peer, source, target, gain) for peer, source, target in steps[:best]]
