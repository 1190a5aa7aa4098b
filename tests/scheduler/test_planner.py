"""Plans: as good as published in few moves, never longer than simple ones, the same for the same
budget, in time."""

import random
from dataclasses import replace
from itertools import product

import pytest

from node.scheduler.planning.bounds import lower_bounds
from node.scheduler.planning.dealing import deal
from node.scheduler.planning.first import insertion, round_robin
from node.scheduler.planning.planner import make_plan
from node.scheduler.planning.problem import PathProblem
from node.scheduler.planning.rules import broken, joined
from testbed.planning.path_problems import KINDS, greedy, load, made_up, makespan
from testbed.reference.conflicts import conflict_search
from tests.scheduler.test_replay import holds
from tests.scheduler.test_spread import ticking


def tiny(seed: int, replicas: int = 2, count: int = 1) -> PathProblem:
    """Two ends peers, three block stages, paths of two of them."""
    dice = random.Random(seed)
    size = 2 + 3 * replicas
    near = [[dice.uniform(0.1, 2.0) for _ in range(size)] for _ in range(size)]
    return PathProblem(
        name="tiny",
        delays=tuple(
            tuple(0.0 if a == b else near[min(a, b)][max(a, b)] for b in range(size))
            for a in range(size)
        ),
        compute=tuple(dice.uniform(0.2, 0.8) for _ in range(size)),
        stages=(
            (0, 1),
            *(tuple(range(2 + s * replicas, 2 + (s + 1) * replicas)) for s in range(3)),
        ),
        length=3,
        slots=(2,) * size,
        counts={0: 3 * count, 1: 3 * count},
        backward=1.5,
        gap=0.1,
        max_swaps=1,
        max_jump=3,
    )


@pytest.mark.parametrize(
    ("name", "published", "best"), [("A", 33.354, 33.133792), ("B", 17.753, 17.13056)]
)
def test_the_published_plans_are_beaten(name, published, best):
    problem = load(name)
    plan = make_plan(problem, moves=500)
    assert holds(problem, plan.routes)
    assert plan.makespan <= published
    # No plan at all is shorter than this: an ends peer works off the returning micro-batches one
    # after the other.
    assert plan.bound == pytest.approx(best)
    assert plan.makespan >= plan.bound


def test_more_in_flight_at_the_ends_makes_it_shorter():
    assert make_plan(load("A").with_slots(6), moves=1500).makespan <= 0.9 * 33.133792
    assert make_plan(load("B").with_slots(6), moves=1500).makespan <= 0.95 * 17.13056


@pytest.mark.parametrize("kind", KINDS)
def test_never_longer_than_simple_plans(kind):
    problem = made_up(kind, 5)
    plan = make_plan(problem, moves=300)
    assert holds(problem, plan.routes)
    sets = deal(problem)
    for simple in (round_robin(problem, sets), greedy(problem), insertion(problem, sets)):
        assert plan.makespan <= makespan(problem, simple) + 1e-9
    assert plan.bound <= plan.makespan + 1e-9


def test_planning_is_deterministic_and_never_makes_a_plan_worse():
    problem = made_up("wan", 1)
    one = make_plan(problem, moves=300, seed=4)
    two = make_plan(problem, moves=300, seed=4)
    assert one.routes == two.routes
    assert one.makespan <= one.first_makespan


def test_without_time_to_search_the_plan_is_valid():
    problem = load("A")
    assert holds(problem, make_plan(problem, clock=ticking(0.01), limit_s=0.0).routes)


def test_what_earlier_epochs_owe_is_paid():
    problem = load("A")
    plan = make_plan(problem, moves=800)
    every = {(o, s) for o in problem.counts for s in range(1, 6)}
    owed = frozenset((o, s) for o, stages in plan.owed.items() for s in stages)
    assert owed == every - joined(problem, plan.routes)
    paying = replace(problem, owed=frozenset(every))
    paid = make_plan(paying, moves=600)
    assert paid.owed == {}
    assert broken(paying, paid.routes) is None


def test_stages_need_not_be_equal_when_not_asked():
    problem = replace(load("B"), equal_visits=False)
    assert holds(problem, make_plan(problem, moves=500).routes)


def test_no_block_stage_at_all():
    problem = replace(tiny(0), length=1, counts={0: 3, 1: 3})
    plan = make_plan(problem, moves=50)
    assert plan.routes == ((0,), (1,)) * 3
    assert plan.makespan >= plan.bound - 1e-9 > 0


@pytest.mark.parametrize("seed", range(4))
def test_as_short_as_conflict_based_search(seed):
    problem = tiny(seed)
    found = conflict_search(problem, expansions=200)
    assert holds(problem, found[1])
    assert make_plan(problem, moves=1500).makespan <= found[0] + 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_as_short_as_any_plan_of_one_replica(seed):
    """All plans are tried: six micro-batches, each of three sets of stages in one or two orders."""
    problem = replace(tiny(seed, replicas=1), counts={0: 3, 1: 0}, slots=(2,) * 5)
    menu = [(0, a, b) for a, b in ((2, 3), (3, 2), (2, 4), (3, 4), (4, 3))]
    plans = [routes for routes in product(menu, repeat=3) if broken(problem, routes) is None]
    best = min(makespan(problem, routes) for routes in plans)
    assert make_plan(problem, moves=2000).makespan == pytest.approx(best)
    assert max(lower_bounds(problem).values()) <= best
