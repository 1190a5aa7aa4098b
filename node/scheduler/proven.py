"""Paths over proven pairs of peers alone: both peers are proven to reach each other. Pure. Enters:
paths, the proven pairs, the replicas that may stand in for a hop. Leaves: paths that use proven
pairs only. Never: a guess that an unproven pair would work."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from node.core.errors import TuttiError
from node.core.ids import ENDS, PeerId, short, stage_name
from node.core.journey import Hop, Path

Proven = Callable[[PeerId, PeerId], bool]
"""Return True if two peers are proven to reach each other, in both directions."""
Pair = tuple[Hop, Hop]


class NoWay(TuttiError):
    """No complete path over proven pairs. ``pairs``: pairs that would help if proven; ``origins``:
    ends peers without complete paths."""

    def __init__(self, pairs: Sequence[Pair], origins: Collection[PeerId] = ()) -> None:
        self.pairs = tuple(pairs)
        self.origins = frozenset(origins)
        more = len(self.pairs) - 1
        others = ""
        if more > 0:
            others = f" (and {more} other pair{'s' * (more > 1)})"
        first = " and ".join(map(_says, self.pairs[:1]))
        super().__init__(f"a connection between {first}{others}")

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """The peers of these pairs."""
        return tuple(sorted({hop.peer for pair in self.pairs for hop in pair}))


def reachable(
    origin: PeerId, stages: Sequence[int], replicas: Mapping[int, Sequence[PeerId]], proven: Proven
) -> list[set[PeerId]]:
    """For each of ``stages`` in order, the replicas that a path from ``origin`` can come to over
    proven pairs."""
    found: list[set[PeerId]] = []
    before = {origin}
    for stage in stages:
        before = {p for p in replicas[stage] if any(proven(b, p) for b in before)}
        found.append(before)
    return found


def complete(
    origin: PeerId, stages: Sequence[int], replicas: Mapping[int, Sequence[PeerId]], proven: Proven
) -> bool:
    """Return True if a path over proven pairs leads from ``origin`` through ``stages`` and back to
    it."""
    found = reachable(origin, stages, replicas, proven)
    return bool(found) and any(proven(p, origin) for p in found[-1])


def missing(
    origins: Sequence[PeerId],
    stages: Sequence[int],
    replicas: Mapping[int, Sequence[PeerId]],
    proven: Proven,
) -> list[Pair]:
    """At most eight pairs; with one of them proven, a path of some origin would go on from its
    present end."""
    pairs: list[Pair] = []
    for origin in origins:
        before = {origin}
        at = ENDS
        for stage, here in zip(stages, reachable(origin, stages, replicas, proven), strict=True):
            if not here:
                pairs += [
                    (Hop(at, b), Hop(stage, p))
                    for b in sorted(before)
                    for p in sorted(replicas[stage])
                ]
                break
            before = here
            at = stage
        else:
            pairs += [
                (Hop(at, b), Hop(ENDS, origin)) for b in sorted(before) if not proven(b, origin)
            ]
    return pairs[:8]


def reroute(
    paths: Sequence[Path], siblings: Callable[[Hop], Sequence[tuple[PeerId, float]]], proven: Proven
) -> tuple[Path, ...]:
    """These paths with other replicas where two neighbours are no proven pair; paths without such a
    pair stay as they are.

    ``siblings(hop)``: the replicas that may stand in for a hop, with their speeds (0: unknown).
    Among several ways, the one with the least work at its busiest replica is taken. Raises NoWay if
    paths cannot be completed.
    """
    work = Counter(hop.peer for path in paths for hop in path.hops)
    done = []
    cut = []
    for path in paths:
        if _holds(path, proven):
            done.append(path)
            continue
        work.subtract(hop.peer for hop in path.hops)
        hops = _best(path, siblings, proven, work)
        if hops is None:
            cut.append(path)
            continue
        work.update(hop.peer for hop in hops)
        done.append(Path(path.index, path.origin, path.samples, hops))
    if cut:
        hops = cut[0].hops
        replicas = {hop.stage: [p for p, _ in siblings(hop)] for hop in hops}
        pairs = missing([cut[0].origin], [hop.stage for hop in hops], replicas, proven)
        raise NoWay(pairs, {path.origin for path in cut})
    return tuple(done)


def _holds(path: Path, proven: Proven) -> bool:
    journey = path.journey
    return all(proven(a.peer, b.peer) for a, b in zip(journey, journey[1:], strict=False))


def _best(
    path: Path,
    siblings: Callable[[Hop], Sequence[tuple[PeerId, float]]],
    proven: Proven,
    work: Counter[PeerId],
) -> tuple[Hop, ...] | None:
    """Dynamic programme over the hops: for every replica the cheapest way there, cost the largest
    load on it."""
    reached: dict[PeerId, tuple[float, tuple[Hop, ...]]] = {path.origin: (0.0, ())}
    for hop in path.hops:
        here: dict[PeerId, tuple[float, tuple[Hop, ...]]] = {}
        for peer, speed in siblings(hop):
            load = (work[peer] + 1) / speed if speed > 0 else float(work[peer] + 1)
            ways = [
                (max(cost, load), way)
                for before, (cost, way) in reached.items()
                if proven(before, peer)
            ]
            if ways:
                cost, way = min(ways, key=lambda w: w[0])
                here[peer] = cost, (*way, Hop(hop.stage, peer))
        reached = here
    ends = [(cost, way) for peer, (cost, way) in reached.items() if proven(peer, path.origin)]
    if not ends:
        return None
    return min(ends, key=lambda w: w[0])[1]


def _says(pair: Pair) -> str:
    return " and ".join(f"{short(hop.peer)} of {stage_name(hop.stage)}" for hop in pair)
