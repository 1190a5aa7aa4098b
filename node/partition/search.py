"""Near-optimal makespan: a plan in hand is improved by exchanges of units between the slowest peer
and others.

All work is counted, not timed: a limit on comparisons is the same on every machine, a limit on
seconds is not.
"""

from bisect import bisect_left, insort
from collections.abc import Sequence
from itertools import combinations

LOOK_AT = 24
"""Number of the earliest peers that are tried for exchanges of several units."""
FEW = ((2, 60), (3, 36))
"""Pairs (most, limit): exchanges of up to ``most`` units each way are tried between peers that hold
at most ``limit`` units together, of which at most ``most`` of each cost count."""

Some = tuple[int, tuple[int, ...]]
"""Total cost of a combination of units, and the units."""


class ComparisonBudget:
    """Comparisons that may still be made."""

    def __init__(self, limit: int) -> None:
        self.left = limit

    def spend(self, amount: int) -> bool:
        """Take ``amount`` from the budget. Return True if some is left."""
        self.left -= amount
        return self.left > 0


class OwnershipProblem:
    """``costs`` falling, ``sizes`` in bytes beside them; ``speeds`` and, if memory is short,
    ``room`` in bytes of each peer."""

    def __init__(
        self,
        costs: Sequence[int],
        speeds: Sequence[float],
        sizes: Sequence[int] = (),
        room: Sequence[int] | None = None,
    ) -> None:
        self.costs = list(costs)
        self.speeds = list(speeds)
        self.room = None if room is None else list(room)
        self.sizes = list(sizes) or [0] * len(self.costs)


class SearchState:
    """Holdings of each peer. ``held[p]``: indices of units, rising, so largest first; ``load``,
    ``used``: sums of cost and bytes."""

    def __init__(self, problem: OwnershipProblem, owner: Sequence[int]) -> None:
        self.problem = problem
        self.owner = list(owner)
        self.held: list[list[int]] = [[] for _ in problem.speeds]
        self.load = [0] * len(problem.speeds)
        self.used = [0] * len(problem.speeds)
        for unit, peer in enumerate(owner):
            if peer >= 0:
                self.held[peer].append(unit)
                self.load[peer] += problem.costs[unit]
                self.used[peer] += problem.sizes[unit]

    def time(self, peer: int) -> float:
        """Time at which a peer is done."""
        return self.load[peer] / self.problem.speeds[peer]

    def slowest(self) -> int:
        """The last to be done, the first of several."""
        return max(range(len(self.load)), key=lambda p: (self.time(p), -p))

    def makespan(self) -> float:
        """Time at which the last peer is done."""
        return max(map(self.time, range(len(self.load))))

    def place(self, unit: int, peer: int) -> None:
        """Give a unit to a peer, and take it from its present owner."""
        was = self.owner[unit]
        problem = self.problem
        if was >= 0:
            self.held[was].remove(unit)
            self.load[was] -= problem.costs[unit]
            self.used[was] -= problem.sizes[unit]
        self.owner[unit] = peer
        insort(self.held[peer], unit)
        self.load[peer] += problem.costs[unit]
        self.used[peer] += problem.sizes[unit]

    def handfuls(self, peer: int, most: int) -> list[Some]:
        """Up to ``most`` of a peer's units, one of each total cost, rising; the empty one first."""
        costs = self.problem.costs
        found: dict[int, tuple[int, ...]] = {0: ()}
        some = self.some(peer, most)
        for i in some:
            found.setdefault(costs[i], (i,))
        for size in range(2, most + 1):
            for units in combinations(some, size):
                found.setdefault(sum(map(costs.__getitem__, units)), units)
        return sorted(found.items())

    def some(self, peer: int, most: int) -> list[int]:
        """Up to ``most`` of a peer's units of each cost."""
        costs = self.problem.costs
        chosen = []
        for i in self.held[peer]:
            if len(chosen) < most or costs[chosen[-most]] != costs[i]:
                chosen.append(i)
        return chosen

    def room_for(self, peer: int, come: Sequence[int], go: Sequence[int]) -> bool:
        """Return True if a peer's memory suffices after an exchange."""
        room = self.problem.room
        size = self.problem.sizes.__getitem__
        if room is None:
            return True
        return self.used[peer] + sum(map(size, come)) - sum(map(size, go)) <= room[peer]


def improve(state: SearchState, work: ComparisonBudget, good_enough: float) -> None:
    """Exchange until the slowest peer cannot be helped, it is ``good_enough``, or the work is
    spent.

    Each exchange takes the best of all for the pair's later end, so the loads fall in lexicographic
    order and this ends.
    """
    while work.left > 0:
        slow = state.slowest()
        if state.time(slow) <= good_enough:
            return
        others = [p for p in range(len(state.load)) if p != slow]
        found = _best(state, slow, others, 1, work)
        if found is None:
            others.sort(key=lambda p: (state.time(p), p))
            for most, few in FEW:
                if len(mine := state.some(slow, most)) <= few:
                    near = [
                        p for p in others[:LOOK_AT] if len(state.some(p, most)) + len(mine) <= few
                    ]
                    found = _best(state, slow, near, most, work)
                if found is not None:
                    break
        if found is None:
            return
        _, peer, give, take = found
        for unit in give:
            state.place(unit, peer)
        for unit in take:
            state.place(unit, slow)


def _best(
    state: SearchState, slow: int, others: Sequence[int], most: int, work: ComparisonBudget
) -> tuple[float, int, tuple[int, ...], tuple[int, ...]] | None:
    speeds = state.problem.speeds
    mine = state.handfuls(slow, most)[1:]
    now = state.time(slow)
    best: tuple[float, int, tuple[int, ...], tuple[int, ...]] | None = None
    for peer in others:
        room = now * speeds[peer] - state.load[peer]
        if room <= 0 or not mine:
            continue
        theirs = [(0, ())]
        if most > 1 or state.held[peer]:
            theirs = state.handfuls(peer, most)
        sums = [cost for cost, _ in theirs]
        if not work.spend(len(mine) + len(theirs)):
            return best
        shift = (state.load[slow] * speeds[peer] - state.load[peer] * speeds[slow]) / (
            speeds[slow] + speeds[peer]
        )
        for cost, give in mine:
            at = bisect_left(sums, cost - shift)
            for k in (at - 1, at):
                if not 0 <= k < len(sums):
                    continue
                moved = cost - sums[k]
                if not 0 < moved < room:
                    continue
                end = max(
                    (state.load[slow] - moved) / speeds[slow],
                    (state.load[peer] + moved) / speeds[peer],
                )
                if end < (now if best is None else best[0]):
                    take = theirs[k][1]
                    if state.room_for(peer, give, take) and state.room_for(slow, take, give):
                        best = end, peer, give, take
    return best
