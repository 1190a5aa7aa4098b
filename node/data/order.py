"""Which window of the text a sample is: a shuffle per data pass, computed and never stored; and who
has taken what.

A *position* counts samples from the beginning of the run and never repeats. A *window* is a place
in the training text.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from node.core.errors import UsageFault, WireError

_ROUNDS = 4


class SampleOrder:
    """Position to window: every data pass is its own seeded permutation of the ``count`` windows,
    equal on every machine.

    A Feistel network (Luby and Rackoff 1988, four rounds) permutes the smallest even-bit domain
    that holds ``count``; results outside are sent through again until they fall inside ("cycle
    walking", Black and Rogaway 2002), less than four times on average.
    """

    def __init__(self, count: int, seed: int) -> None:
        """Raises UsageFault when there is no window."""
        if count < 1:
            raise UsageFault(
                "there is nothing to train on", "give a longer text or a shorter model.seq_len"
            )
        self.count, self.seed = count, seed
        self._half = max(1, ((count - 1).bit_length() + 1) // 2)

    def sample(self, position: int) -> int:
        """Window of ``position``. Raises ValueError for a negative position."""
        if position < 0:
            raise ValueError("positions start at 0")
        data_pass, window = divmod(position, self.count)
        keys = _keys(self.seed, data_pass)
        while True:
            window = self._permute(window, keys)
            if window < self.count:
                return window

    def _permute(self, value: int, keys: tuple[bytes, ...]) -> int:
        half = self._half
        mask = (1 << half) - 1
        left, right = value >> half, value & mask
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
    """Hands out positions, those given back first. Each position is out, given back, or counted for
    good: never two of these.

    Pure: equal calls give equal answers, so that whoever restores the state goes on exactly where
    it was taken.
    """

    def __init__(self, order: SampleOrder) -> None:
        self.order = order
        self._next = 0
        self._returned: list[int] = []
        self._returned_set: set[int] = set()

    @property
    def next(self) -> int:
        """The first position never taken."""
        return self._next

    @property
    def returned(self) -> int:
        """How many positions wait to be taken again."""
        return len(self._returned)

    def take(self, n: int) -> tuple[int, ...]:
        """``n`` positions: given-back ones first, smallest first, then new ones. Raises ValueError
        for a negative ``n``."""
        if n < 0:
            raise ValueError("cannot take fewer than none")
        again = [heapq.heappop(self._returned) for _ in range(min(n, len(self._returned)))]
        self._returned_set.difference_update(again)
        start, self._next = self._next, self._next + n - len(again)
        return (*again, *range(start, self._next))

    def give_back(self, positions: Iterable[int]) -> None:
        """Positions that were taken and did not count. All or nothing: raises ValueError, and
        changes nothing, when one was never taken or is already back."""
        back = list(positions)
        fresh = set(back)
        if len(fresh) != len(back) or not fresh.isdisjoint(self._returned_set):
            raise ValueError("a position was given back twice")
        if any(type(p) is not int or not 0 <= p < self._next for p in back):
            raise ValueError("a position was given back that was never taken")
        self._returned_set |= fresh
        for position in back:
            heapq.heappush(self._returned, position)

    def state(self) -> dict[str, Any]:
        """JSON-able; ``{"next": int, "returned": [int, …]}``. What is out at that moment is assumed
        to count."""
        return {"next": self._next, "returned": sorted(self._returned)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from :meth:`state`. Raises WireError, and changes nothing, for a state that cannot
        have come from there."""
        try:
            start, returned = state["next"], list(state["returned"])
        except (KeyError, TypeError) as e:
            raise WireError("not a sampler's state") from e
        numbers = (start, *returned)
        if any(type(p) is not int or not 0 <= p < 2**63 for p in numbers):
            raise WireError("a sampler's state holds natural numbers only")
        if len(set(returned)) != len(returned) or any(p >= start for p in returned):
            raise WireError("a sampler's state gives back a position twice, or one never taken")
        self._next, self._returned, self._returned_set = start, sorted(returned), set(returned)
