"""Exact within counted work: is there a plan that ends by T, and which?

Two searches. One fills peer after peer and keeps every count of packed units that may still lead to
a plan: exact and quick where units have few different costs, as the layers of a transformer do. The
other places unit after unit: for few units.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

from node.partition.search import ComparisonBudget, OwnershipProblem, SearchState

KINDS = 8
"""Most different costs of units with which peers are packed anew. Else exchanges come close."""
HELD = 12
"""Most units that a peer holds in the mean with which peers are packed anew."""
BEAMS = ((60, 6), (300, 4))
"""(states kept for each peer, bisections), narrow and quick first."""
PACK_WORK = 120_000
UNITS = 40
BRANCH_WORK = 400_000
NEAR = 1e-4
"""A plan this near to the floor is not worth packing anew."""


def settle(state: SearchState, floor: float, work: int = BRANCH_WORK) -> tuple[SearchState, float]:
    """A plan at least as good, and a floor at least as high, by bisection between the two and by
    branching.

    ``work`` bounds each of the searches, if it is less than they take anyway.
    """
    problem = state.problem
    best = state
    pack = min(work, PACK_WORK)
    if len(set(problem.costs)) <= KINDS and len(problem.costs) <= HELD * len(problem.speeds):
        for beam, tries in BEAMS:
            low = floor
            high = best.makespan()
            for _ in range(tries):
                if high - low <= NEAR * high:
                    break
                middle = (low + high) / 2
                owner, proven = _packed(problem, middle, beam, pack)
                if owner is not None:
                    best = SearchState(problem, owner)
                    high = min(middle, best.makespan())
                else:
                    low = middle
                    if proven:
                        floor = max(floor, middle)
            if best.makespan() > floor * (1 + 1e-9):
                owner, proven = _packed(problem, best.makespan() * (1 - 1e-9), beam, pack)
                if owner is not None:
                    best = SearchState(problem, owner)
                elif proven:
                    floor = best.makespan()
    if len(problem.costs) <= UNITS and best.makespan() > floor * (1 + 1e-9):
        best, proven = _branched(best, floor, min(work, BRANCH_WORK))
        if proven:
            floor = best.makespan()
    return best, floor


def _packed(
    problem: OwnershipProblem, time: float, beam: int, most: int = PACK_WORK
) -> tuple[list[int] | None, bool]:
    """(owners of a plan that ends by ``time``, or None; whether None is proven).

    Peers are filled from the slowest. Room that a peer leaves unused is lost; all room lost so far
    may not exceed the spare room.
    """
    kinds = sorted(Counter(problem.costs).items(), reverse=True)
    costs = [c for c, _ in kinds]
    totals = tuple(n for _, n in kinds)
    peers = sorted(range(len(problem.speeds)), key=lambda p: (problem.speeds[p], p))
    rooms = [int(time * problem.speeds[p] * (1 + 1e-12)) for p in peers]
    spare = sum(rooms) - sum(problem.costs)
    if spare < 0:
        return None, True
    # One layer for each peer: units left of each kind -> (lost so far, units left before it).
    layers: list[dict[tuple[int, ...], tuple[int, tuple[int, ...] | None]]] = [{totals: (0, None)}]
    work = ComparisonBudget(most)
    whole = True
    for room in rooms:
        found: dict[tuple[int, ...], tuple[int, tuple[int, ...] | None]] = {}
        for left, (lost, _) in layers[-1].items():
            for after, unused in _fillings(costs, left, room):
                if not work.spend(1):
                    return None, False
                wasted = lost + unused
                if not any(after):
                    return _read_back(
                        problem, costs, peers, [*layers, {after: (wasted, left)}], after
                    ), True
                if wasted <= spare and (after not in found or found[after][0] > wasted):
                    found[after] = wasted, left
        found, cut = _kept(found, beam)
        whole = whole and not cut
        if not found:
            return None, whole
        layers.append(found)
    return None, whole


def _fillings(
    costs: Sequence[int], left: tuple[int, ...], room: int, kind: int = 0
) -> Iterator[tuple[tuple[int, ...], int]]:
    """Ways to fill one peer so that nothing of the smallest kind fits beside: (units left, room
    unused)."""
    most = min(left[kind], room // costs[kind])
    last = kind + 1 == len(costs)
    least = 0
    if last:
        least = most
    for taken in range(most, least - 1, -1):
        rest = room - taken * costs[kind]
        after = (*left[:kind], left[kind] - taken, *left[kind + 1 :])
        if last:
            yield after, rest
        else:
            yield from _fillings(costs, after, rest, kind + 1)


def _kept(
    found: dict[tuple[int, ...], tuple[int, tuple[int, ...] | None]], beam: int
) -> tuple[dict[tuple[int, ...], tuple[int, tuple[int, ...] | None]], bool]:
    """States to go on with. Of states that differ in the smallest kind only, keep the one with
    least left; then at most ``beam``: two thirds with least room lost and one third with fewest
    large units left. Returns True as well if states were left out for ``beam``."""
    least: dict[tuple[int, ...], int] = {}
    for left in found:
        head = left[:-1]
        if head not in least or left[-1] < least[head]:
            least[head] = left[-1]
    good = {(*head, tail): found[*head, tail] for head, tail in least.items()}
    if len(good) <= beam:
        return good, False
    order = sorted(good, key=lambda left: (good[left][0], left))
    few = beam - beam // 3
    return {left: good[left] for left in (*order[:few], *sorted(order[few:])[: beam - few])}, True


def _read_back(
    problem: OwnershipProblem,
    costs: Sequence[int],
    peers: Sequence[int],
    layers: Sequence[dict[tuple[int, ...], tuple[int, tuple[int, ...] | None]]],
    end: tuple[int, ...],
) -> list[int]:
    waiting: dict[int, list[int]] = {}
    for unit, cost in enumerate(problem.costs):
        waiting.setdefault(cost, []).append(unit)
    owner = [-1] * len(problem.costs)
    after = end
    for depth in range(len(layers) - 1, 0, -1):
        before = layers[depth][after][1]
        if before is None:
            break
        for cost, had, has in zip(costs, before, after, strict=True):
            for _ in range(had - has):
                owner[waiting[cost].pop()] = peers[depth - 1]
        after = before
    return owner


def _branched(
    state: SearchState, floor: float, most: int = BRANCH_WORK
) -> tuple[SearchState, bool]:
    """Depth-first over units, largest first; (the best plan met, whether it is proven the best)."""
    problem = state.problem
    costs = problem.costs
    speeds = problem.speeds
    best = list(state.owner)
    best_time = state.makespan()
    tails = [sum(costs[unit:]) for unit in range(len(costs) + 1)]
    load = [0] * len(speeds)
    owner = [-1] * len(costs)
    work = ComparisonBudget(most)

    def go(unit: int) -> bool:
        nonlocal best, best_time
        if unit == len(costs):
            best = list(owner)
            best_time = max(work_done / s for work_done, s in zip(load, speeds, strict=True))
            return best_time > floor * (1 + 1e-9)
        if not work.spend(len(speeds)):
            return False
        limit = best_time * (1 - 1e-12)
        free = (max(0, int(limit * s) - held) for held, s in zip(load, speeds, strict=True))
        if sum(free) < tails[unit]:
            return True
        least = 0
        if unit and costs[unit] == costs[unit - 1]:
            least = owner[unit - 1]
        tried: set[tuple[int, float]] = set()
        choices: list[tuple[float, int]] = []
        for peer, s in enumerate(speeds):
            end = (load[peer] + costs[unit]) / s
            # Units of one cost are alike: they go to peers in rising order.
            if peer >= least and end < best_time and (load[peer], s) not in tried:
                choices.append((end, peer))
            tried.add((load[peer], s))
        for end, peer in sorted(choices):
            if end >= best_time:
                break
            owner[unit] = peer
            load[peer] += costs[unit]
            more = go(unit + 1)
            load[peer] -= costs[unit]
            if not more:
                return False
        return True

    finished = go(0)
    proven = finished or best_time <= floor * (1 + 1e-9)
    return SearchState(problem, best), proven
