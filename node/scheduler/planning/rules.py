"""The rules of a plan, each a predicate of its own: None when it holds, else one sentence. Pure.

`counted`, `ends_kept`, `equal_visits`, `bounded_swaps`, `bounded_jumps`, `owed_kept`, `safe`;
`broken` asks them all.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from node.scheduler.planning.problem import PathProblem, Route

Paths = Sequence[Route]


def counted(problem: PathProblem, paths: Paths) -> str | None:
    """Every ends peer starts its micro-batches, every path has its length and names peers of block
    stages."""
    for route in paths:
        if route[0] not in problem.counts:
            return f"{route[0]} is not an ends peer"
        if len(route) != problem.length:
            return (
                f"a path of {problem.name} visits {problem.hops} block stages, not {len(route) - 1}"
            )
    found = Counter(route[0] for route in paths)
    for o, count in problem.counts.items():
        if found[o] != count:
            return f"ends peer {o} starts {found[o]} micro-batches, not {count}"
    return None


def ends_kept(problem: PathProblem, paths: Paths) -> str | None:
    """Stage 0 begins and ends every path, is never skipped, never in the middle; no stage is
    visited twice."""
    for route in paths:
        stages = [problem.stage_of.get(n, 0) for n in route[1:]]
        if problem.stage_of.get(route[0]) != 0:
            return f"the path of {route[0]} does not begin at an ends peer"
        if 0 in stages:
            return f"{route[1 + stages.index(0)]}, in the middle of a path, is of no block stage"
        if len(set(stages)) != len(stages):
            return f"a path visits stages {stages}: one of them twice"
    return None


def equal_visits(problem: PathProblem, paths: Paths) -> str | None:
    """If the problem asks for it, equally many micro-batches train every block stage, or the number
    that the problem names for the stage."""
    visits = Counter(problem.stage_of.get(n, 0) for route in paths for n in route[1:])
    found = [visits[s] for s in range(1, len(problem.stages))]
    unequal = len(set(found)) > 1
    if problem.visits:
        unequal = found != list(problem.visits)
    if problem.equal_visits and unequal:
        return f"stages are visited {found} times"
    return None


def bounded_swaps(problem: PathProblem, paths: Paths) -> str | None:
    """A path goes back behind the furthest stage it has reached at most ``max_swaps`` times and
    places in all, and at most ``max_swap_distance`` places at once."""
    return _first(
        swaps_too_much(_order(problem, route), problem.max_swaps, problem.max_swap_distance)
        for route in paths
    )


def bounded_jumps(problem: PathProblem, paths: Paths) -> str | None:
    """A path goes no further than ``max_jump`` places from the furthest stage it has reached, ahead
    or back."""
    return _first(jumps_too_far(_order(problem, route), problem.max_jump) for route in paths)


def swaps_too_much(order: Sequence[int], most: int, distance: int) -> str | None:
    """A sentence if one path swaps too often or too far. ``order``: places of its block stages in
    visiting order; ``most``: swaps, and places in all; ``distance``: places at once."""
    front = swaps = total = 0
    for s in order:
        front = max(front, s)
        swaps = swaps + (s < front)
        total = total + front - s
        if front - s > distance:
            return f"a path swaps stage {s} with {front}, further than {distance}"
    if max(swaps, total) > most:
        return f"a path swaps {swaps} stages by {total}, more than {most}"
    return None


def jumps_too_far(order: Sequence[int], most: int) -> str | None:
    """A sentence if one path jumps further than ``most`` places; ``order`` as for
    :func:`swaps_too_much`."""
    front = 0
    for s in order:
        if abs(s - front) > most:
            return f"a path jumps from stage {front} to {s}, further than {most}"
        front = max(front, s)
    return None


def _order(problem: PathProblem, route: Route) -> list[int]:
    return [problem.stage_of.get(n, 0) for n in route[1:]]


def _first(found: Iterable[str | None]) -> str | None:
    return next((why for why in found if why), None)


def owed_kept(problem: PathProblem, paths: Paths) -> str | None:
    """Every stage that is owed to an ends peer is on one of its paths."""
    missing = sorted(problem.owed - joined(problem, paths))
    if not missing:
        return None
    return f"ends peer {missing[0][0]} never trains stage {missing[0][1]}, which is owed to it"


def joined(problem: PathProblem, paths: Paths) -> set[tuple[int, int]]:
    """(origin, block stage) that meet on some path."""
    return {(route[0], problem.stage_of[n]) for route in paths for n in route[1:]}


def safe(problem: PathProblem, paths: Paths) -> str | None:
    """No order of events, however late any peer is, can end in a deadlock.

    A peer can be stuck only while all its slots are held by micro-batches that wait, now or later,
    at a peer that is stuck. A peer is not stuck if it can never hold that number of them, with no
    more micro-batches of an origin in flight than the origin has slots. Such a peer is taken away,
    and the others are tested again, until none is left (safe) or none can be taken away. Rising
    paths are always safe: the peers of the last stage go first.
    """
    slots = problem.slots
    routes = Counter(paths)
    through: dict[int, dict[int, int]] = {}
    for route, count in routes.items():
        for n in route[1:]:
            by = through.setdefault(n, {})
            by[route[0]] = by.get(route[0], 0) + count
    stuck = {
        n for n, by in through.items() if sum(min(c, slots[o]) for o, c in by.items()) > slots[n]
    }
    while stuck:
        waits: dict[int, dict[int, int]] = {n: {} for n in stuck}
        for route, count in routes.items():
            k = len(route) - 1
            while k and route[k] not in stuck:
                k -= 1
            for n in route[1:k]:
                if n in stuck:
                    waits[n][route[0]] = waits[n].get(route[0], 0) + count
        left = {n for n in stuck if sum(min(c, slots[o]) for o, c in waits[n].items()) >= slots[n]}
        if left == stuck:
            return f"peers {sorted(stuck)[:8]} may wait for each other in a ring"
        stuck = left
    return None


OF_PATHS = (counted, ends_kept, equal_visits, bounded_swaps, bounded_jumps, owed_kept, safe)


def broken(problem: PathProblem, paths: Paths, *, debts: bool = True) -> str | None:
    """The first rule that does not hold, as a sentence; without ``debts``, some may stay unpaid."""
    rules = (rule for rule in OF_PATHS if debts or rule is not owed_kept)
    return _first(rule(problem, paths) for rule in rules)
