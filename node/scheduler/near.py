"""Division of a cell by distance: near peers stay together, because micro-batches travel inside a
cell all the time, while a snapshot travels between cells now and then. Pure. Enters: the peers,
their speeds and the delays between them. Leaves: the peers that leave. Never: the decision to
divide."""

from collections.abc import Callable, Mapping, Sequence
from itertools import product

from node.core.ids import PeerId

Delay = Callable[[PeerId, PeerId], float]
"""Seconds of a tensor from one peer to another."""
GAIN = 0.1
"""Least share of the delays inside both halves that another division must save: a smaller gain may
be chance."""
KEEPS = 0.8
"""Least share of its speed that each half of a stage keeps. It is measured against the half's share
by number of peers, or against its speed in the even division where that is less."""
ROUNDING = 1e-9
"""Seconds; a smaller sum of delays is taken for none."""
CENTRES = 10
"""Number of other peers around which the leaving half is tried, from the furthest to the
nearest."""
SWEEPS = 8
"""Times that every exchange of two peers is tried at most."""


def leavers(
    replicas: Mapping[int, Sequence[tuple[PeerId, float]]], me: PeerId, most: int, delay: Delay
) -> dict[PeerId, int]:
    """Choose half of every stage's replicas (rounded down), at most ``most``, to leave the cell of
    ``me``. Returns the stage of each peer that leaves.

    ``replicas``: (peer, speed) by stage, 0 for an unknown speed; ``delay``: seconds from one peer
    to another. The search starts from several divisions: the even one, which spreads fast and slow
    peers over both halves, one in which the peers nearest to ``me`` stay, and some in which the
    peers nearest to another peer leave. From each start, peers of a stage are exchanged between the
    halves while that reduces the delays inside the halves (the search of Kernighan and Lin, 1970)
    and neither half loses much of its speed.
    """
    rows = {
        stage: sorted(row, key=lambda r: (r[0] != me, -r[1], r[0]))
        for stage, row in sorted(replicas.items())
    }
    even = {stage: {p for p, _ in row[1::2][:most]} for stage, row in rows.items()}
    apart = {
        (a, b): delay(a, b) + delay(b, a) if a != b else 0.0
        for a, b in product((p for row in rows.values() for p, _ in row), repeat=2)
    }
    by_distance = sorted((apart[me, p], p) for row in rows.values() for p, _ in row if p != me)
    centres = [p for _, p in by_distance[:: -max(1, len(by_distance) // CENTRES)]]

    def last(order: Callable[[PeerId], float]) -> dict[int, set[PeerId]]:
        """The peers with the highest ``order`` of every stage, in the numbers that leave; never
        ``me``."""
        others = {s: sorted((-order(p), p) for p, _ in row if p != me) for s, row in rows.items()}
        return {s: {p for _, p in found[: len(even[s])]} for s, found in others.items()}

    starts = [even, last(lambda p: apart[me, p])]
    starts += [last(lambda p, centre=centre: -apart[centre, p]) for centre in centres]
    best = even
    least = (1 - GAIN) * _apart(apart, rows, even)
    for start in starts:
        found = _exchanged(rows, start, even, me, apart)
        if (length := _apart(apart, rows, found)) < least and all(
            _fast(row, found[stage], even[stage]) for stage, row in rows.items()
        ):
            best = found
            least = length
    return {peer: stage for stage, row in best.items() for peer in sorted(row)}


def _exchanged(
    rows: Mapping[int, Sequence[tuple[PeerId, float]]],
    start: Mapping[int, set[PeerId]],
    even: Mapping[int, set[PeerId]],
    me: PeerId,
    apart: Mapping[tuple[PeerId, PeerId], float],
) -> dict[int, set[PeerId]]:
    """``start`` after all exchanges that bring the peers of each half nearer to each other."""
    leaving = {stage: set(row) for stage, row in start.items()}
    halves = _halves(rows, leaving)
    everybody = [p for half in halves for p in half]
    # Sum of each peer's delays to all peers that stay, and to all that leave.
    near, away = ({x: sum(apart[x, p] for p in half) for x in everybody} for half in halves)
    stays, leaves = (1 / max(1, len(half) - 1) for half in halves)
    for _ in range(SWEEPS):
        changes = 0
        for stage, row in rows.items():
            for a, b in product([p for p, _ in row if p != me], repeat=2):
                if a in leaving[stage] or b not in leaving[stage]:
                    continue
                gain = stays * (near[a] - near[b] + apart[a, b]) + leaves * (
                    away[b] - away[a] + apart[a, b]
                )
                changed = leaving[stage] ^ {a, b}
                if gain > ROUNDING and (
                    _fast(row, changed, even[stage]) or not _fast(row, leaving[stage], even[stage])
                ):
                    leaving[stage] = changed
                    changes += 1
                    for p in everybody:
                        near[p] += apart[p, b] - apart[p, a]
                        away[p] += apart[p, a] - apart[p, b]
        if not changes:
            break
    return leaving


def _fast(row: Sequence[tuple[PeerId, float]], leaving: set[PeerId], even: set[PeerId]) -> bool:
    """Return True if each half of a stage has about the speed that its number of peers promises, or
    about its speed in the even division."""
    total = sum(v for _, v in row)
    for half in (False, True):
        here = [v for p, v in row if (p in leaving) is half]
        evenly = sum(v for p, v in row if (p in even) is half)
        if sum(here) < KEEPS * min(evenly, total * len(here) / len(row)):
            return False
    return True


def _halves(
    rows: Mapping[int, Sequence[tuple[PeerId, float]]], leaving: Mapping[int, set[PeerId]]
) -> tuple[list[PeerId], list[PeerId]]:
    """(peers that stay, peers that leave), in an order that gives every peer the same sums."""
    stays = [p for stage, row in rows.items() for p, _ in row if p not in leaving[stage]]
    return stays, [p for row in leaving.values() for p in sorted(row)]


def _apart(
    apart: Mapping[tuple[PeerId, PeerId], float],
    rows: Mapping[int, Sequence[tuple[PeerId, float]]],
    leaving: Mapping[int, set[PeerId]],
) -> float:
    """The mean delay between a peer and the others of its half, summed over all peers: so a large
    half does not count for more than its peers."""
    return sum(
        sum(apart[a, b] for a in half for b in half) / max(1, len(half) - 1)
        for half in _halves(rows, leaving)
    )
