"""An epoch with events: without any it is the replay; with them nothing is lost that can be
kept."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.scheduler import load, makespan
from node.core.errors import UsageFault
from node.scheduler.planning.dealing import deal
from node.scheduler.planning.first import insertion
from node.scheduler.planning.planner import make_plan
from node.scheduler.planning.replay import ReplayedRun
from node.tools.replan import ReplanEvent, drifted, joined_by, parse_events, play


def routes_of(problem):
    return insertion(problem, deal(problem))


@pytest.mark.parametrize("name", ["A", "B"])
def test_without_events_it_is_the_replay(name):
    problem = load(name)
    routes = routes_of(problem)
    wanted = makespan(problem, routes)
    assert ReplayedRun(problem, routes).finish() == pytest.approx(wanted, abs=1e-9)
    half = ReplayedRun(problem, routes)
    half.until(wanted / 2)
    for one in (half.copy(), half):
        assert one.finish() == pytest.approx(wanted, abs=1e-9)


@pytest.mark.parametrize("seed", range(12))
def test_deaths_lose_no_micro_batch_and_nobody_dead_is_asked(seed):
    problem = load("AB"[seed % 2])
    routes, dice = routes_of(problem), random.Random(seed)
    span, dead = makespan(problem, routes), dice.sample(range(20), 3)
    while not all(set(stage) - set(dead) for stage in problem.stages):
        dead = dice.sample(range(20), 3)
    events = [ReplanEvent(dice.random() * span, "death", n) for n in dead]
    running, strikes = play(problem, routes, events, seed=seed)
    assert len(running.done) == 30
    assert len(strikes) == 3
    assert strikes[-1].makespan == pytest.approx(running.makespan)
    last = max(events, key=lambda e: e.at).at
    for i, route in enumerate(running.routes):
        if running.done[i] > last + span / 2:
            assert not set(route) & set(dead)
    assert Counter(
        problem.stage_of[n] for route in running.routes for n in route[1:]
    ) == dict.fromkeys(range(1, 6), 18)
    # Every slot that was held is free again at those who live.
    assert all(running.held[n] == 0 for n in problem.stage_of if n not in dead)


def test_a_death_before_the_start_costs_no_more_than_a_quarter():
    problem = load("A")
    routes = make_plan(problem, moves=3000).routes
    running, _ = play(problem, routes, [ReplanEvent(0.0, "death", 8)])
    knew = replace(
        problem, stages=tuple(tuple(n for n in stage if n != 8) for stage in problem.stages)
    )
    assert running.makespan <= 1.25 * make_plan(knew, moves=2000).makespan
    assert not any(8 in route for route in running.routes)


def test_a_dead_stage_is_left_out_of_routes_not_begun():
    problem = load("A")
    routes = routes_of(problem)
    running, _ = play(problem, routes, [ReplanEvent(0.0, "death", n) for n in problem.stages[3]])
    assert len(running.done) == 30
    assert not any(set(route) & set(problem.stages[3]) for route in running.routes)
    late, _ = play(problem, routes, [ReplanEvent(9.0, "death", n) for n in problem.stages[3]])
    assert 0 < len(late.done) < 30, (
        "what was there and has no twin any more is dropped, the rest ends"
    )


def test_all_ends_peers_but_one_die():
    problem = load("B")
    running, _ = play(
        problem, routes_of(problem), [ReplanEvent(1.0, "death", o) for o in problem.stages[0][1:]]
    )
    assert len(running.done) == 30
    assert {route[0] for i, route in enumerate(running.routes) if running.done[i] > 8.0} == {
        problem.stages[0][0]
    }
    assert running.again >= 24


def test_a_stall_a_drift_and_a_newcomer():
    problem = load("B")
    routes = routes_of(problem)
    before = makespan(problem, routes)
    stalled, _ = play(problem, routes, [ReplanEvent(2.0, "busy", routes[0][1], 5.0)])
    assert stalled.makespan <= before + 5.0 + 1e-9
    slower, _ = play(
        problem, routes, [ReplanEvent(0.0, "drift", problem=lambda p: drifted(p, 2.0, 2.0))]
    )
    assert before < slower.makespan <= 2 * before + 1e-9
    grown, strikes = play(
        problem,
        routes,
        [ReplanEvent(1.0, "join", 20, problem=lambda p: joined_by(p, 2, 0.1, [0.4] * 20, 3))],
    )
    assert grown.makespan <= before + 1e-9
    assert (strikes[0].affected > 0) == any(20 in route for route in grown.routes)


def test_events_from_a_document():
    problem = load("B")
    rows = [
        {"at_s": 3, "what": "death", "peer": 4},
        {"at_s": 1, "what": "join", "stage": 2, "compute_s": 0.1, "delays_s": [0.4] * 20},
        {"at_s": 2, "what": "busy", "peer": 20, "for_s": 1.5},
        {"at_s": 4, "what": "drift", "compute_factor": 1.1, "peer": 3},
    ]
    events = parse_events({"events": rows}, problem)
    assert [e.what for e in events] == ["join", "busy", "death", "drift"]
    grown = events[0].problem(problem)
    assert (grown.stages[2][-1], len(events[3].problem(grown).delays)) == (20, 21)


@pytest.mark.parametrize(
    "rows",
    [
        None,
        [{"at_s": 1, "what": "flood"}],
        [{"at_s": -1, "what": "death", "peer": 3}],
        [{"at_s": 1, "what": "death", "peer": 20}],
        [{"at_s": 1, "what": "busy", "peer": 2}],
        [{"at_s": 1, "what": "drift", "compute_factor": -2}],
        [{"at_s": 1, "what": "join", "stage": 0, "compute_s": 0.1, "delays_s": [0.4] * 20}],
        [{"at_s": 1, "what": "join", "stage": 1, "compute_s": 0.1, "delays_s": [0.4] * 19}],
        ["death"],
        [{"at_s": "3", "what": "death", "peer": 3}, {"at_s": 1, "what": "death", "peer": 4}],
        [{"at_s": 1, "what": ["death"], "peer": 3}],
    ],
)
def test_events_that_make_no_sense_are_refused(rows):
    with pytest.raises(UsageFault):
        parse_events({"events": rows}, load("B"))
