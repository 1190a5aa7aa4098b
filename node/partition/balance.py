"""Whole units to peers of different speeds, as near to the least makespan as counted work allows.

Longest-processing-time-first, MULTIFIT, exchanges from the better start, then branch and bound
where units are few.
"""

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heapify, heapreplace
from itertools import groupby

from node.core.errors import OutOfResources
from node.partition.bounds import lower_bound
from node.partition.exact import settle
from node.partition.search import ComparisonBudget, OwnershipProblem, SearchState, improve

WORK = 1_500_000
FIT_TRIES = 24
SHAKES = 400
CLOSE = 1e-9
"""A makespan this near to its lower bound is optimal but for rounding."""


def balance(problem: OwnershipProblem, work: int = WORK) -> tuple[list[int], float]:
    """(peer of each unit, lower bound of the makespan that is proven). Ties go to the first peer.

    Raises OutOfResources when the units do not fit into the room given; the search for a fit is a
    heuristic.
    """
    if not problem.costs:
        return [], 0.0
    left = ComparisonBudget(work)
    best = SearchState(problem, longest_first(problem))
    floor = lower_bound(problem.costs, problem.speeds, best.makespan())
    goal = floor * (1 + CLOSE)
    improve(best, left, goal)
    if best.makespan() > goal and problem.room is None:
        fitted = _multifit(problem, floor, best.makespan())
        if fitted is not None:
            other = SearchState(problem, fitted)
            improve(other, left, goal)
            if other.makespan() < best.makespan():
                best = other
    if best.makespan() > goal and problem.room is None:
        best, floor = settle(_shake(best, left, goal), floor, work)
    return best.owner, min(floor, best.makespan())


def longest_first(problem: OwnershipProblem, begin: Sequence[int] | None = None) -> list[int]:
    """Each unit, largest first, where it would be done first (Graham 1969; on uniform machines
    Gonzalez, Ibarra, Sahni 1977).

    ``begin``: owners already fixed, -1 for the units to place. Raises OutOfResources when a unit
    finds no room.
    """
    if begin is not None:
        owner = list(begin)
    else:
        owner = [-1] * len(problem.costs)
    state = SearchState(problem, owner)
    room = problem.room
    used = state.used
    heaps: dict[float, list[tuple[int, int]]] = {}
    for peer, s in enumerate(problem.speeds):
        heaps.setdefault(s, []).append((state.load[peer], peer))
    for heap in heaps.values():
        heapify(heap)
    for unit in [i for i, p in enumerate(owner) if p < 0]:
        cost = problem.costs[unit]
        size = problem.sizes[unit]
        if room is not None:
            fitting = [p for p, most in enumerate(room) if used[p] + size <= most]
            peer = min(
                fitting, key=lambda p: ((state.load[p] + cost) / problem.speeds[p], p), default=-1
            )
            if peer < 0:
                raise OutOfResources(
                    f"a unit with {size} bytes of state finds no peer with room for it",
                    "add peers or memory, or split the matrix",
                )
            state.load[peer] += cost
            used[peer] += size
        else:
            _, peer, s = min(((heap[0][0] + cost) / s, heap[0][1], s) for s, heap in heaps.items())
            heapreplace(heaps[s], (heaps[s][0][0] + cost, peer))
        owner[unit] = peer
    return owner


def _multifit(problem: OwnershipProblem, low: float, high: float) -> list[int] | None:
    """First-fit-decreasing into bins that hold time T, the slowest peer's first, for ever shorter T
    (Coffman, Garey, Johnson 1978; Friesen and Langston 1983 for different speeds)."""
    best = None
    for _ in range(FIT_TRIES):
        middle = (low + high) / 2
        found = _first_fit(problem, middle * (1 + 1e-12))
        if found is None:
            low = middle
        else:
            best = found
            high = middle
    return best


def _first_fit(problem: OwnershipProblem, time: float) -> list[int] | None:
    costs = problem.costs
    owner = [-1] * len(problem.costs)
    kinds = [list(units) for _, units in groupby(range(len(costs)), costs.__getitem__)]
    keys = [-costs[kind[0]] for kind in kinds]
    for peer in sorted(range(len(problem.speeds)), key=lambda p: (problem.speeds[p], p)):
        room = int(time * problem.speeds[peer])
        at = 0
        while (at := bisect_left(keys, -room, at)) < len(keys):
            take = min(len(kinds[at]), room // -keys[at])
            room += take * keys[at]
            for _ in range(take):
                owner[kinds[at].pop()] = peer
            if kinds[at]:
                at += 1
            else:
                del kinds[at], keys[at]
    if keys:
        return None
    return owner


def _shake(state: SearchState, work: ComparisonBudget, goal: float) -> SearchState:
    """Empty the slowest peer and two others, deal their units out anew in a disturbed order, and
    improve; again up to ``SHAKES`` times. A new plan is kept if it is no worse."""
    best = state
    dice = 1
    few = len(state.load)
    if few <= 2:
        return best
    for _ in range(SHAKES):
        if work.left <= 0 or best.makespan() <= goal:
            break
        slow = best.slowest()
        chosen = {slow}
        while len(chosen) < 3:
            dice = _next(dice)
            chosen.add((dice >> 16) % few)
        owner = list(best.owner)
        units = sorted(u for p in chosen for u in best.held[p])
        weights: list[tuple[float, int]] = []
        for u in units:
            dice = _next(dice)
            weights.append((-best.problem.costs[u] * (1.0 + ((dice >> 16) % 256) / 512), u))
        loads = dict.fromkeys(sorted(chosen), 0)
        for _, u in sorted(weights):
            peer = min(
                loads,
                key=lambda p: ((loads[p] + best.problem.costs[u]) / best.problem.speeds[p], p),
            )
            owner[u] = peer
            loads[peer] += best.problem.costs[u]
        work.spend(len(owner) + few)
        other = SearchState(best.problem, owner)
        improve(other, work, goal)
        if other.makespan() <= best.makespan():
            best = other
    return best


def _next(dice: int) -> int:
    """A linear congruential generator, our own so that it never changes with Python."""
    return (dice * 1103515245 + 12345) % 2**31
