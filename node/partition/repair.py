"""Change as little of an ownership as a change of members or speeds allows.

Orphans go to the peers that finish them first. Then units are exchanged off the slowest peer: first
units that are moving anyway, then the units that relieve it most for the bytes of state that must
travel. Planning anew would move most of the bytes, for little.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

from node.core.errors import OutOfResources
from node.partition.balance import WORK as FRESH_WORK
from node.partition.balance import balance, longest_first
from node.partition.bounds import ideal, lower_bound
from node.partition.search import ComparisonBudget, OwnershipProblem, SearchState

WORK = 400_000
MANY = 48
LARGE = 60_000
"""Units times peers above which only one variant is tried."""
LARGE_WORK = 40_000
"""Work of a fresh plan beside a problem above ``LARGE``."""
ANEW = 0.95
"""Share of the repaired makespan that a fresh plan may have at most to be taken: nearly everything
moves when it is planned anew."""
MUST = 1.048
"""Makespan down to which bytes are spent without a limit, as a multiple of the ideal time, or of
the floor where that is more than ``APART`` times the ideal."""
APART = 1.04
WISH = 1.005
"""Makespan, as a multiple of the floor, down to which up to ``SPEND`` times the fewest bytes are
spent."""
SPEND = 1.2
SPENDS = (0.9, 1.0, 1.1, 1.2)
NEAR = 16
"""Number of the peers done first, which are looked at before the others."""
TASTES = 3
"""Ways to choose among exchanges that cost bytes: most relief a byte; earliest end; fewest bytes
that reach the goal."""


@dataclass(frozen=True)
class Repaired:
    """``owner`` of each unit; ``moved``: bytes that change hands; ``least``: bytes that any plan at
    the floor must move; ``floor``: proven lower bound of the makespan."""

    owner: list[int]
    moved: int
    least: int
    floor: float


def repair(problem: OwnershipProblem, before: Sequence[int | None], work: int = WORK) -> Repaired:
    """``before``: the peer that held each unit; -1 a peer that is gone; None for a unit that has no
    state yet. ``work``: comparisons of each variant; with less than usual fewer variants are tried.

    Raises OutOfResources when the units do not fit into the room given.
    """
    home = [-1 if peer is None else peer for peer in before]
    sizes = [0 if peer is None else size for peer, size in zip(before, problem.sizes, strict=True)]
    orphaned = sum(size for peer, size in zip(home, sizes, strict=True) if peer < 0)
    fresh_work = work
    if work >= WORK:
        fresh_work = FRESH_WORK
    if all(peer < 0 for peer in home):
        owner, floor = balance(problem, fresh_work)
        return Repaired(owner, orphaned, orphaned, floor)
    try:
        first = longest_first(problem, _fitting(problem, home))
    except OutOfResources:
        # The kept units leave no room for an orphan.
        state, spent, floor = _anew(problem, home, sizes, fresh_work)
        least = orphaned + _shed(problem, home, sizes, floor)
        return Repaired(state.owner, orphaned + spent, least, floor)
    start = SearchState(problem, first)
    floor = lower_bound(problem.costs, problem.speeds, start.makespan())
    least = orphaned + _shed(problem, home, sizes, floor)
    must = bearable(problem, floor)
    if first == list(before) and all(start.held) and start.makespan() <= must:
        return Repaired(first, 0, least, floor)
    tried: list[tuple[float, int, list[int]]] = []
    large = len(problem.costs) * len(problem.speeds) > LARGE
    spends = SPENDS
    if large or work < WORK:
        spends = SPENDS[-1:]
    tastes = TASTES
    if large:
        work *= 4
        tastes = 1
    for taste, spend in product(range(tastes), spends):
        state = SearchState(problem, first)
        moves = _Moves(state, home, sizes, taste)
        moves.run(floor * WISH, 0, ComparisonBudget(work))
        moves.run(floor * WISH, int(spend * least) - orphaned, ComparisonBudget(work))
        moves.run(must, None, ComparisonBudget(work))
        moves.send_home(max(floor * WISH, state.makespan()))
        tried.append((state.makespan(), orphaned + moves.spent, state.owner))
    if (reached := min(tried)[0]) > must:
        # Kept units may be in the way of the ones that had to move.
        if large:
            fresh_work = min(fresh_work, LARGE_WORK)
        state, spent, floor = _anew(problem, home, sizes, fresh_work)
        must = bearable(problem, floor)
        if state.makespan() <= ANEW * reached:
            tried.append((state.makespan(), orphaned + spent, state.owner))
    _, moved, owner = min(
        tried, key=lambda plan: (max(plan[0], must), max(plan[1], SPEND * least), plan[:2])
    )
    return Repaired(owner, moved, least, floor)


def _anew(
    problem: OwnershipProblem, home: Sequence[int], sizes: Sequence[int], work: int
) -> tuple[SearchState, int, float]:
    """(A fresh plan with units sent home where possible; bytes that leave home; lower bound)."""
    owner, floor = balance(problem, work)
    state = SearchState(problem, owner)
    moves = _Moves(state, home, sizes, 0)
    moves.send_home(max(bearable(problem, floor), state.makespan()))
    return state, moves.spent, floor


def bearable(problem: OwnershipProblem, floor: float) -> float:
    """The makespan that repair insists on."""
    best = ideal(problem.costs, problem.speeds)
    return MUST * (best if floor <= APART * best else floor)


def _fitting(problem: OwnershipProblem, home: Sequence[int]) -> list[int]:
    """Homes, without the units that a peer's memory no longer holds: its cheapest units become
    orphans too."""
    if problem.room is None:
        return list(home)
    used = [0] * len(problem.speeds)
    kept = list(home)
    for unit, peer in enumerate(home):
        if peer >= 0:
            used[peer] += problem.sizes[unit]
            if used[peer] > problem.room[peer]:
                used[peer] -= problem.sizes[unit]
                kept[unit] = -1
    return kept


def _shed(problem: OwnershipProblem, home: Sequence[int], sizes: Sequence[int], time: float) -> int:
    """The fewest bytes that bring every peer's kept load down to its work of ``time`` seconds, if
    units could be divided: each peer sheds the units with most cost a byte first (Dantzig 1957)."""
    total = 0
    for peer, speed in enumerate(problem.speeds):
        held = [i for i, p in enumerate(home) if p == peer]
        excess = sum(problem.costs[i] for i in held) - int(time * speed * (1 + 1e-9)) - 1
        for i in sorted(held, key=lambda i: (Fraction(sizes[i], problem.costs[i]), i)):
            if excess <= 0:
                break
            part = min(excess, problem.costs[i])
            total += sizes[i] * part // problem.costs[i]
            excess -= part
    return total


def _thinned(units: list[int]) -> list[int]:
    """At most ``MANY`` of them, evenly spaced in cost: among many, near costs do as well."""
    step = len(units) / MANY
    if step <= 1:
        return units
    return [units[int(k * step)] for k in range(MANY)]


class _Moves:
    """Exchanges between the slowest peer and others, priced in bytes that leave home."""

    def __init__(
        self, state: SearchState, home: Sequence[int], sizes: Sequence[int], taste: int
    ) -> None:
        self.state = state
        self.home = home
        self.sizes = sizes
        self.taste = taste
        self.work = ComparisonBudget(0)
        self.spent = sum(
            size
            for size, was, now in zip(sizes, home, state.owner, strict=True)
            if was >= 0 and was != now
        )

    def run(self, goal: float, budget: int | None, work: ComparisonBudget) -> None:
        """Exchange until the makespan is at most ``goal``, nothing helps, or ``budget`` bytes are
        spent; None: no limit."""
        state = self.state
        self.work = work
        while self.work.left > 0:
            slow = state.slowest()
            now = state.time(slow)
            if now <= goal:
                return
            if not self.work.spend(len(state.load)):
                return
            limit = None
            if budget is not None:
                limit = max(0, budget - self.spent)
            others = sorted(
                (p for p in range(len(state.load)) if p != slow), key=lambda p: (state.time(p), p)
            )
            found = self._best(slow, others[:NEAR], 1, goal, limit) or self._best(
                slow, others[NEAR:], 1, goal, limit
            )
            if found is None:
                few = [p for p in others[:NEAR] if len(state.held[p]) + len(state.held[slow]) <= 40]
                found = self._best(slow, few, 2, goal, limit)
            if found is None:
                return
            _, _, peer, give, take = found
            self.spent += self._price(give, slow, peer) + self._price(take, peer, slow)
            for unit in give:
                state.place(unit, peer)
            for unit in take:
                state.place(unit, slow)

    def send_home(self, time: float) -> None:
        """Undo moves that are not needed for a makespan of ``time``, moves of most bytes first."""
        state = self.state
        problem = self.state.problem
        away = [i for i, p in enumerate(state.owner) if self.home[i] >= 0 and p != self.home[i]]
        for unit in sorted(away, key=lambda i: (-self.sizes[i], i)):
            to = self.home[unit]
            if (state.load[to] + problem.costs[unit]) / problem.speeds[
                to
            ] <= time and state.room_for(to, (unit,), ()):
                state.place(unit, to)
                self.spent -= self.sizes[unit]

    def _price(self, units: Sequence[int], here: int, there: int) -> int:
        price = 0
        for i in units:
            if self.home[i] == here:
                price += self.sizes[i]
            elif self.home[i] == there:
                price -= self.sizes[i]
        return price

    def _handfuls(self, here: int, there: int, most: int) -> list[tuple[int, int, tuple[int, ...]]]:
        """(cost, price, units) of the cheapest combination to move for each total cost; rising, the
        empty one first."""
        costs = self.state.problem.costs
        held = self.state.held[here]
        if len(held) > MANY:
            loose = [i for i in held if self.home[i] != here]
            held = sorted(_thinned(loose) + _thinned([i for i in held if self.home[i] == here]))
        found: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}

        def offer(units: tuple[int, ...], cost: int) -> None:
            price = self._price(units, here, there)
            if cost not in found or price < found[cost][0]:
                found[cost] = price, units

        for k, i in enumerate(held):
            offer((i,), costs[i])
            if most > 1:
                for j in held[k + 1 :]:
                    offer((i, j), costs[i] + costs[j])
        return sorted((cost, price, units) for cost, (price, units) in found.items())

    def _taste(self, now: float, end: float, goal: float, paid: int) -> tuple[float, float]:
        """Rank of an exchange: smaller is better, and exchanges without bytes are best."""
        if paid <= 0:
            return float("-inf"), end
        if self.taste == 0:
            return -(now - max(end, goal)) / paid, end
        if self.taste == 1:
            return end, paid
        return max(end, goal), paid

    def _best(
        self, slow: int, others: Sequence[int], most: int, goal: float, limit: int | None
    ) -> tuple[float, float, int, tuple[int, ...], tuple[int, ...]] | None:
        """The exchange that is best by taste: (taste, taste, peer, units that go there, units that
        come back)."""
        state = self.state
        speeds = self.state.problem.speeds
        now = state.time(slow)
        best = None
        for peer in others:
            room = now * speeds[peer] - state.load[peer]
            if room <= 0:
                continue
            mine = self._handfuls(slow, peer, most)[1:]
            theirs = self._handfuls(peer, slow, most)
            sums = [cost for cost, _, _ in theirs]
            if not self.work.spend(len(mine) + len(theirs)):
                break
            shift = (state.load[slow] * speeds[peer] - state.load[peer] * speeds[slow]) / (
                speeds[slow] + speeds[peer]
            )
            for cost, price, give in mine:
                at = bisect_left(sums, cost - shift)
                for k in sorted({0, max(at - 1, 0), min(at, len(sums) - 1)}):
                    moved = cost - sums[k]
                    paid = price + theirs[k][1]
                    take = theirs[k][2]
                    if not 0 < moved < room or (limit is not None and paid > limit):
                        continue
                    end = max(
                        (state.load[slow] - moved) / speeds[slow],
                        (state.load[peer] + moved) / speeds[peer],
                    )
                    if end >= now or not (
                        state.room_for(peer, give, take) and state.room_for(slow, take, give)
                    ):
                        continue
                    key = (*self._taste(now, end, goal, paid), peer, give, take)
                    if best is None or key < best:
                        best = key
        return best
