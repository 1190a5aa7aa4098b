"""Sample order: the window of the text that each sample reads, a shuffle per data pass, computed
and never stored; and a record of the samples taken.

A *position* counts samples from the beginning of the run and never repeats. A *window* is a place
in the training text.
"""

import heapq
from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b

from node.core.samples import WHOLE, Cursor, SampleClass, cursor_of

_ROUNDS = 4


class SampleOrder:
    """Position to window: every data pass is its own seeded permutation of the ``count`` windows,
    equal on every machine.

    A Feistel network (Luby and Rackoff 1988, four rounds) permutes the smallest even-bit domain
    that holds ``count``; results outside are sent through again until they fall inside ("cycle
    walking", Black and Rogaway 2002), less than four times on average.
    """

    def __init__(self, count: int, seed: int) -> None:
        self.count = count
        self.seed = seed
        self._half = max(1, ((count - 1).bit_length() + 1) // 2)

    def sample(self, position: int) -> int:
        """Window of ``position``."""
        data_pass, window = divmod(position, self.count)
        keys = _keys(self.seed, data_pass)
        while True:
            window = self._permute(window, keys)
            if window < self.count:
                return window

    def _permute(self, value: int, keys: tuple[bytes, ...]) -> int:
        half = self._half
        mask = (1 << half) - 1
        left = value >> half
        right = value & mask
        for key in keys:
            mixed = int.from_bytes(
                blake2b(right.to_bytes(16, "little"), digest_size=16, key=key).digest(), "little"
            )
            left, right = right, left ^ (mixed & mask)
        return left << half | right


@lru_cache(maxsize=64)
def _keys(seed: int, data_pass: int) -> tuple[bytes, ...]:
    return tuple(
        blake2b(f"{seed}:{data_pass}:{i}".encode(), digest_size=16).digest() for i in range(_ROUNDS)
    )


class Sampler:
    """Hands out the positions of a cursor, returned ones first. Each position is in exactly one
    state: out, given back, or counted for good.

    Pure: equal calls give equal answers, so that the next holder of the cursor goes on exactly
    where it was read.
    """

    def __init__(self, cursor: Cursor = WHOLE) -> None:
        self._returned = sorted(p for c in cursor for p in c.returned)
        self._next = [(c.next, c.bits) for c in cursor]
        """A heap: of each class the first position never taken."""
        heapq.heapify(self._next)

    def take(self, n: int) -> tuple[int, ...]:
        """``n`` positions: given-back ones first, smallest first, then new ones, of the class that
        is furthest behind first."""
        again = self._returned[:n]
        self._returned = self._returned[n:]
        return (*again, *(self._take_new() for _ in range(n - len(again))))

    def _take_new(self) -> int:
        position, bits = self._next[0]
        heapq.heapreplace(self._next, (position + (1 << bits), bits))
        return position

    def give_back(self, positions: Iterable[int]) -> None:
        """Positions that were taken and did not count. All or nothing: raises ValueError, and
        changes nothing, when one was never taken, is of no class held here, or is already back."""
        back = list(positions)
        if len({*self._returned, *back}) != len(self._returned) + len(back):
            raise ValueError("a position was given back twice")
        if not all(type(p) is int and p >= 0 and self._was_taken(p) for p in back):
            raise ValueError("a position was given back that was never taken")
        self._returned = sorted([*self._returned, *back])

    def _was_taken(self, position: int) -> bool:
        return any(
            position < first and (first - position) % (1 << bits) == 0 for first, bits in self._next
        )

    def cursor(self) -> Cursor:
        """Cursor of this sampler. Samples that are out at that moment are assumed to count. Raises
        ValueError when positions have come to their end."""
        return cursor_of(
            SampleClass(
                first % (1 << bits),
                bits,
                first,
                tuple(p for p in self._returned if (first - p) % (1 << bits) == 0),
            )
            for first, bits in self._next
        )
