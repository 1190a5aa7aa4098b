"""The set of block stages that each micro-batch trains, dealt so that all stages are trained
equally often. Pure.

A set of stages is legal if some order of it keeps the rules. If any order does, the rising one does
too: every order jumps over the gap between two neighbours of the rising order, at once. So sets are
dealt, and orders are a matter of search.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import islice, pairwise

from node.core.errors import UsageFault
from node.scheduler.planning.problem import PathProblem

StageSet = tuple[int, ...]
"""Block stages, rising."""


def legal(problem: PathProblem, stages: StageSet) -> bool:
    """Return True if the rising order of these stages keeps the bound on jumps."""
    return all(s - front <= problem.max_jump for front, s in pairwise((0, *stages)))


def deal(problem: PathProblem) -> list[StageSet]:
    """A legal set for every micro-batch; with ``equal_visits`` every stage is in equally many.

    Raises UsageFault, naming the rule that cannot hold and the nearest problem without it.
    """
    blocks = len(problem.stages) - 1
    visits = problem.total * problem.hops
    if problem.equal_visits and blocks and not problem.visits and visits % blocks:
        more = next(
            x for x in range(1, blocks + 1) if (problem.total + x) * problem.hops % blocks == 0
        )
        raise UsageFault(
            f"equal visits cannot hold: {problem.total} micro-batches make {visits} visits, and "
            f"{blocks} stages share them",
            f"give {problem.total + more} micro-batches in all, or equal_visits false",
        )
    dealt = _deal(problem, blocks)
    if dealt is not None:
        return dealt
    wider = (replace(problem, max_jump=j) for j in range(problem.max_jump + 1, blocks))
    jump = next((p.max_jump for p in wider if _deal(p, blocks) is not None), blocks)
    raise UsageFault(
        f"equal visits cannot hold with max_jump {problem.max_jump}: paths of {problem.hops} of "
        f"{blocks} block stages do not "
        "reach all stages equally often",
        f"give max_jump {jump}, or equal_visits false, or path_length {blocks + 1}",
    )


def _deal(problem: PathProblem, blocks: int) -> list[StageSet] | None:
    """Deal one set after another, each time the legal set of the stages that lack the most visits.
    For equal visits, sets are then exchanged until no stage lacks one."""
    if problem.hops == blocks:
        return [tuple(range(1, blocks + 1))] * problem.total
    lack = [0, *(problem.visits or [problem.total * problem.hops // blocks] * blocks)]
    out: list[StageSet] = []
    for _ in range(problem.total):
        found = _heaviest([x * 1.0 for x in lack], problem.hops, problem.max_jump)
        for s in found:
            lack[s] -= 1
        out.append(found)
    if problem.equal_visits:
        return _evened(problem, out, lack)
    return out


def _evened(problem: PathProblem, dealt: list[StageSet], lack: list[int]) -> list[StageSet] | None:
    """Move visits from stages with too many to stages that lack them, through other stages if need
    be. Returns None if there is no way."""
    blocks = len(lack) - 1
    pool = Counter(dealt)
    while any(lack[1:]):
        trail = _exchange(
            problem,
            pool,
            {s for s in range(1, blocks + 1) if lack[s] < 0},
            {s for s in range(1, blocks + 1) if lack[s] > 0},
        )
        if trail is None:
            return None
        for was, now in trail:
            pool[was] -= 1
            pool[now] += 1
        first = trail[0]
        last = trail[-1]
        (gave,), (got,) = set(first[0]) - set(first[1]), set(last[1]) - set(last[0])
        lack[gave] += 1
        lack[got] -= 1
    # Sets in turns, so that neighbours differ.
    out: list[StageSet] = []
    while pool := +pool:
        out += sorted(pool)
        pool -= Counter(list(pool))
    return out


def _exchange(
    problem: PathProblem, pool: Counter[StageSet], above: set[int], below: set[int]
) -> list[tuple[StageSet, StageSet]] | None:
    """Sets to replace, each by one with one other stage, so that a stage above gives a visit to one
    below; breadth first."""
    came: dict[int, tuple[int, StageSet, StageSet] | None] = dict.fromkeys(sorted(above))
    queue = deque(came)
    blocks = len(problem.stages) - 1
    while queue:
        s = queue.popleft()
        for was in sorted(+pool):
            if s not in was:
                continue
            for other in range(1, blocks + 1):
                now = tuple(sorted({*was, other} - {s}))
                if other in came or other in was or not legal(problem, now):
                    continue
                came[other] = (s, was, now)
                queue.append(other)
                if other in below:
                    trail: list[tuple[StageSet, StageSet]] = []
                    at = came[other]
                    while at is not None:
                        trail.append((at[1], at[2]))
                        at = came[at[0]]
                    changed = Counter(w for w, _ in trail)
                    if any(c > pool[w] for w, c in changed.items()):
                        return None
                    return trail[::-1]
    return None


def _heaviest(weight: Sequence[float], q: int, jump: int) -> StageSet:
    """``q`` stages of the largest total weight, no two neighbours further apart than ``jump``."""
    blocks = len(weight) - 1
    if q == 0:
        return ()
    if jump > blocks - q:
        # No gap can be too wide: the q heaviest.
        return tuple(sorted(sorted(range(1, blocks + 1), key=lambda s: (-weight[s], s))[:q]))
    least = float("-inf")
    best = [[least] * (blocks + 1) for _ in range(q + 1)]
    back = [[0] * (blocks + 1) for _ in range(q + 1)]
    best[0][0] = 0.0
    for k in range(1, q + 1):
        row = best[k]
        before = best[k - 1]
        for s in range(k, blocks - q + k + 1):
            was = max(range(max(0, s - jump), s), key=before.__getitem__)
            row[s] = before[was] + weight[s]
            back[k][s] = was
    s = max(range(blocks + 1), key=best[q].__getitem__)
    out = []
    for k in range(q, 0, -1):
        out.append(s)
        s = back[k][s]
    return tuple(reversed(out))


def orders(problem: PathProblem, stages: StageSet, most: int = 64) -> list[StageSet]:
    """Legal orders of a set, the rising one first, at most ``most``."""
    return list(
        _orders(stages, problem.max_swaps, problem.max_swap_distance, problem.max_jump, most)
    )


@lru_cache(maxsize=65536)
def _orders(
    stages: StageSet, swaps: int, distance: int, jump: int, most: int
) -> tuple[StageSet, ...]:
    return tuple(islice(_walk((), stages, 0, swaps, swaps, distance, jump), most))


def _walk(
    done: StageSet, left: StageSet, front: int, swaps: int, total: int, distance: int, jump: int
) -> Iterator[StageSet]:
    if not left:
        yield done
        return
    for s in left:
        rest = tuple(x for x in left if x != s)
        # A stage left behind further than a swap reaches can never be fetched.
        if s > front:
            if s - front <= jump and (left[0] == s or s - left[0] <= distance):
                yield from _walk((*done, s), rest, s, swaps, total, distance, jump)
        elif swaps and front - s <= min(distance, total, jump):
            yield from _walk(
                (*done, s), rest, front, swaps - 1, total - (front - s), distance, jump
            )
