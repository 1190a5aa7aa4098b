"""Sorting networks: which rows to compare, in which order, so that the wanted order statistics end
in their places. Enters: how many rows, which ranks. Leaves: comparators. Never: an array."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple


class Comparator(NamedTuple):
    """Put the smaller of rows ``low`` and ``high`` into ``low``, the larger into ``high``; only
    what ``keep`` names is used: 1 the smaller, 2 the larger, 3 both."""

    low: int
    high: int
    keep: int


@lru_cache(maxsize=256)
def merge_exchange(count: int) -> tuple[tuple[int, int], ...]:
    """Batcher's odd-even merge exchange for any number of rows: Knuth, TAOCP volume 3, 5.2.2,
    algorithm M."""
    pairs: list[tuple[int, int]] = []
    top = 1 << max(0, (count - 1).bit_length() - 1)
    p = top if count > 1 else 0
    while p:
        q, r, d = top, 0, p
        while True:
            pairs += [(i, i + d) for i in range(count - d) if i & p == r]
            if q == p:
                break
            d, q, r = q - p, q >> 1, p
        p >>= 1
    return tuple(pairs)


@lru_cache(maxsize=256)
def selection(count: int, first: int, last: int) -> tuple[Comparator, ...]:
    """The comparators of :func:`merge_exchange` after which rows ``first``..``last`` hold *the set*
    of these ranks.

    Found from behind: what feeds no wanted row is left out, and so is a comparison of two rows that
    are both wanted and not looked at again, because the set does not change.
    """
    unused, exact, member = 0, 1, 2
    state = [member if first <= i <= last else unused for i in range(count)]
    kept: list[Comparator] = []
    for low, high in reversed(merge_exchange(count)):
        keep = (state[low] != unused) + 2 * (state[high] != unused)
        if keep == 0 or (state[low] == state[high] == member):
            continue
        kept.append(Comparator(low, high, keep))
        state[low] = state[high] = exact
    return tuple(reversed(kept))
