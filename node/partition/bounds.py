"""Lower bounds on the makespan of any plan: whole units on peers of given speeds.

All are certificates: times proven too short. Loads are integers, times are loads over speeds; sums
of floats are taken with ``math.fsum`` so that every Python gives the same bits.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

MANY_SUMS = 20_000
MANY_TYPES = 12
THRESHOLDS = 512


def ideal(costs: Sequence[int], speeds: Sequence[float]) -> float:
    """All the work over all the speed: the makespan if units could be divided at will."""
    return sum(costs) / math.fsum(speeds)


def lower_bound(
    costs: Sequence[int], speeds: Sequence[float], reached: float | None = None
) -> float:
    """The best lower bound known here. ``reached``: the makespan of some plan, which saves work and
    caps the bound.

    * k largest units on the k fastest peers, each k: the optimum of the preemptive problem
      (Horvath, Lam, Sethi 1977); for k = 1 the largest unit at the fastest peer.
    * k largest units are each at least as large as the k-th, so a peer finishes at most floor(T s /
      p_k) of them.
    * with speeds equal, Martello and Toth's L2 of bin packing (1990).
    * a peer's load by T is a sum of units, not any number: all peers together must still reach the
      total.
    """
    order = sorted(costs, reverse=True)
    if not order:
        return 0.0
    fast = sorted(speeds, reverse=True)
    parts = zip(accumulate(order), accumulate(fast), strict=False)
    bound = max(ideal(order, fast), *(work / speed for work, speed in parts))
    ceiling = reached
    if ceiling is None:
        ceiling = order[0] / fast[0] * len(order)
    if bound >= ceiling:
        return ceiling
    groups = sorted(Counter(speeds).items())
    for k in _steps_of(order):
        bound = _raised(
            bound, ceiling, lambda t, k=k: sum(m * _fit(t, s, order[k - 1]) for s, m in groups) < k
        )
    if len(groups) == 1:
        bound = _raised(
            bound, ceiling, lambda t: _too_few_bins(order, t * groups[0][0], len(speeds))
        )
    for sums, total in _carried(order, ceiling * fast[0]):
        bound = _raised(bound, ceiling, partial(_cannot_carry, sums, total, groups))
    return bound


def _cannot_carry(
    sums: Sequence[int], total: int, groups: Sequence[tuple[float, int]], time: float
) -> bool:
    return sum(many * sums[bisect_right(sums, time * s) - 1] for s, many in groups) < total


def _steps_of(order: Sequence[int]) -> list[int]:
    """Number of units at least as large as each size, for each size that differs from the next; the
    first ``THRESHOLDS`` numbers."""
    last = [i + 1 for i in range(len(order)) if i + 1 == len(order) or order[i + 1] < order[i]]
    return last[:THRESHOLDS]


def _fit(time: float, speed: float, cost: int) -> int:
    return int(time * speed * (1 + 1e-12)) // cost


def _raised(bound: float, ceiling: float, too_short: Callable[[float], bool]) -> float:
    """The longest time found to be too short, at least ``bound``; rounding is left on the safe
    side."""
    if bound >= ceiling or not too_short(bound * (1 + 1e-9)):
        return bound
    low = bound
    high = ceiling
    for _ in range(60):
        middle = (low + high) / 2
        if too_short(middle * (1 + 1e-12)):
            low = middle
        else:
            high = middle
        if high - low <= 1e-13 * high:
            break
    return max(bound, low)


def _too_few_bins(order: Sequence[int], room: float, bins: int) -> bool:
    """Return True if L2 shows that units do not fit into ``bins`` bins of ``room``. For each α,
    units above room - α are alone, units above half of the room are alone with each other, and
    units from α to half fill the rest."""
    room *= 1 + 1e-12
    large = [c for c in order if c > room / 2]
    small = sorted(Counter(c for c in order if c <= room / 2).items(), reverse=True)
    if len(large) > bins:
        return True
    alone = len(large)
    sharing = 0
    filling = 0
    for alpha, count in small[:THRESHOLDS]:
        filling += alpha * count
        # As α falls, large units stop being alone, the smallest of them first.
        while alone and large[alone - 1] <= room - alpha:
            alone -= 1
            sharing += large[alone]
        left = filling - ((len(large) - alone) * room - sharing)
        if left > 0 and len(large) + math.ceil(left / room) > bins:
            return True
    return False


def _carried(order: Sequence[int], most: float) -> list[tuple[list[int], int]]:
    """For sets of the largest units: (sums a peer could carry up to ``most``, sorted; total of the
    set)."""
    made: list[tuple[list[int], int]] = []
    sums = {0}
    total = 0
    for types, (cost, count) in enumerate(sorted(Counter(order).items(), reverse=True)):
        if types >= MANY_TYPES or len(sums) * (1 + min(count, int(most // cost))) > MANY_SUMS:
            break
        sums = {
            base + cost * n
            for base in sums
            for n in range(min(count, int(most // cost)) + 1)
            if base + cost * n <= most * (1 + 1e-12)
        }
        total += cost * count
        made.append((sorted(sums), total))
    return made
