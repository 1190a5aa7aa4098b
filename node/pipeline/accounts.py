"""A scarce good (bytes of memory, places) held for several holders, of which none can take the
part of the others. Pure."""

from collections import Counter
from collections.abc import Hashable, Mapping
from typing import Generic, TypeVar

H = TypeVar("H", bound=Hashable)


class SharedBudget(Generic[H]):
    """At most ``limit`` units in all. A holder within its part may use all room there is; beyond
    its part it gets no more once half of the limit is in use. So one greedy holder leaves the other
    half to the others, and a single holder has everything.

    One request always fits into an empty account, and the first one of a holder wherever there is
    room, however small the limit or the part.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._held: Counter[H] = Counter()
        self._parts: dict[H, float] = {}

    def divide(self, weights: Mapping[H, float]) -> None:
        """Divide the limit between these holders in proportion to their weights. Any other holder
        has no part; without weights everybody has all of it."""
        total = sum(weights.values())
        self._parts = {holder: weight / total for holder, weight in weights.items() if weight > 0}

    def held(self, holder: H) -> int:
        """Units that ``holder`` has."""
        return self._held[holder]

    def room(self, holder: H | None, amount: int) -> bool:
        """Return True if ``amount`` more may be charged to ``holder``; None stands for work without
        a holder, which may use the whole limit."""
        after = self.used + amount
        if self.used == 0:
            return True
        if after > self.limit:
            return False
        if holder is None or not self._parts or not self._held[holder]:
            return True
        part = self._parts.get(holder, 0.0) * self.limit
        return self._held[holder] + amount <= part or after <= self.limit / 2

    def charge(self, holder: H | None, amount: int) -> None:
        """Take ``amount`` units for ``holder``; a negative amount gives them back."""
        self.used += amount
        if holder is None:
            return
        self._held[holder] += amount
        if not self._held[holder]:
            del self._held[holder]
