"""The replay gives the published figures; the rules and its fast twin agree with it."""

import json
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from node.scheduler.planning import rules
from node.scheduler.planning.bounds import lower_bounds
from node.scheduler.planning.dealing import deal, orders
from node.scheduler.planning.estimate import Estimator
from node.scheduler.planning.problem import PathProblem, Route
from node.scheduler.planning.replay import ReplayTask, replay
from testbed.planning.path_problems import KINDS, load, made_up

PUBLISHED = {0: (14, 6, 12), 3: (15, 17, 5), 4: (7, 13, 19), 10: (1, 18, 2), 11: (8, 16, 9)}
"""Setting A: one path for all micro-batches of an ends peer."""


def published() -> list[Route]:
    return [(o, *hops) for o, hops in PUBLISHED.items() for _ in range(6)]


def anyhow(problem: PathProblem, dice: random.Random, swaps: bool = True) -> list[Route]:
    """Any plan that keeps the rules of paths, deadlocks aside."""
    sets = deal(problem)
    dice.shuffle(sets)
    origins = [o for o, count in problem.counts.items() for _ in range(count)]
    routes: list[Route] = []
    for o, stages in zip(origins, sets, strict=True):
        order = dice.choice(orders(problem, stages)) if swaps else stages
        routes.append((o, *(dice.choice(problem.stages[s]) for s in order)))
    return routes


def keeps_slots_and_turns(problem: PathProblem, tasks: list[ReplayTask]) -> bool:
    """No peer holds more than it has slots, or does two tasks at once."""
    held = Counter()
    free = Counter()
    stays = [(t.came, 1, t.peer) for t in tasks if t.kind == "f"]
    for _, change, peer in sorted(stays + [(t.end, -1, t.peer) for t in tasks if t.kind == "b"]):
        held[peer] += change
        if held[peer] > problem.slots[peer]:
            return False
    for task in sorted(tasks):
        if task.start < free[task.peer] - 1e-9:
            return False
        free[task.peer] = task.end + problem.gap
    return True


def holds(problem: PathProblem, routes: rules.Paths) -> bool:
    """No rule is broken, and played, all micro-batches come home within slots and turns."""
    played = replay(problem, routes)
    return (
        rules.broken(problem, routes) is None
        and len(played.done) == len(routes)
        and keeps_slots_and_turns(problem, played.tasks)
    )


def test_the_published_plan_takes_what_is_stored():
    problem = load("A")
    played = replay(problem, published())
    assert rules.broken(problem, published()) is None
    assert played.makespan == pytest.approx(33.353792, abs=1e-9)
    assert round(played.makespan, 3) == problem.reference["skippipe_replayed"]


def test_stored_plans_take_as_long_as_in_another_replay():
    stored = json.loads(
        (Path(__file__).parent.parent / "data" / "paths" / "replayed.json").read_text()
    )
    for row in stored:
        problem = load(row["problem"]).with_slots(row["slots_ends"])
        played = replay(problem, [tuple(route) for route in row["routes"]])
        assert round(played.makespan, 3) == row["makespan_s"]


def test_alone_a_micro_batch_takes_its_round_trip():
    problem = load("A")
    route = (11, 8, 16, 9)
    one = replay(problem, [route])
    assert one.makespan == pytest.approx(Estimator(problem).solo(route)) == pytest.approx(15.141896)
    assert [t.kind for t in one.tasks] == ["f"] * 4 + ["l"] + ["b"] * 4


@pytest.mark.parametrize("kind", [*KINDS, "A", "B"])
def test_the_estimate_is_the_replay(kind):
    problem = load(kind) if len(kind) == 1 else made_up(kind, 3)
    estimator = Estimator(problem)
    dice = random.Random(kind)
    for _ in range(12):
        routes = anyhow(problem, dice)
        turns = {o: [i for i, r in enumerate(routes) if r[0] == o] for o in problem.counts}
        played = replay(problem, routes)
        said = estimator.play(routes, turns)
        if len(played.done) == len(routes):
            assert said == pytest.approx(played.makespan, abs=1e-9)
            assert estimator.play(routes, turns, said - 1e-6) == float("inf")
            assert rules.broken(problem, routes) in (None, rules.safe(problem, routes))
            assert keeps_slots_and_turns(problem, played.tasks)
            assert max(lower_bounds(problem).values()) <= played.makespan + 1e-9
        else:
            assert said == float("inf")
            assert rules.safe(problem, routes)


def test_rising_paths_are_safe_and_a_ring_is_not():
    problem = load("A")
    dice = random.Random(1)
    for _ in range(20):
        routes = anyhow(problem, dice, swaps=False)
        assert rules.safe(problem, routes) is None
        assert len(replay(problem, routes).done) == 30
    ring = [(o, *hops, 16) for o in problem.counts for hops in ((15, 1), (1, 15)) for _ in range(3)]
    assert rules.safe(problem, ring)


@pytest.mark.parametrize(
    ("rule", "route"),
    [
        (rules.counted, (3, 14, 6, 12)),
        (rules.counted, (0, 14, 6)),
        (rules.counted, (14, 14, 6, 12)),
        (rules.ends_kept, (14, 14, 6, 12)),
        (rules.ends_kept, (0, 14, 3, 12)),
        (rules.ends_kept, (0, 14, 15, 12)),
        (rules.equal_visits, (0, 14, 6, 2)),
        (rules.bounded_swaps, (0, 12, 6, 14)),
        (rules.bounded_jumps, (0, 2, 5, 16)),
    ],
)
def test_each_rule_sees_what_breaks_it(rule, route):
    problem = load("A")
    assert rule(problem, published()) is None
    assert rule(problem, [route, *published()[1:]])


def test_a_missing_required_visit_is_detected():
    problem = load("A")
    assert rules.owed_kept(problem, published()) is None
    owing = replace(problem, owed=frozenset({(11, 4)}))
    assert "stage 4" in str(rules.owed_kept(owing, published()))
