"""The published geometry: flat buckets, the start-index rule, and the α-balanced static partition
of Canzona.

A bucket is a contiguous range of the gradient buffer, in elements. Cuts fall only between
parameters, so that each has one owner; ranks follow each other in order. Faithful to arXiv
2602.06079 so that its ratios can be reproduced beside ours.
"""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from node.core.errors import UsageFault

ALIGN = 64
"""Every parameter starts at a multiple of this many elements."""
BUCKET_ALIGN = 128
"""A bucket's end is padded to a multiple of this and of the number of ranks."""


@dataclass(frozen=True)
class Bucket:
    """``spans``: (name, start, end) in elements from the bucket's begin, rising; ``total``: its
    padded length."""

    spans: tuple[tuple[str, int, int], ...]
    total: int


def fill_buckets(numels: Sequence[tuple[str, int]], ranks: int, size: int) -> list[Bucket]:
    """Parameters given in order of registration, laid out in reverse, so that backward finishes the
    first bucket first.

    A bucket is closed by the parameter that brings it to ``size`` elements. Raises UsageFault for
    no ranks or no size.
    """
    if ranks < 1 or size < 1:
        raise UsageFault(
            f"buckets of {size} elements for {ranks} ranks", "give at least one of each"
        )
    unit = math.lcm(ranks, BUCKET_ALIGN)
    made: list[Bucket] = []
    spans: list[tuple[str, int, int]] = []
    for name, numel in reversed(numels):
        start = _up(spans[-1][2], ALIGN) if spans else 0
        spans.append((name, start, start + numel))
        if start + numel >= size:
            made.append(Bucket(tuple(spans), _up(start + numel, unit)))
            spans = []
    if spans:
        made.append(Bucket(tuple(spans), _up(spans[-1][2], unit)))
    return made


def start_index(buckets: Sequence[Bucket], ranks: int) -> dict[str, int]:
    """Rank r owns what starts in the r-th equal part of a bucket: Eq. (1) of arXiv 2602.06079."""
    return {name: start * ranks // b.total for b in buckets for name, start, _ in b.spans}


def alpha_cuts(buckets: Sequence[Bucket], ranks: int, alpha: float) -> list[tuple[int, ...]]:
    """Ends of the ranks' slices, 0 first, of each bucket: Algorithm 1 of arXiv 2602.06079, in
    elements.

    Longest bucket first, each rank wants (1 - α) of an equal share and α of its share of the
    elements missing to the mean; the cut is the nearest end of a parameter. Raises UsageFault for α
    outside 0..1.
    """
    if not 0 <= alpha <= 1:
        raise UsageFault(
            f"alpha is {alpha}", "give a number from 0 (equal slices) to 1 (equal loads)"
        )
    target = sum(b.total for b in buckets) / ranks
    load = [0] * ranks
    cuts: dict[int, tuple[int, ...]] = {}
    for index in sorted(range(len(buckets)), key=lambda i: (-buckets[i].total, i)):
        b = buckets[index]
        edges = sorted({0, b.total} | {end for _, _, end in b.spans})
        deficit = [max(0.0, target - mine) for mine in load]
        missing = math.fsum(deficit)
        even = b.total / ranks
        wanted = 0.0
        cut = [0]
        for r in range(ranks - 1):
            greedy = deficit[r] / missing * b.total if missing > 1e-9 else even
            wanted += (1 - alpha) * even + alpha * greedy
            cut.append(_nearest(edges, wanted, cut[-1]))
            load[r] += cut[-1] - cut[-2]
        load[-1] += b.total - cut[-1]
        cuts[index] = (*cut, b.total)
    return [cuts[i] for i in range(len(buckets))]


def owners_of_cuts(buckets: Sequence[Bucket], cuts: Sequence[Sequence[int]]) -> dict[str, int]:
    """Rank of each parameter, by the slice that it lies in. Raises UsageFault for a cut inside a
    parameter."""
    owner: dict[str, int] = {}
    for b, cut in zip(buckets, cuts, strict=True):
        r = 0
        for name, start, end in b.spans:
            while cut[r + 1] <= start:
                r += 1
            if end > cut[r + 1]:
                raise UsageFault(f"a cut falls inside {name}", "cut between parameters")
            owner[name] = r
    return owner


def alpha_balanced(
    buckets: Sequence[Bucket], ranks: int, alpha: float, cost: Mapping[str, int]
) -> tuple[dict[str, int], list[tuple[int, ...]] | None]:
    """Owner of each parameter and the cuts behind it; no cuts when the start-index rule is kept
    because it is no worse by ``cost``."""
    plain = start_index(buckets, ranks)
    cuts = alpha_cuts(buckets, ranks, alpha)
    owner = owners_of_cuts(buckets, cuts)
    if balance_ratio(owner, cost, ranks) < balance_ratio(plain, cost, ranks):
        return owner, cuts
    return plain, None


def balance_ratio(owner: Mapping[str, int], cost: Mapping[str, int], ranks: int) -> float:
    """Largest load over the mean load, 1 at best."""
    load = [0] * ranks
    for name, rank in owner.items():
        load[rank] += cost[name]
    return max(load) * ranks / max(sum(load), 1)


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _nearest(edges: Sequence[int], wanted: float, least: int) -> int:
    """The edge nearest to ``wanted`` that is not below ``least``; of two as near, the lower."""
    i = bisect_left(edges, wanted)
    near = [e for e in edges[max(0, i - 1) : i + 1] if e >= least]
    return min(near, key=lambda e: (abs(e - wanted), e)) if near else least


def shard_flops(rows: int, cols: int) -> int:
    """The count the published planner balances by: 5 · (2 + 2) n m² on whatever shape it is given,
    without A A.

    It is given the tensor-parallel shard; kept only to reproduce published ratios.
    """
    m = min(rows, cols)
    n = max(rows, cols)
    return 20 * n * m * m
