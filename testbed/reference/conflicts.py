"""A conflict-based search for paths, slow: the reference for the planner on small problems. Pure.

After Sharon et al. 2015 and SkipPipe's use of it (arXiv 2502.19913): every micro-batch takes its
own shortest path. The first conflict between two of them (a stage visited too often, a peer with
too little memory, a collision) is forbidden to the one or to the other, which makes two problems;
the one with the lowest bound is looked at next. The search is not optimal: waiting out a collision
may be better than avoiding it. Every state is therefore also replayed, and the best replay is
returned.
"""

import heapq
from collections import Counter
from itertools import combinations, product

from node.scheduler.planning.dealing import legal, orders
from node.scheduler.planning.estimate import Estimator
from node.scheduler.planning.first import origins_in_turns
from node.scheduler.planning.problem import PathProblem, Route
from node.scheduler.planning.replay import ReplayedRun, replay
from node.scheduler.planning.rules import broken

MOST_ROUTES = 20_000

Forbidden = frozenset[tuple[int, str, int]]
"""(micro-batch, "stage" or "peer", number) that it must not visit."""


def conflict_search(
    problem: PathProblem, expansions: int = 2000
) -> tuple[float, tuple[Route, ...]] | None:
    """Return the makespan and the routes of the best plan found within `expansions` states; None
    when none of them kept every rule.

    Raises ValueError when there are too many paths to list.
    """
    menus = {o: _all_routes(problem, o) for o in problem.counts}
    origin = list(origins_in_turns(problem))
    estimator = Estimator(problem)
    best: tuple[float, tuple[Route, ...]] | None = None
    heap: list[tuple[float, int, Forbidden]] = [(0.0, 0, frozenset())]
    seen: set[Forbidden] = {frozenset()}
    tick = 0
    while heap and expansions:
        expansions -= 1
        bound, _, forbidden = heapq.heappop(heap)
        if best is not None and bound >= best[0]:
            break
        routes = [_shortest(problem, menus[o], i, forbidden) for i, o in enumerate(origin)]
        if any(route is None for route in routes):
            continue
        plan = tuple(route for route in routes if route is not None)
        played = replay(problem, plan)
        if broken(problem, plan) is None and (best is None or played.makespan < best[0]):
            best = played.makespan, plan
        for more in _children(problem, plan, played):
            child = forbidden | more
            if child not in seen:
                seen.add(child)
                tick += 1
                heapq.heappush(heap, (max(map(estimator.solo, plan)), tick, child))
    return best


def _all_routes(problem: PathProblem, o: int) -> list[tuple[float, Route, frozenset[int]]]:
    found: list[tuple[float, Route, frozenset[int]]] = []
    estimator = Estimator(problem)
    for chosen in combinations(range(1, len(problem.stages)), problem.hops):
        if not legal(problem, chosen):
            continue
        for order in orders(problem, chosen):
            for peers in product(*(problem.stages[s] for s in order)):
                found.append((estimator.solo((o, *peers)), (o, *peers), frozenset(chosen)))
                if len(found) > MOST_ROUTES:
                    raise ValueError(f"more than {MOST_ROUTES} paths")
    return sorted(found, key=lambda x: x[:2])


def _shortest(
    problem: PathProblem,
    menu: list[tuple[float, Route, frozenset[int]]],
    i: int,
    forbidden: Forbidden,
) -> Route | None:
    stages = {s for j, what, s in forbidden if j == i and what == "stage"}
    peers = {n for j, what, n in forbidden if j == i and what == "peer"}
    return next(
        (r for _, r, visited in menu if not stages & visited and not peers.intersection(r)), None
    )


def _children(
    problem: PathProblem, plan: tuple[Route, ...], played: ReplayedRun
) -> list[Forbidden]:
    """The first conflict, forbidden to each micro-batch in it (at most four)."""
    visits: Counter[int] = Counter(problem.stage_of[n] for route in plan for n in route[1:])
    if problem.equal_visits:
        fair = problem.total * problem.hops // (len(problem.stages) - 1)
        for s, count in sorted(visits.items()):
            if count > fair:
                users = [
                    i
                    for i, route in enumerate(plan)
                    if any(problem.stage_of[n] == s for n in route[1:])
                ]
                return [frozenset({(i, "stage", s)}) for i in users[:4]]
    users_of: dict[int, list[int]] = {}
    for i, route in enumerate(plan):
        for n in route[1:]:
            users_of.setdefault(n, []).append(i)
    if len(played.done) < len(plan):
        crowded = max(users_of, key=lambda n: (len(users_of[n]), n))
        return [frozenset({(i, "peer", crowded)}) for i in users_of[crowded][:4]]
    late = [t for t in played.tasks if t.start > t.came + 1e-9 and t.peer not in problem.counts]
    if not late:
        return []
    worst = max(late, key=lambda t: (t.start - t.came, t.mb))
    others = [i for i in users_of[worst.peer] if i != worst.mb]
    return [frozenset({(i, "peer", worst.peer)}) for i in (worst.mb, *others[:3])]
