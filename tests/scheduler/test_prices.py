"""Routes by prices: they keep the rules, balance what is scarce, and are the same everywhere."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from node.scheduler.planning.dealing import deal
from node.scheduler.planning.first import round_robin
from node.scheduler.planning.planner import SEARCHED, make_plan
from node.scheduler.planning.prices import priced
from node.scheduler.planning.problem import PathProblem
from node.scheduler.planning.rules import broken, joined
from testbed.planning.path_problems import KINDS, greedy, made_up, makespan, swarm


def crowd() -> PathProblem:
    """Forty ends peers, three stages of twelve replicas: more micro-batches than are searched."""
    return swarm("wan", random.Random(3), 4, 40, 12, 3, 27, 2)


@pytest.mark.parametrize("kind", KINDS)
def test_all_rules_are_kept(kind: str) -> None:
    problem = made_up(kind, 2)
    routes = priced(problem, deal(problem))
    assert routes is not None
    assert broken(problem, routes) is None


def test_debts_are_paid_first() -> None:
    problem = crowd()
    owed = frozenset((o, s) for o in (0, 7, 21) for s in range(1, 4))
    routes = priced(replace(problem, owed=owed), deal(problem))
    assert routes is not None
    assert owed <= joined(problem, routes)


def test_many_micro_batches_are_planned_by_prices() -> None:
    problem = crowd()
    assert problem.total > SEARCHED
    plan = make_plan(problem, moves=10)
    assert plan.routes == tuple(priced(problem, deal(problem)) or ())
    assert broken(problem, plan.routes) is None
    again = make_plan(problem, moves=10, known=[plan.routes])
    assert again.routes == plan.routes
    simple = (round_robin(problem, deal(problem)), greedy(problem))
    assert plan.makespan < 0.9 * min(makespan(problem, routes) for routes in simple)


def test_a_slow_replica_gets_less_and_a_lone_ends_peer_uses_all() -> None:
    problem = swarm("lan", random.Random(1), 3, 1, 4, 3, 60, 3).with_slots(60)
    slow = problem.stages[1][0]
    compute = list(problem.compute)
    compute[slow] *= 4
    problem = replace(problem, compute=tuple(compute))
    routes = priced(problem, deal(problem))
    assert routes is not None
    work = Counter(n for route in routes for n in route[1:])
    others = [work[n] for n in problem.stages[1] if n != slow]
    assert 0 < 2 * work[slow] < min(others)


def test_it_can_be_stopped() -> None:
    problem = crowd()
    asked = iter((True, True, False))
    assert priced(problem, deal(problem), lambda: next(asked)) is None
