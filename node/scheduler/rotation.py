"""Whose turn it is to be left out: every ends peer trains every block stage, and all stages equally
often, over the epochs. Pure.

Enters: paths that counted. Leaves: what is owed in the next epoch. A leader that takes over learns
it from the plan before.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from copy import deepcopy

from node.core.ids import PeerId
from node.core.journey import Path

Debt = tuple[PeerId, int]
"""(origin, block stage) that have not met lately."""


class Rotation:
    """Remembers when each origin last trained each stage, in epochs counted here, and how often
    each stage was visited."""

    def __init__(self) -> None:
        self._turn = 0
        self._last: dict[Debt, int] = {}
        self._since: dict[PeerId, int] = {}
        self._visits: Counter[int] = Counter()

    def counted(self, paths: Iterable[Path]) -> None:
        """An epoch was committed with these paths."""
        self._turn += 1
        for path in paths:
            self._since.setdefault(path.origin, self._turn)
            for hop in path.hops:
                self._last[path.origin, hop.stage] = self._turn
                self._visits[hop.stage] += 1

    def after(self, paths: Iterable[Path]) -> Rotation:
        """What it will be when these paths have counted."""
        ahead = deepcopy(self)
        ahead.counted(paths)
        return ahead

    def owed(
        self, counts: Mapping[PeerId, int], stages: Collection[int], hops: int
    ) -> dict[Debt, int]:
        """By ends peer and stage, the epochs since they met, where that was not the last one; the
        oldest debts of a peer come first, and no more than its paths can pay."""
        if hops >= len(stages):
            return {}
        found: dict[Debt, int] = {}
        for origin, count in sorted(counts.items()):
            since = self._since.get(origin)
            if since is None or not count:
                continue
            ages = {s: self._turn - self._last.get((origin, s), since - 1) for s in stages}
            oldest = sorted((s for s in stages if ages[s] > 0), key=lambda s: (-ages[s], s))
            found.update({(origin, s): ages[s] for s in oldest[: count * hops]})
        return found

    def visits(self, stages: Collection[int], total: int) -> dict[int, int]:
        """``total`` visits spread over the stages, one more for those that had the fewest so far
        where they do not divide."""
        each, more = divmod(total, len(stages))
        fewest = sorted(stages, key=lambda s: (self._visits[s], s))[:more]
        return {s: each + (s in fewest) for s in stages}
