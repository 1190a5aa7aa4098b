"""Shares of work among the replicas of a stage: even where that costs no time, never a longer or a
broken plan."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from node.scheduler.evening import COST, evened
from node.scheduler.planning.dealing import deal
from node.scheduler.planning.estimate import Estimator
from node.scheduler.planning.first import insertion
from node.scheduler.planning.problem import PathProblem, Route
from node.scheduler.planning.rules import broken

PLAYS = 40


def two_stages(ends_s: float, fast_s: float, slow_s: float) -> PathProblem:
    """Two ends peers and two stages of two replicas each. Arguments: seconds of a forward at the
    ends, at the first replica of each stage and at the second."""
    compute = (ends_s, ends_s, fast_s, slow_s, fast_s, slow_s)
    return PathProblem(
        name="two stages",
        delays=tuple(tuple(0.0 if a == b else 0.002 for b in range(6)) for a in range(6)),
        compute=compute,
        stages=((0, 1), (2, 3), (4, 5)),
        length=3,
        slots=(8,) * 6,
        counts={0: 32, 1: 32},
    )


def planned(problem: PathProblem) -> tuple[list[Route], float]:
    """An insertion and its makespan."""
    routes = insertion(problem, deal(problem))
    assert routes is not None
    return routes, Estimator(problem).play(routes, problem.launches(routes))


def work(problem: PathProblem, routes: tuple[Route, ...], stage: int) -> list[int]:
    """Visits of each replica of a stage."""
    found = Counter(n for route in routes for n in route[1:])
    return [found[n] for n in problem.stages[stage]]


@pytest.mark.parametrize(
    ("slow_s", "share"), [(0.03, 32), (0.033, 31), (0.09, 16)], ids=["equal", "close", "third"]
)
def test_a_stage_that_nobody_waits_for_gives_every_replica_its_share(
    slow_s: float, share: int
) -> None:
    problem = two_stages(0.1, 0.03, slow_s)
    routes, makespan = planned(problem)
    assert work(problem, tuple(routes), 2)[1] < 8, "the shortest plan leaves the second one idle"
    even, then = evened(problem, routes, makespan, PLAYS)
    for stage in (1, 2):
        assert work(problem, even, stage)[1] == pytest.approx(share, abs=1)
    assert then <= makespan * (1 + COST)
    assert then == Estimator(problem).play(even, problem.launches(even))


def test_without_an_evaluation_nothing_changes() -> None:
    problem = two_stages(0.1, 0.03, 0.033)
    routes, makespan = planned(problem)
    assert evened(problem, routes, makespan, 0) == (tuple(routes), makespan)


def test_a_replica_without_room_keeps_what_it_had() -> None:
    roomy = two_stages(0.02, 0.1, 0.1)
    problem = replace(roomy, slots=(8, 8, 8, 1, 8, 8))
    routes, makespan = planned(problem)
    even, then = evened(problem, routes, makespan, PLAYS)
    assert then <= makespan * (1 + COST)
    assert work(problem, even, 1)[1] < 32, "one place is not room for half of the micro-batches"


def anything(seed: int) -> PathProblem:
    """Up to five stages, some left out, some swapped, unequal peers with few places."""
    dice = random.Random(seed)
    stages = [tuple(range(dice.randint(1, 3)))]
    for _ in range(dice.randint(2, 5)):
        first = stages[-1][-1] + 1
        stages.append(tuple(range(first, first + dice.randint(1, 4))))
    peers = stages[-1][-1] + 1
    blocks = len(stages) - 1
    return PathProblem(
        name=f"seed {seed}",
        delays=tuple(
            tuple(0.0 if a == b else dice.uniform(0.001, 0.2) for b in range(peers))
            for a in range(peers)
        ),
        compute=tuple(dice.uniform(0.01, 0.3) for _ in range(peers)),
        stages=tuple(stages),
        length=dice.randint(max(2, blocks), blocks + 1),
        slots=tuple(dice.choice((1, 2, 3, 8)) for _ in range(peers)),
        counts=dict.fromkeys(stages[0], blocks * dice.randint(1, 6)),
        max_swaps=dice.choice((0, 2)),
    )


@pytest.mark.parametrize("seed", range(60))
def test_plans_of_any_problem_stay_as_short_and_keep_every_rule(seed: int) -> None:
    problem = anything(seed)
    routes, makespan = planned(problem)
    even, then = evened(problem, routes, makespan, PLAYS)
    assert broken(problem, even) is None
    assert then == Estimator(problem).play(even, problem.launches(even))
    assert then <= makespan * (1 + COST)
    for stage in range(1, len(problem.stages)):
        before = work(problem, tuple(routes), stage)
        after = work(problem, even, stage)
        assert sum(before) == sum(after)
        pace = [problem.compute[n] for n in problem.stages[stage]]
        slowest = [max(c * n for c, n in zip(pace, of, strict=True)) for of in (before, after)]
        assert slowest[1] <= slowest[0] + 1e-9, "no replica gets more than the busiest one had"
