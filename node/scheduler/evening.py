"""Even shares of work for the replicas of a stage, where they cost no time. Pure.

Enters: a problem and a plan. Leaves: the plan with the work of each stage divided among its
replicas by their speeds, within a bound of the makespan. Never: a plan that breaks a rule.

The shortest plan gives all work of a stage to its fastest replicas where the swarm waits for
something else, such as the ends. The others would train nothing and be measured by nothing, so that
one slow measurement would leave a peer idle for many epochs.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import islice
from typing import TypeVar

from node.scheduler.planning.estimate import Estimator
from node.scheduler.planning.problem import PathProblem, Route
from node.scheduler.planning.rules import broken
from node.scheduler.quotas import turns

T = TypeVar("T")
COST = 0.002
"""Most that even shares may add to the makespan, as a share of it."""
PARTS = (1.0, 0.5, 0.25)
"""Shares of a stage's moves that are tried, one after the other until one is cheap enough."""


def evened(
    problem: PathProblem, routes: Sequence[Route], makespan: float, most: int
) -> tuple[tuple[Route, ...], float]:
    """The plan with even shares, and its makespan; the given ones if nothing can be moved.
    ``makespan``: of ``routes``, in seconds. ``most``: evaluations of a plan."""
    estimator = Estimator(problem)
    launches = problem.launches(routes)
    limit = makespan * (1 + COST)
    best = tuple(routes)
    tried = 0
    for stage, peers in enumerate(problem.stages):
        if stage == 0 or len(peers) < 2 or tried == most:
            continue
        moves = _moves(problem, best, stage)
        for part in PARTS:
            chosen = _spaced(moves, round(part * len(moves)))
            if not chosen or tried == most:
                break
            tried += 1
            trial = list(best)
            for i, was, now in chosen:
                trial[i] = tuple(now if n == was else n for n in trial[i])
            found = estimator.play(trial, launches, limit)
            if found <= limit:
                best = tuple(trial)
                makespan = found
                break
    if problem.max_swaps and broken(problem, best, debts=False) is not None:
        return tuple(routes), estimator.play(routes, launches)
    return best, makespan


def _moves(problem: PathProblem, routes: Sequence[Route], stage: int) -> list[tuple[int, int, int]]:
    """(index of a route, its peer of this stage, the peer to visit instead), for every visit above
    a peer's share."""
    visits: dict[int, list[int]] = {n: [] for n in problem.stages[stage]}
    for i, route in enumerate(routes):
        for n in route[1:]:
            if n in visits:
                visits[n].append(i)
    total = sum(map(len, visits.values()))
    speeds = [(n, 1 / c if (c := problem.compute[n]) > 0 else 0.0) for n in visits]
    share = Counter(islice(turns(speeds), total))
    above = [
        (i, n) for n, here in visits.items() for i in _spaced(here, max(0, len(here) - share[n]))
    ]
    lacks = {n: float(share[n] - len(here)) for n, here in visits.items() if share[n] > len(here)}
    takers = islice(turns(list(lacks.items())), len(above)) if lacks else ()
    return [(i, n, taker) for (i, n), taker in zip(sorted(above), takers, strict=True)]


def _spaced(of: Sequence[T], count: int) -> list[T]:
    """``count`` elements at equal distances."""
    return [of[(2 * k + 1) * len(of) // (2 * count)] for k in range(count)]
