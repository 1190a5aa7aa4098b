"""Paths of a plan by the costs that members report: forecasts, searches, trials."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from node.core.errors import OutOfResources
from node.core.ids import PeerId
from node.core.journey import Plan
from node.epoch import events as ev
from node.epoch.leader.leader import Leader
from node.epoch.pace import ALL_OWN
from node.epoch.plan_validation import of_paths
from node.epoch.waiting import Lack
from node.pipeline.settings import PipelineSettings
from node.scheduler.costs import LinkCost, Measured
from node.scheduler.router import Router
from node.scheduler.settings import SchedulerSettings
from tests.training.run_facts import assign, facts
from tests.training.test_leader import (
    S1,
    S2,
    T1,
    T2,
    E,
    begun,
    commits,
    committed,
    heard,
    heir,
    lacks,
    led,
    next_plan,
    reported,
    tell,
    with_ways,
)

PLANNED = SchedulerSettings()
WORK: dict[str, Any] = {
    "router": lambda: Router(PLANNED, 2),
    "parameters": (10**6,) * 3,
    "tensor": 10**4,
    "late_s": 1e9,
}
PEERS = (E, S1, S2, T1)


def costs(peer: PeerId, tensor_s: float = 0.5, up: float = 0.0) -> Measured:
    """Measurements of a peer with equal connections to all others."""
    ways = tuple((p, LinkCost(tensor_s)) for p in PEERS if p != peer)
    return Measured(1.0, 2.0, 0.1, ways=ways, up=up)


def measured(**kw: Any) -> tuple[Leader, Plan, ev.RecordFact]:
    """A leader of peers that all report their costs, its first plan, and the record of it."""
    leader, first = begun([heard(p, costs=costs(p)) for p in PEERS], **WORK | kw)
    leader.handle(ev.Declined(first.hash, "no reason"), 2.0)
    done = leader.handle(ev.ClockTick(), 4.0)
    return leader, next_plan(done), planned(done)


def planned(actions: list[Any]) -> ev.RecordFact:
    (said,) = (a for a in actions if isinstance(a, ev.RecordFact) and a.kind == "epoch-planned")
    return said


def test_a_plan_forecasts_its_run_and_its_round_from_measured_costs() -> None:
    _, plan, said = measured()
    run_s, round_s = plan.forecast
    assert run_s > 2 * 3.0, "two stages of 3 s, and the connections"
    # Half of a stage there and back between its two replicas, 0.5 s for 10 kB, and two trips.
    assert round_s == pytest.approx(100 * 0.5 + 4 * 0.5)
    assert said.facts["predicted_run_s"] == round(run_s, 4)
    assert said.facts["predicted_round_s"] == round(round_s, 4)
    assert said.facts["paths"] == "planned"


def test_without_measured_work_nothing_is_forecast() -> None:
    _, plan = begun(map(heard, PEERS), **WORK)
    assert plan.forecast == (0.0, 0.0)
    leader, plan = begun(map(heard, (E, S1, S2)), **WORK)
    said = planned(commits(leader, plan, 3.0))
    assert not {"predicted_run_s", "owed"} & said.facts.keys()


def test_a_capped_line_makes_the_round_longer() -> None:
    slow = [heard(p, costs=costs(p, 1e-3, up=1e3 if p == S1 else 0.0)) for p in PEERS]
    _, plan = begun(slow, **WORK)
    # 1 MB at 1 kB/s; the connections of the others take a millisecond.
    assert plan.forecast[1] == pytest.approx(1000.0, rel=0.01)


def test_the_more_replicas_the_more_of_a_stage_each_moves() -> None:
    third = PeerId("stage1c")
    _, plan = begun([heard(p, costs=costs(p)) for p in (*PEERS, third)], **WORK)
    assert plan.forecast[1] == pytest.approx(2 * 2 / 3 * 100 * 0.5 + 4 * 0.5)


def test_a_stage_of_one_peer_has_nothing_to_average() -> None:
    peers = (E, S1, S2)
    _, plan = begun([heard(p, costs=costs(p)) for p in peers], **WORK)
    assert plan.forecast[0] > 0
    assert plan.forecast[1] == 0.0


def test_without_sizes_a_round_takes_its_trips() -> None:
    _, plan = begun([heard(p, costs=costs(p)) for p in PEERS], **WORK | {"parameters": ()})
    assert plan.forecast[1] == pytest.approx(4 * 0.5)


def rounds_of(leader: Leader, plan: Plan, now: float, seconds: float) -> Plan:
    """The next plan after a round that took so long."""
    reported(leader, plan, now)
    return next_plan(committed(leader, plan, now + seconds))


def test_a_measured_round_of_the_same_members_is_the_forecast_of_the_next() -> None:
    leader, plan, _ = measured()
    plan = rounds_of(leader, plan, 5.0, 7.0)
    assert plan.forecast[1] == pytest.approx(7.0)
    plan = rounds_of(leader, plan, 20.0, 8.0)
    # The weight of the newest round is 0.3, corrected for the few that were measured.
    assert plan.forecast[1] == pytest.approx(7.0 + 0.3 / (1 - 0.7**2))
    leader.handle(heard(T2, costs=costs(T2)), 29.0)
    plan = rounds_of(leader, plan, 30.0, 7.5)
    assert plan.member(T2) is not None
    assert plan.forecast[1] == pytest.approx(7.0 + 0.3 / (1 - 0.7**2), abs=0.5)
    plan = rounds_of(leader, plan, 40.0, 9.0)
    assert plan.forecast[1] == pytest.approx(52.0), "T2 is new among those that work"


def searched(actions: list[Any]) -> list[ev.SearchPaths]:
    return [a for a in actions if isinstance(a, ev.SearchPaths)]


def test_better_paths_are_searched_while_members_average_and_kept() -> None:
    leader, plan, _ = measured(target_batch=16)
    (asked,) = searched(reported(leader, plan, 5.0))
    number = {p: n for n, p in enumerate(asked.job.task.peers)}
    routes = tuple((number[E], number[T1], number[S2]) for _ in plan.paths)
    leader.handle(ev.Searched(asked.job, routes, 1.0), 5.5)
    following = next_plan(committed(leader, plan, 6.0))
    (again,) = searched(reported(leader, following, 7.0))
    assert routes not in asked.job.known
    assert routes in again.job.known


def test_no_search_is_asked_for_where_paths_are_laid_in_turns() -> None:
    leader, plan = begun(map(heard, PEERS))
    assert searched(reported(leader, plan, 3.0)) == []


def test_an_unmeasured_replica_gets_a_visit_and_the_forecast_is_unknown() -> None:
    quick = [heard(p, costs=replace(costs(p), forward_s=0.01, backward_s=0.02)) for p in PEERS[:3]]
    _, plan = begun([*quick, heard(T1)], **WORK)
    assert {path.hops[0].peer for path in plan.paths} == {S1, T1}
    assert plan.forecast == (0.0, 0.0)


def test_stages_that_a_run_skips_are_visited_in_turns() -> None:
    peers = (E, S1, S2, PeerId("stage3a"))
    settings = SchedulerSettings("round-robin", skip=1 / 3)
    leader, plan = begun(
        [heard(p) for p in peers], stages=3, router=lambda: Router(settings, 3), target_batch=4
    )
    seen = []
    for now in range(3, 6):
        seen.append({h.stage for path in plan.paths for h in path.hops})
        done = commits(leader, plan, float(now))
        owed = planned(done).facts.get("owed")
        assert owed is None or len(owed) > 0
        plan = next_plan(done)
    assert all(len(stages) == 2 for stages in seen)
    assert seen[0] | seen[1] == {1, 2, 3}, "what was left out comes next"
    notes = (heard(p, plan.base, plan.tokens) for p in peers)
    taken = next_plan(tell(heir(E, leader.facts, plan), notes, 10.0))
    skipped = {1, 2, 3} - {h.stage for path in plan.paths for h in path.hops}
    assert skipped <= {h.stage for path in taken.paths for h in path.hops}


@pytest.mark.parametrize(
    ("wires", "few"), [({}, 0), ({"fp16": 10**4, "int8": 2500}, 2)], ids=["one format", "coarser"]
)
def test_an_ends_peer_with_a_narrow_line_starts_few_micro_batches(
    wires: dict[str, int], few: int
) -> None:
    narrow = PeerId("ends2")
    # Two tensors of ten seconds for a micro-batch, where its device needs one second.
    notes = [heard(p, costs=costs(p, 1e-3)) for p in PEERS]
    notes.append(heard(narrow, costs=costs(narrow, 10.0)))
    _, plan = begun(notes, **WORK, wires=wires, target_batch=64)
    started = Counter(path.origin for path in plan.paths)
    assert (started[E], started[narrow]) == (16 - few, few)
    pipeline = PipelineSettings(2, 4)
    assert of_paths(plan, pipeline, PLANNED, 16) == "", "members follow it"


def test_an_ends_peer_without_a_path_starts_nothing() -> None:
    second = PeerId("ends2")
    everybody = {E, second, S1, S2}
    apart = {second: {second, S1}, S1: {second, S1}}
    notes = [with_ways(heard(p), *(everybody - apart.get(p, {p}))) for p in sorted(everybody)]
    _, plan = begun(notes, prove=True, target_batch=16)
    assert {m.peer for m in plan.members if m.current} == everybody
    assert {path.origin for path in plan.paths} == {E}


SKIPPING = SchedulerSettings(skip=1 / 3)
"""Paths leave out one of three stages, whose only replicas are S1, S2 and S3."""
S3 = PeerId("stage3a")


def skipping(*apart: tuple[PeerId, PeerId]) -> Leader:
    """A leader of two ends peers and three block stages, who reach each other but for these
    pairs."""
    everybody = {E, PeerId("ends2"), S1, S2, S3}
    cut = {frozenset(pair) for pair in apart}
    notes = [
        with_ways(heard(p), *(q for q in everybody - {p} if frozenset((p, q)) not in cut))
        for p in sorted(everybody)
    ]
    about = {"stages": 3, "router": lambda: Router(SKIPPING, 3), "target_batch": 24}
    return led(facts(prove=True, late_s=1e9, **about), notes)


def test_an_ends_peer_without_a_way_to_a_lone_stage_does_not_keep_others_from_work() -> None:
    second = PeerId("ends2")
    plan = next_plan(skipping((second, S2)).handle(ev.ClockTick(), 2.0))
    assert {m.peer for m in plan.members if m.current} == {E, second, S1, S2, S3}
    assert {path.origin for path in plan.paths} == {E}
    pipeline = PipelineSettings(3, 4, may_skip=1 / 3)
    assert of_paths(plan, pipeline, SKIPPING, 6) == "", "members follow it"


def test_where_no_ends_peer_has_a_way_the_leader_waits_for_one() -> None:
    assert lacks(skipping((S1, S2), (S2, S3)), 2.0) is Lack.WAYS


@pytest.mark.parametrize("full", [False, True])
def test_only_peers_that_every_replica_reaches_own_parts_of_a_large_stage(full: bool) -> None:
    """All do if the memory of these is too small: missing ways are found in the round."""
    crowd = [PeerId(f"stage1{n:02}") for n in range(ALL_OWN + 4)]
    others = set(crowd[:4])
    owners = set(crowd[4:])
    asked: list[set[PeerId]] = []

    def place(stage: int, cell: Any, previous: Any, room: Any) -> dict[str, PeerId]:
        if stage == 1:
            asked.append({p for p, _ in cell})
            if full and len(cell) < len(crowd):
                raise OutOfResources("no room", "add a peer")
        return assign(stage, cell, previous, room)

    everybody = {E, S2, *crowd}
    reached = {p: everybody - (others if p in others else {p}) for p in everybody}
    notes = [with_ways(heard(p), *reached[p]) for p in sorted(everybody)]
    leader = Leader(E, facts(prove=True, assign=place))
    # It looks at its peers first when it has heard all of them.
    tell(leader, [ev.Resigning(True), *notes, ev.Resigning(False)], 0.0)
    plan = next_plan(leader.handle(ev.ClockTick(), 2.0))
    assert {m.peer for m in plan.stage(1)} == set(crowd)
    assert asked == ([owners, set(crowd)] if full else [owners])
