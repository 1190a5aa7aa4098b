"""Which peers stay together when a cell divides: the near ones, because micro-batches travel inside
a cell all the time, and between cells a snapshot now and then. Pure. Enters: who is there, how fast
they are and how far apart. Leaves: who leaves. Never: whether the cell divides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product

from node.core.ids import PeerId

Delay = Callable[[PeerId, PeerId], float]
"""Seconds of a tensor from one peer to another."""
GAIN = 0.1
"""What another division must save of the delays inside both halves: less than this may be
chance."""
KEEPS = 0.8
"""Of a stage's speed each half keeps at least so much of what an even division gives it."""
ROUNDING = 1e-9
"""Seconds; a smaller sum of delays is taken for none."""
SWEEPS = 8
"""Times that every exchange of two peers is tried at most."""


def leavers(
    replicas: Mapping[int, Sequence[tuple[PeerId, float]]], me: PeerId, most: int, delay: Delay
) -> dict[PeerId, int]:
    """By peer that leaves the cell of ``me``, its stage: half of every stage's replicas (rounded
    down), at most ``most``.

    ``replicas``: by stage (peer, speed), 0 for an unknown speed. The even division spreads the fast
    and the slow over both halves. From it, and from the one in which the nearest to ``me`` stay,
    peers of a stage are exchanged between the halves as long as that brings those of each half
    nearer to each other (the search of Kernighan and Lin, 1970) and neither half loses much of
    its speed.
    """
    rows = {
        stage: sorted(row, key=lambda r: (r[0] != me, -r[1], r[0]))
        for stage, row in sorted(replicas.items())
    }
    even = {stage: {p for p, _ in row[1::2][:most]} for stage, row in rows.items()}
    apart = {
        (a, b): delay(a, b) + delay(b, a)
        for a, b in product((p for row in rows.values() for p, _ in row), repeat=2)
    }
    far = {
        stage: {
            p for _, p in sorted((-apart[me, p], p) for p, _ in row if p != me)[: len(even[stage])]
        }
        for stage, row in rows.items()
    }
    best, least = even, (1 - GAIN) * _inside(apart, even)
    for start in (even, far):
        found = _exchanged(rows, start, even, me, apart)
        if (length := _inside(apart, found)) < least and all(
            _fast(row, found[stage], even[stage]) for stage, row in rows.items()
        ):
            best, least = found, length
    return {peer: stage for stage, row in best.items() for peer in sorted(row)}


def _exchanged(
    rows: Mapping[int, Sequence[tuple[PeerId, float]]],
    start: Mapping[int, set[PeerId]],
    even: Mapping[int, set[PeerId]],
    me: PeerId,
    apart: Mapping[tuple[PeerId, PeerId], float],
) -> dict[int, set[PeerId]]:
    """``start`` after all exchanges that bring those of each half nearer to each other."""
    leaving = {stage: set(row) for stage, row in start.items()}
    away = set[PeerId]().union(*leaving.values())
    everybody = [p for row in rows.values() for p, _ in row]
    # How much further a peer is from those who stay than from those who leave.
    pull = {x: sum(apart[x, p] * (-1 if p in away else 1) for p in everybody) for x in everybody}
    for _ in range(SWEEPS):
        before = _inside(apart, leaving)
        for stage, row in rows.items():
            for a, b in product([p for p, _ in row if p != me], repeat=2):
                if a in leaving[stage] or b not in leaving[stage]:
                    continue
                gain = pull[a] - pull[b] + 2 * apart[a, b] - apart[a, a] - apart[b, b]
                changed = leaving[stage] ^ {a, b}
                if gain > ROUNDING and (
                    _fast(row, changed, even[stage]) or not _fast(row, leaving[stage], even[stage])
                ):
                    leaving[stage] = changed
                    for p in everybody:
                        pull[p] += 2 * (apart[p, b] - apart[p, a])
        if _inside(apart, leaving) >= before:
            break
    return leaving


def _fast(row: Sequence[tuple[PeerId, float]], leaving: set[PeerId], even: set[PeerId]) -> bool:
    """Whether both halves of a stage are about as fast as in the even division."""
    return all(
        sum(v for p, v in row if (p in leaving) is half)
        >= KEEPS * sum(v for p, v in row if (p in even) is half)
        for half in (False, True)
    )


def _inside(
    apart: Mapping[tuple[PeerId, PeerId], float], leaving: Mapping[int, set[PeerId]]
) -> float:
    """The delays between all that would be in one half."""
    away = set[PeerId]().union(*leaving.values())
    return sum(s for (a, b), s in apart.items() if a < b and (a in away) is (b in away))
