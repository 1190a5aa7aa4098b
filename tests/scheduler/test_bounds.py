"""Lower bounds: never above a makespan, as high as what is known, whatever prices prove them."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from node.scheduler.planning import relaxation
from node.scheduler.planning.bounds import lower_bounds
from node.scheduler.planning.planner import make_plan
from node.scheduler.planning.relaxation import balance_bound
from node.scheduler.planning.rules import broken
from testbed.planning.path_problems import KINDS, MORE_KINDS, load, made_up, makespan
from tests.scheduler.test_planner import tiny
from tests.scheduler.test_spread import anything


@pytest.mark.parametrize("kind", [*KINDS, *MORE_KINDS])
def test_no_plan_is_shorter_than_a_bound(kind: str) -> None:
    problem = made_up(kind, 7)
    plan = make_plan(problem, moves=80)
    assert max(*lower_bounds(problem).values(), balance_bound(problem)) <= plan.makespan + 1e-9


@pytest.mark.parametrize("seed", range(12))
def test_bounds_hold_for_ways_of_any_length(seed: int) -> None:
    problem = anything(seed, most=30)
    plan = make_plan(problem, moves=60, seed=seed)
    assert max(*lower_bounds(problem).values(), balance_bound(problem)) <= plan.makespan + 1e-9


@pytest.mark.parametrize("seed", range(3))
def test_the_balance_is_below_the_best_of_all_plans(seed: int) -> None:
    problem = replace(tiny(seed, replicas=1), counts={0: 3, 1: 0}, slots=(2,) * 5)
    menu = [(0, a, b) for a, b in ((2, 3), (3, 2), (2, 4), (3, 4), (4, 3))]
    plans = [routes for routes in product(menu, repeat=3) if broken(problem, routes) is None]
    best = min(makespan(problem, routes) for routes in plans)
    assert 0.5 * best < balance_bound(problem) <= best + 1e-9


def test_a_lone_way_is_bounded_exactly() -> None:
    # One origin with one slot, one replica of each stage: every trip waits for the one before.
    problem = replace(
        tiny(3, replicas=1),
        length=4,
        counts={0: 4, 1: 0},
        slots=(1,) * 5,
        gap=0.0,
        max_swaps=0,
    )
    span = makespan(problem, [(0, 2, 3, 4)] * 4)
    assert balance_bound(problem) == pytest.approx(span)


def test_any_prices_prove_a_bound_and_those_found_are_good() -> None:
    problem = made_up("mixed", 0)
    programme = relaxation._programme(problem)
    assert programme is not None
    dice = np.random.default_rng(1)
    best = balance_bound(problem)
    for _ in range(50):
        prices = dice.exponential(size=len(programme.most)) - 0.2
        fees = dice.normal(size=len(programme.due))
        assert relaxation._proven(programme, prices, fees) <= best * (1 + 1e-6)
    # By the solver of another library.
    assert best == pytest.approx(66.2533, abs=1e-3)
    assert best > 1.3 * max(lower_bounds(problem).values())


def test_too_many_routes_have_no_balance() -> None:
    assert balance_bound(made_up("many replicas", 0)) == 0.0
    assert balance_bound(replace(tiny(0), length=1, counts={0: 3, 1: 3})) == 0.0


def test_the_published_settings_with_more_slots() -> None:
    assert balance_bound(load("A").with_slots(6)) == pytest.approx(19.27434, abs=1e-3)
