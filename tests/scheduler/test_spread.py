"""Problems of all sizes and shapes: a plan always, in time, by every rule, and never longer than
the cheap ones."""

import random
from collections.abc import Callable

import pytest

from node.scheduler.planning.dealing import deal
from node.scheduler.planning.first import cheap, insertion, round_robin
from node.scheduler.planning.planner import make_plan
from node.scheduler.planning.problem import PathProblem
from node.scheduler.planning.replay import replay
from node.scheduler.planning.rules import broken
from testbed.planning.path_problems import makespan, swarm


def anything(seed: int, most: int = 300) -> PathProblem:
    """5 to ``most`` peers, 4 to 24 stages, up to half of them left out; few slots, long ways in no
    order, unequal peers and stages."""
    dice = random.Random(seed)
    size = int(5 * (most / 5) ** dice.random())
    blocks = min(dice.randint(3, 23), size - 2)
    hops = max(1, blocks - int(blocks * dice.uniform(0.0, 0.5)))
    ends = max(1, min(size - blocks, int(size * dice.uniform(0.02, 0.3))))
    hosts = [*range(1, blocks + 1), *(dice.randint(1, blocks) for _ in range(size - ends - blocks))]
    dice.shuffle(hosts)
    draw = dice.choice(
        (lambda: dice.uniform(0.05, 2.0), lambda: 0.1 * dice.paretovariate(1.2), lambda: 0.0)
    )
    each = dice.randint(1, 12)
    counts = {o: each if dice.random() < 0.8 else dice.randint(1, 12) for o in range(ends)}
    while sum(counts.values()) * hops % blocks:
        counts[0] += 1
    return PathProblem(
        name=f"seed {seed}",
        delays=tuple(tuple(0.0 if a == b else draw() for b in range(size)) for a in range(size)),
        compute=tuple(dice.uniform(0.02, 0.6) for _ in range(size)),
        stages=(
            tuple(range(ends)),
            *(
                tuple(ends + i for i, s in enumerate(hosts) if s == stage)
                for stage in range(1, blocks + 1)
            ),
        ),
        length=hops + 1,
        slots=tuple(dice.choice((1, 1, 2, 3, 8)) for _ in range(size)),
        counts=counts,
        backward=dice.choice((1.0, 1.5, 2.0)),
        gap=dice.choice((0.0, 0.1)),
        max_swaps=dice.choice((0, 0, 2)),
        max_jump=dice.choice((blocks, blocks - hops + 2)),
    )


TICK = 1e-4


def ticking(tick: float = TICK) -> Callable[[], float]:
    """A clock that goes on whenever it is asked."""
    now = [0.0]

    def clock() -> float:
        now[0] += tick
        return now[0]

    return clock


def cheapest(problem: PathProblem) -> float:
    sets = deal(problem)
    plans = (round_robin(problem, sets), cheap(problem, sets), cheap(problem, sets, slots=False))
    return min(makespan(problem, routes) for routes in plans)


def heavy() -> PathProblem:
    """Twelve stages and 220 micro-batches: one insertion takes most of a second."""
    return swarm("wan", random.Random(1), 12, 20, 6, 9, 11, 3)


@pytest.mark.parametrize("seed", range(18))
def test_any_problem_gets_a_plan_in_time_that_keeps_the_rules(seed: int) -> None:
    problem = anything(seed, most=60)
    limit = (0.004, 0.008, 0.012)[seed % 3]
    plan = make_plan(problem, clock=ticking(), limit_s=limit)
    assert plan.planning_s <= limit + 2 * TICK
    played = replay(problem, plan.routes)
    assert broken(problem, plan.routes) is None
    assert played.makespan == plan.makespan <= cheapest(problem) + 1e-9
    assert plan.makespan >= plan.bound - 1e-9


def test_an_interrupted_insertion_keeps_its_partial_plan() -> None:
    problem = heavy()
    sets = deal(problem)
    whole = insertion(problem, sets)
    asked = [0]

    def spent() -> float:
        asked[0] += 1
        return 0.0 if asked[0] <= 110 else 1.0

    half = insertion(problem, sets, spent=spent)
    assert broken(problem, half) is None
    assert asked == [111]
    assert len(set(whole) & set(half)) > 60
    assert (
        makespan(problem, whole)
        < makespan(problem, half)
        < makespan(problem, round_robin(problem, sets))
    )


def test_an_insertion_goes_in_haste_rather_than_not_at_all() -> None:
    problem = heavy()
    used = iter(range(1000))
    # Behind from the beginning, and never over.
    hasty = insertion(problem, deal(problem), spent=lambda: 0.9 + next(used) * 1e-4)
    assert broken(problem, hasty) is None
    assert makespan(problem, hasty) < 0.9 * cheapest(problem)


def test_a_plan_that_is_cut_off_is_better_than_the_cheap_ones() -> None:
    problem = heavy()
    plan = make_plan(problem, clock=ticking(), limit_s=0.015)
    assert plan.planning_s <= 0.015 + 2 * TICK
    assert broken(problem, plan.routes) is None
    assert plan.makespan < 0.98 * cheapest(problem)
