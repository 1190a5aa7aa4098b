"""Deadlines of an epoch from the measurements of its members; slow is not dead."""

import dataclasses
from typing import Any

import pytest

from node.core.ids import PeerId
from node.core.journey import Hop, Plan
from node.core.patience import SPARE
from node.epoch import events as ev
from node.epoch.leader.deadlines import (
    AGAIN,
    AGAIN_MOST,
    FIRST,
    LEAST_RUN_S,
    LEAST_S,
    MARGIN,
    MEASURED,
    MOST_S,
    EpochDeadlines,
)
from node.epoch.leader.leader import Leader, Phase
from node.epoch.pace import ASK_AFTER
from node.epoch.peers.life import PAUSES
from node.scheduler.costs import BEYOND, NOTHING, LinkCost, Measured
from tests.training.run_facts import facts
from tests.training.test_leader import S1, S2, T1, E, begun, commits, heard, led, reported, tell

WORK: dict[str, Any] = {
    "operations": (1e12, 2e12, 2e12),
    "steps": ({"s0": 1e11}, {"s1": 6e12}, {"s2": 1e12}),
    "parameters": (10**6,) * 3,
    "tensor": 10**4,
}
TERA = Measured(tera_s=10.0)
"""Costs on a slow core: 100 GFLOP/s."""
BUSY = Measured(forward_s=5.0, backward_s=10.0, tera_s=10.0)


def told(costs: Measured = NOTHING, others: Measured | None = None) -> tuple[Leader, Plan]:
    """A leader with its first plan of two stages. All members report `costs`, those at stage 1
    `others` if given."""
    at_1 = others or costs
    said = ((E, costs), (S1, at_1), (S2, costs), (T1, at_1))
    return begun([heard(p, costs=c) for p, c in said], **WORK)


def close(leader: Leader, plan: Plan, now: float) -> list[ev.RoundArrived]:
    return [a.round for a in reported(leader, plan, now) if isinstance(a, ev.SendRound)]


def test_where_nothing_is_known_the_manifest_counts() -> None:
    leader, plan = told()
    assert plan.deadline_s == leader.facts.waits.epoch_s
    assert {r.deadline_s for r in close(leader, plan, 3.0)} == {leader.facts.waits.round_s}


def test_the_deadline_uses_operations_first_then_measurements() -> None:
    _, first = told(TERA)
    # One peer has both micro-batches of its stage, and one goes through all three stages: 2 * 20 s
    # + 10 + 20 + 20.
    assert first.deadline_s == pytest.approx(FIRST * 90.0)
    _, later = told(BUSY)
    assert later.deadline_s == pytest.approx(MARGIN * (2 * 15.0 + 3 * 15.0))


def test_a_step_of_a_minute_is_waited_for() -> None:
    leader, plan = told(TERA)
    notes = close(leader, plan, 3.0)
    assert notes[0].deadline_s == pytest.approx(MARGIN * 60.0, rel=0.1), (
        "6e12 operations at 10 s for 1e12"
    )
    tell(leader, [heard(peer, costs=TERA) for peer in (E, S1, S2, T1)], 100.0)
    assert not any(isinstance(a, ev.SendRound) for a in leader.handle(ev.ClockTick(), 103.0)), (
        "100 s later nothing is repaired"
    )
    assert (leader.phase, leader.repeats.repaired) == (Phase.ROUND, 0)


def test_the_slowest_owner_counts_and_a_slow_line() -> None:
    leader, plan = told(TERA, Measured(tera_s=30.0))
    assert close(leader, plan, 3.0)[0].deadline_s == pytest.approx(MARGIN * 180.0, rel=0.1)
    leader, plan = told(Measured(tera_s=0.1, ways=((S2, LinkCost(tensor_s=0.5)),)))
    # The parameters of a stage are 100 tensors; half of them each way between two members.
    assert close(leader, plan, 3.0)[0].deadline_s == pytest.approx(
        MARGIN * (0.6 + 2 * 0.5 * 100 * 0.5), rel=0.1
    )


def test_rounds_that_took_long_make_the_next_deadline_longer() -> None:
    leader, plan = begun()
    assert leader.planning.deadlines.round(leader.roster, plan) == leader.facts.waits.round_s
    leader.planning.deadlines.took(plan, 20.0)
    assert leader.planning.deadlines.round(leader.roster, plan) > 40.0
    commits(leader, plan, 3.0)
    assert leader.planning.deadlines.round(leader.roster, plan) > 20.0


def test_rounds_with_new_owners_are_measured_apart() -> None:
    leader, plan = begun(round_s=30.0)
    deadlines = EpochDeadlines(facts(round_s=30.0))

    def usual(steady: bool) -> float:
        return deadlines.usual_round(leader.roster, plan, steady=steady)

    for _ in range(MEASURED):
        assert usual(steady=False) == 30.0
        deadlines.took(plan, 1.0, steady=False)
    assert usual(steady=False) < 10.0
    assert usual(steady=True) == 30.0
    for _ in range(MEASURED):
        deadlines.took(plan, 0.1)
    assert LEAST_S == usual(steady=True) < usual(steady=False)
    for _ in range(10):
        deadlines.took(plan, 100.0, steady=False)
    assert deadlines.round(leader.roster, plan) > 100.0, "nobody stops new owners in their work"


def test_another_attempt_has_more_time_up_to_a_bound() -> None:
    leader, plan = begun()
    each = [leader.planning.deadlines.round(leader.roster, plan, attempt) for attempt in range(6)]
    assert each[1] == AGAIN * each[0]
    assert each == sorted(each)
    assert each[5] == each[4]
    leader.planning.deadlines.took(plan, 1000.0)
    slow = [leader.planning.deadlines.round(leader.roster, plan, attempt) for attempt in range(3)]
    assert slow[1:] == [MOST_S, MOST_S], "no member waits longer than that"


def test_nobody_makes_the_others_wait_by_calling_itself_slow() -> None:
    honest, plan = told(TERA)
    before = honest.planning.deadlines.round(honest.roster, plan)
    tell(honest, [heard(S1, costs=Measured(tera_s=1e4))], 3.0)
    assert honest.planning.deadlines.round(honest.roster, plan) <= BEYOND * before
    tell(honest, [heard(p, costs=Measured(1e4, 1e4, tera_s=1e4)) for p in (E, S1, S2, T1)], 4.0)
    assert EpochDeadlines(facts(**WORK)).run(honest.roster, plan.paths) == MOST_S


def test_nobody_makes_the_others_wait_by_calling_its_ways_slow() -> None:
    def far(peer: PeerId, seconds: float) -> Measured:
        ways = tuple((p, LinkCost(seconds)) for p in (E, S1, S2, T1) if p != peer)
        return Measured(tera_s=1.0, ways=ways)

    peers = (E, S1, S2, T1)
    leader, plan = begun([heard(p, costs=far(p, 0.5)) for p in peers], **WORK)
    before = leader.planning.deadlines.round(leader.roster, plan)
    assert before > leader.facts.waits.round_s
    paths = EpochDeadlines(facts(**WORK)).run(leader.roster, plan.paths)
    tell(leader, [heard(S1, costs=far(S1, 1e4))], 3.0)
    assert leader.planning.deadlines.round(leader.roster, plan) <= BEYOND * before
    assert EpochDeadlines(facts(**WORK)).run(leader.roster, plan.paths) <= BEYOND * paths


def test_rounds_with_other_cells_are_measured_apart() -> None:
    leader, plan = begun(round_s=30.0)
    deadlines = EpochDeadlines(facts(round_s=30.0))
    outer = dataclasses.replace(plan, paths=(), outer=7)
    for _ in range(MEASURED):
        assert deadlines.usual_round(leader.roster, outer) == 30.0
        deadlines.took(outer, 2.0)
    # The mean is 2 s, and the mean deviation 1 s at first and 0.75 s then.
    assert deadlines.usual_round(leader.roster, outer) == pytest.approx(SPARE * (2.0 + 4 * 0.75))
    assert deadlines.usual_round(leader.roster, plan) == 30.0
    for _ in range(10):
        deadlines.took(outer, 100.0)
    assert deadlines.round(leader.roster, plan) == 30.0
    assert deadlines.round(leader.roster, outer) > 200.0


def test_a_usual_round_takes_longer_with_patience_and_in_another_attempt() -> None:
    leader, plan = begun(round_s=30.0)
    deadlines = EpochDeadlines(facts(round_s=30.0))
    for _ in range(MEASURED):
        deadlines.took(plan, 0.1)

    def usual(**about: Any) -> float:
        return deadlines.usual_round(leader.roster, plan, **about)

    assert usual() == LEAST_S
    assert usual(patience=3.0) == 3.0 * LEAST_S
    assert usual(attempt=1) == AGAIN * LEAST_S
    assert usual(attempt=9) == AGAIN_MOST * LEAST_S
    assert usual(patience=100.0) == 30.0, "the deadline of the round"


def test_a_run_takes_unusually_long_after_a_multiple_of_its_measured_time() -> None:
    _, plan = begun(epoch_s=100.0)
    deadlines = EpochDeadlines(facts(epoch_s=100.0))
    for _ in range(MEASURED):
        assert deadlines.usual_run(plan) == plan.deadline_s == 100.0
        deadlines.ran(0.5)
    assert deadlines.usual_run(plan) == LEAST_RUN_S
    assert deadlines.usual_run(plan, 3.0) == 3.0 * LEAST_RUN_S
    assert deadlines.usual_run(plan, 1000.0) == 100.0
    forecast = dataclasses.replace(plan, forecast=(4.0, 0.0))
    assert deadlines.usual_run(forecast) == MARGIN * 4.0
    for _ in range(50):
        deadlines.ran(8.0)
    assert deadlines.usual_run(plan) == pytest.approx(SPARE * 8.0, rel=0.1)


def test_a_forecast_and_slow_connections_make_the_run_longer() -> None:
    leader, plan = told(BUSY)
    deadlines = EpochDeadlines(facts(**WORK))
    assert deadlines.run(leader.roster, plan.paths, 500.0) == MARGIN * 500.0
    assert deadlines.run(leader.roster, plan.paths, 1.0) == pytest.approx(MARGIN * 75.0)
    ways = dataclasses.replace(BUSY, ways=((PeerId("far"), LinkCost(2.0)), (T1, LinkCost(1.0))))
    leader, plan = told(ways)
    # There and back over the slowest connection of each of the three peers.
    assert deadlines.run(leader.roster, plan.paths) == pytest.approx(MARGIN * (75.0 + 3 * 4.0))


def test_an_unmeasured_peer_is_taken_to_be_as_fast_as_the_others() -> None:
    leader, plan = begun([heard(E, costs=TERA), heard(S1), heard(S2)], **WORK)
    assert plan.deadline_s == pytest.approx(FIRST * 90.0)
    assert close(leader, plan, 3.0)[0].deadline_s == pytest.approx(MARGIN * 60.0, rel=0.1)


def test_a_newcomer_has_the_margin_of_measured_work_where_most_are_measured() -> None:
    """A stage takes 1.5 times as long as its products here, so the newcomer's does too."""
    at_1 = Measured(10.0, 20.0, tera_s=10.0)
    ends = Measured(5.0, 10.0, tera_s=10.0)
    notes = [heard(E, costs=ends), heard(S2, costs=at_1), heard(S1, costs=TERA)]
    leader, plan = begun(notes, **WORK)
    deadlines = EpochDeadlines(facts(**WORK))
    each = 1.5 * 20.0
    assert deadlines.run(leader.roster, plan.paths) == pytest.approx(
        MARGIN * (2 * each + 15.0 + 2 * each)
    )
    alone = [heard(E, costs=ends), heard(S2, costs=TERA), heard(S1, costs=TERA)]
    leader, plan = begun(alone, **WORK)
    assert deadlines.run(leader.roster, plan.paths) == pytest.approx(
        FIRST * (2 * 20.0 + 15.0 + 2 * 20.0)
    )


def test_one_slow_claim_counts_for_a_multiple_of_the_usual_one() -> None:
    far = Measured(5.0, 10.0, tera_s=1.0, ways=((S2, LinkCost(1.0)),))
    notes = [heard(p, costs=far) for p in (E, S2, T1)]
    claim = Measured(1e4, 1e4, tera_s=1e4, ways=((S2, LinkCost(1e4)),))
    work = WORK | {"parameters": (0,) * 3}
    leader, plan = begun([*notes, heard(S1, costs=claim)], **work)
    deadlines = EpochDeadlines(facts(**work))
    assert plan.owners["s1"] == S1
    assert deadlines.round(leader.roster, plan) == pytest.approx(MARGIN * 6.0 * BEYOND)
    path = dataclasses.replace(plan.paths[0], hops=(Hop(1, S1), Hop(2, S2)))
    # S1 alone is slow, and the two others take 15 s and 2 s of connections each.
    slow = BEYOND * 5.0 + BEYOND * 10.0
    through = slow + 2 * BEYOND + 2 * 17.0
    assert deadlines.run(leader.roster, (path,)) == pytest.approx(MARGIN * (slow + through))


def test_nothing_to_do_takes_no_time() -> None:
    leader, _ = begun()
    assert EpochDeadlines(facts(epoch_s=0.5)).run(leader.roster, ()) == 0.5


def test_quick_measured_work_has_the_margin_of_measured_work() -> None:
    quick = Measured(0.2, 0.3, tera_s=10.0)
    leader, plan = told(quick)
    deadlines = EpochDeadlines(facts(**WORK, epoch_s=0.1))
    assert deadlines.run(leader.roster, plan.paths) == pytest.approx(MARGIN * (2 * 0.5 + 3 * 0.5))


def test_each_replica_moves_the_parameters_that_it_does_not_own() -> None:
    third = PeerId("stage1c")
    ways = Measured(ways=((S2, LinkCost(tensor_s=0.5)),))
    leader, plan = begun([heard(p, costs=ways) for p in (E, S1, S2, T1, third)], **WORK)
    # Two thirds of 100 tensors each way, and 1 MB is copied at 100 MB/s.
    moved = 2 * 2 / 3 * 100 * 0.5
    assert close(leader, plan, 3.0)[0].deadline_s == pytest.approx(MARGIN * (moved + 0.01))


def test_the_loss_counts_at_the_ends_and_half_a_measurement_is_none() -> None:
    loss = dataclasses.replace(BUSY, loss_s=3.0)
    leader, plan = told(loss)
    # Two micro-batches at the only ends peer, and one more on its way.
    assert plan.deadline_s == pytest.approx(MARGIN * (2 * 18.0 + 18.0 + 15.0 + 15.0))
    deadlines = EpochDeadlines(facts(**WORK))
    half = dataclasses.replace(TERA, forward_s=5.0)
    leader, plan = told(half)
    assert deadlines.run(leader.roster, plan.paths) == pytest.approx(FIRST * 90.0)


def test_a_round_copies_every_parameter_and_steps_each_part_once() -> None:
    work = WORK | {"parameters": (10**9,) * 3, "tensor": 10**7, "steps": ({}, {}, {})}
    leader, plan = begun(map(heard, (E, S1, S2)), **work)
    assert close(leader, plan, 3.0)[0].deadline_s == pytest.approx(MARGIN * 10.0)
    shared = WORK | {
        "parameters": (0,) * 3,
        "steps": ({}, {"a": 1e12, "b": 2e12, "c": 4e12, "nobody's": 1e15}, {}),
    }
    owners = {"a": S1, "b": S1, "c": T1}
    leader, plan = begun([heard(p, costs=TERA) for p in (E, S1, T1, S2)], **shared)
    plan = dataclasses.replace(plan, owners=owners)
    deadlines = EpochDeadlines(facts(**shared))
    assert deadlines.round(leader.roster, plan) == pytest.approx(MARGIN * 40.0)
    outer = dataclasses.replace(plan, paths=(), outer=7)
    assert deadlines.round(leader.roster, outer) == leader.facts.waits.round_s


# ----------------------------------------------------------- slow is not dead


def probes(actions: list[Any]) -> list[PeerId]:
    return [a.peer for a in actions if isinstance(a, ev.ProbePeer)]


def lost(actions: list[Any]) -> list[str]:
    return [a.text for a in actions if isinstance(a, ev.RecordFact) and a.kind == "peer-lost"]


def silent() -> Leader:
    """A leader that has heard all of its members at the time 0."""
    return led(facts(late_s=4.0), [heard(E), heard(S1), heard(S2)])


def test_silence_is_asked_about_and_no_death() -> None:
    leader = silent()
    tell(leader, [heard(S1)], 4.0)
    assert probes(leader.handle(ev.ClockTick(), ASK_AFTER * 4.0 - 0.1)) == []
    done = leader.handle(ev.ClockTick(), 4.1)
    assert probes(done) == [S2]
    assert not lost(done)
    assert probes(leader.handle(ev.ClockTick(), 4.3)) == [], "one question at a time"
    assert S2 in leader.roster.peers.candidates
    leader.handle(ev.ProbeAnswered(S2), 9.0)
    tell(leader, [heard(S1)], 9.0)
    assert not lost(leader.handle(ev.ClockTick(), 9.1))
    assert S2 in leader.roster.peers.candidates, "it lives, whatever was not heard of it"


def test_a_failed_probe_is_a_death_unless_the_peer_was_heard() -> None:
    leader = silent()
    leader.handle(ev.ClockTick(), 4.1)
    tell(leader, [heard(S2)], 5.0)
    assert not lost(leader.handle(ev.Unreachable(S2, since=4.5), 6.0))
    assert len(lost(leader.handle(ev.Unreachable(S1, since=0.0), 6.0))) == 1, "not heard since"
    assert len(lost(leader.handle(ev.Unreachable(S2), 6.0))) == 1, (
        "who did not get its plan is useless, heard or not"
    )


def test_a_leader_that_runs_late_itself_asks_later() -> None:
    leader = silent()
    assert probes(leader.handle(ev.ClockTick(slack=6.0), 4.1)) == []
    assert set(probes(leader.handle(ev.ClockTick(slack=6.0), 6.1))) == {S1, S2}


def test_a_peer_that_was_heard_rarely_is_asked_later() -> None:
    leader = silent()
    leader.handle(ev.ClockTick(), 3.0)
    tell(leader, [heard(S1), heard(S2)], 9.0)
    assert probes(leader.handle(ev.ClockTick(), 9.0 + ASK_AFTER * 4.0 + 0.5)) == []
    assert set(probes(leader.handle(ev.ClockTick(), 9.0 + ASK_AFTER * PAUSES * 9.0 + 0.1))) == {
        S1,
        S2,
    }


def test_a_peer_that_follows_another_leader_is_let_go() -> None:
    leader = silent()
    leader.handle(ev.ClockTick(), 2.5)
    for now in (3.0, 4.0):
        assert not lost(leader.handle(ev.ProbeAnswered(S2, ours=False), now)), "a moment's doubt"
    assert len(lost(leader.handle(ev.ProbeAnswered(S2, ours=False), 4.5))) == 1
