"""Split of a number of equal jobs among peers by speed, so that the last job ends as early as
possible."""

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from statistics import median
from typing import TypeVar

from node.core.ids import PeerId

P = TypeVar("P", str, PeerId, int)
"""Names of peers, or their numbers in a problem."""

NOMINAL = 1.0
"""Speed of every peer when none has been measured; only ratios matter then."""


def stand_in(speeds: Iterable[float]) -> float:
    """The speed assumed for a peer that nobody has measured yet: the median of the measured speeds,
    so that it gets work too."""
    known = [speed for speed in speeds if 0 < speed < math.inf]
    if known:
        return median(known)
    return NOMINAL


def working_speeds(speeds: Sequence[tuple[P, float]]) -> dict[P, float]:
    """Speeds that can be divided by: 0, negative and not finite become :func:`stand_in`.

    Raises ValueError when a peer is named twice.
    """
    unknown = stand_in(speed for _, speed in speeds)
    out = {peer: speed if 0 < speed < math.inf else unknown for peer, speed in speeds}
    if len(out) != len(speeds):
        raise ValueError("a peer is named twice")
    return out


def turns(speeds: Sequence[tuple[P, float]]) -> Iterator[P]:
    """Name the peer of the next job, for ever: always the one that would finish it first.

    This is interleaved weighted round robin (Ryabinin et al., SWARM Parallelism, arXiv 2301.11913)
    with a job charged before the choice instead of after it. For equal jobs the first n turns have
    the least possible makespan for every n; ties go to the smaller name. Raises ValueError when
    there is no peer.
    """
    pace = {peer: 1.0 / speed for peer, speed in working_speeds(speeds).items()}
    if not pace:
        raise ValueError("nobody to give work to")
    # The finish time is a product, not a running sum: equal speeds tie exactly, whatever was dealt
    # before.
    heap = [(seconds, peer, 1) for peer, seconds in pace.items()]
    heapq.heapify(heap)
    while True:
        _, peer, dealt = heap[0]
        heapq.heapreplace(heap, (pace[peer] * (dealt + 1), peer, dealt + 1))
        yield peer


def quotas(total: int, speeds: Sequence[tuple[PeerId, float]]) -> dict[PeerId, int]:
    """Split ``total`` micro-batches over peers by their speeds.

    They are dealt by :func:`turns`, which minimises ``max(quota / speed)``: the Jefferson
    apportionment. The quotas sum to ``total``. Raises ValueError when ``total`` is negative, or
    there is work and no peer.
    """
    dealt = Counter(islice(turns(speeds), total))
    return {peer: dealt[peer] for peer in sorted(working_speeds(speeds))}
