"""Members that die, leave, change their stage or accuse each other, as their leader treats them."""

import dataclasses
from typing import Any

import pytest

from node.consensus.rules import Rules, mark
from node.core.ids import PeerId
from node.core.journey import Plan
from node.epoch import events as ev
from node.epoch.leader.leader import Leader, Phase
from node.epoch.pace import ASK_AFTER
from node.epoch.peers.life import UNANSWERED_S
from node.pipeline.events import MicroBatchDone
from node.scheduler.costs import Measured
from tests.training.run_facts import facts
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
    kinds,
    led,
    next_plan,
    reported,
    tell,
    the_plan,
)

SECOND = PeerId("ends2")
STRANGER = PeerId("stage1x")


def losses(actions: list[Any]) -> dict[PeerId, str]:
    """The peers that are reported as lost, with the text."""
    return {
        a.facts["peer"]: a.text
        for a in actions
        if isinstance(a, ev.RecordFact) and a.kind == "peer-lost"
    }


def told_of_death(actions: list[Any]) -> ev.SendLost:
    (said,) = (a for a in actions if isinstance(a, ev.SendLost))
    return said


def rounds(actions: list[Any]) -> list[ev.SendRound]:
    return [a for a in actions if isinstance(a, ev.SendRound)]


def test_an_accused_peer_is_probed_if_both_are_here_and_it_is_not_the_leader() -> None:
    leader, _ = begun()
    assert leader.handle(ev.Accused(S1, S2), 3.0) == [ev.ProbePeer(S1)]
    assert leader.handle(ev.Accused(E, S2), 3.0) == []
    assert leader.handle(ev.Accused(STRANGER, S2), 3.0) == []
    assert leader.handle(ev.Accused(S1, STRANGER), 3.0) == []


def test_a_late_refusal_of_an_earlier_plan_costs_nobody_its_place() -> None:
    leader, plan = begun()
    assert not losses(leader.handle(ev.Unreachable(S1, plan_hash="an earlier one"), 3.0))
    assert leader.attempt is not None
    assert not leader.attempt.dead
    assert losses(leader.handle(ev.Unreachable(S1, plan_hash=plan.hash), 3.0)).keys() == {S1}


def test_the_only_two_peers_may_accuse_each_other() -> None:
    leader = led(facts(), [heard(S1), heard(S2)])
    assert leader.handle(ev.Accused(S1, S2), 1.0) == [ev.ProbePeer(S1)]


def test_a_follower_of_another_leader_is_kept_as_long_as_it_reports() -> None:
    leader, _ = begun(late_s=4.0)
    leader.handle(heard(S2), 10.0)
    assert leader.handle(ev.ProbeAnswered(S2, ours=False), 14.0) == []
    assert losses(leader.handle(ev.ProbeAnswered(S2, ours=False), 14.5)).keys() == {S2}


def test_a_peer_that_changes_its_stage_is_lost_to_the_former_one() -> None:
    leader, _ = begun(map(heard, (E, S1, T1, S2)))
    done = leader.handle(dataclasses.replace(heard(T1), stage=2), 3.0)
    assert losses(done) == {T1: f"peer {T1[-6:]} left stage 1"}
    assert told_of_death(done).dead == (T1,)


def test_the_owner_puts_a_peer_out_of_the_epoch_under_way() -> None:
    leader, plan = begun(map(heard, (E, S1, T1, S2)))
    done = leader.handle(ev.Changed(Rules(revision=1, revoked=frozenset({mark(T1)}))), 3.0)
    assert losses(done) == {T1: f"peer {T1[-6:]} is revoked by the owner of the run"}
    assert told_of_death(done) == ev.SendLost((E, S1, S2), plan, (T1,))


def test_a_change_that_revokes_nobody_here_ends_nothing() -> None:
    leader, _ = begun()
    assert leader.handle(ev.Changed(Rules(revision=1, revoked=frozenset({mark(T1)}))), 3.0) == []
    assert leader.phase is Phase.RUN


def test_the_leader_does_not_count_itself_as_dead() -> None:
    leader, plan = begun()
    assert leader.handle(ev.Unreachable(E), 3.0) == []
    assert ev.ProbePeer(E) not in leader.handle(ev.ClockTick(), 15.0)
    assert leader.plan is plan


def test_all_that_are_dead_are_named_to_the_living_in_order() -> None:
    leader, plan = begun(map(heard, (E, S1, T1, S2, T2)))
    leader.handle(ev.Unreachable(T2), 3.0)
    done = leader.handle(ev.Unreachable(T1), 3.1)
    assert told_of_death(done) == ev.SendLost((E, S1, S2), plan, (T1, T2))
    assert leader.handle(ev.Unreachable(T1), 3.2) == [], "once"


def test_a_peer_outside_the_plan_takes_nothing_from_the_epoch() -> None:
    leader, plan = begun()
    leader.handle(heard(T1), 3.0)
    assert kinds(leader.handle(ev.Unreachable(T1), 3.1)) == ["peer-lost"]
    assert leader.plan is plan


def two_ends(**kw: Any) -> tuple[Leader, Plan]:
    leader, plan = begun(map(heard, (E, SECOND, S1, S2)), target_batch=16, **kw)
    assert {path.origin for path in plan.paths} == {E, SECOND}
    return leader, plan


def results_of(plan: Plan, origin: PeerId, tokens: int = 64) -> ev.MicroBatchesReported:
    rows = (MicroBatchDone(p.index, True, 1.0, tokens) for p in plan.paths if p.origin == origin)
    return ev.MicroBatchesReported(origin, plan.hash, tuple(rows))


def test_micro_batches_of_a_dead_ends_peer_do_not_count() -> None:
    leader, plan = two_ends()
    leader.handle(results_of(plan, E), 3.0)
    done = leader.handle(ev.Unreachable(SECOND), 3.5)
    lost = tuple(path.index for path in plan.paths if path.origin == SECOND)
    notes = rounds(done)
    assert [note.round.dropped for note in notes] == [lost] * 3
    assert [note.to for note in notes] == [(E,), (S1,), (S2,)]
    assert all(note.round.dead == (SECOND,) for note in notes)


def test_micro_batches_of_a_living_ends_peer_are_waited_for() -> None:
    leader, plan = two_ends()
    done = leader.handle(ev.Unreachable(SECOND), 3.0)
    assert (leader.phase, rounds(done)) == (Phase.RUN, [])
    done = leader.handle(results_of(plan, E), 3.5)
    assert len(rounds(done)) == 3


def test_an_ends_peer_reports_only_its_own_micro_batches_and_each_once() -> None:
    leader, plan = two_ends()
    forged = dataclasses.replace(results_of(plan, E), peer=SECOND)
    leader.handle(forged, 3.0)
    leader.handle(results_of(plan, SECOND), 3.0)
    assert leader.phase is Phase.RUN, "nobody reports for E"
    leader.handle(results_of(plan, SECOND, tokens=1), 3.0)
    (note, *_) = rounds(leader.handle(results_of(plan, E), 3.0))
    assert note.round.tally.tokens == 4 * 64


def test_an_epoch_without_a_finished_micro_batch_starts_again() -> None:
    leader, plan = begun()
    rows = tuple(MicroBatchDone(path.index, False) for path in plan.paths)
    done = leader.handle(ev.MicroBatchesReported(E, plan.hash, rows), 3.0)
    (said,) = (a for a in done if isinstance(a, ev.RecordFact))
    assert said.text == "epoch 0 starts again: no micro-batch was finished"
    assert leader.idle


def test_an_epoch_is_closed_at_its_deadline_with_the_micro_batches_that_came() -> None:
    leader, plan = begun(late_s=1e9)
    first = (MicroBatchDone(0, True, 1.0, 64),)
    leader.handle(ev.MicroBatchesReported(E, plan.hash, first), 3.0)
    deadline = 2.0 + plan.deadline_s
    assert rounds(leader.handle(ev.ClockTick(), deadline - 0.1)) == []
    notes = rounds(leader.handle(ev.ClockTick(), deadline))
    assert {note.round.dropped for note in notes} == {(1,)}
    assert {note.round.tally.tokens for note in notes} == {64}


def test_results_of_another_plan_are_not_counted() -> None:
    leader, plan = begun()
    rows = tuple(MicroBatchDone(path.index, True, 1.0, 64) for path in plan.paths)
    assert leader.handle(ev.MicroBatchesReported(E, "another", rows), 3.0) == []
    assert leader.phase is Phase.RUN
    reported(leader, plan, 3.0)
    assert reported(leader, plan, 3.0) == [], "the round is open"


def test_the_death_of_a_member_that_had_committed_ends_its_part() -> None:
    leader, plan = begun(map(heard, (E, S1, T1, S2)))
    reported(leader, plan, 3.0)
    leader.handle(ev.Committed(T1, plan.hash, 0, "another result", 1.0), 3.0)
    leader.handle(ev.Unreachable(T1), 3.1)
    assert leader.handle(ev.Committed(T1, plan.hash, 0, "d1", 1.0), 3.2) == []
    done = committed(leader, plan, 3.5, E, S1, S2)
    assert next_plan(done).digests[1] == "digest 1 next"


def test_the_death_of_the_last_awaited_member_ends_the_round() -> None:
    leader, plan = begun(map(heard, (E, S1, T1, S2)))
    reported(leader, plan, 3.0)
    committed(leader, plan, 3.0, E, S1, S2)
    assert "epoch-committed" in kinds(leader.handle(ev.Unreachable(T1), 3.5))


def test_a_stage_without_a_holder_ends_the_epoch() -> None:
    leader, plan = begun(map(heard, (E, S1, S2)))
    leader.handle(dataclasses.replace(heard(T2), digest="another"), 3.0)
    done = leader.handle(ev.Unreachable(S2), 3.0)
    (said,) = (a for a in done if isinstance(a, ev.RecordFact) and a.kind == "epoch-abandoned")
    why = "stage 2 has lost every peer that holds epoch 0"
    assert said.text == f"epoch 0 starts again: {why}"
    assert leader.plan is None
    assert plan.epoch == 0


def test_a_listener_that_has_committed_holds_its_stage() -> None:
    listener = dataclasses.replace(heard(T2), digest="another")
    leader, plan = begun([*map(heard, (E, S1, S2)), listener])
    assert [m.peer for m in plan.members if not m.current] == [T2]
    reported(leader, plan, 3.0)
    leader.handle(ev.Committed(T2, plan.hash, 0, "d2", 1.0), 3.0)
    leader.handle(ev.Unreachable(S2), 3.1)
    assert leader.phase is Phase.ROUND
    assert "epoch-committed" in kinds(committed(leader, plan, 3.2, E, S1))


def test_members_that_did_not_report_at_the_deadline_of_the_round_are_left_out() -> None:
    leader, plan = begun(map(heard, (E, S1, T1, S2)), late_s=1e9)
    (note, *_) = rounds(reported(leader, plan, 3.0))
    committed(leader, plan, 3.0, E, S1, S2)
    deadline = 3.0 + 1.5 * note.round.deadline_s
    assert kinds(leader.handle(ev.ClockTick(), 3.0 + note.round.deadline_s)) == []
    done = leader.handle(ev.ClockTick(), deadline)
    assert kinds(done)[:3] == ["peer-on-probation", "peer-lost", "epoch-committed"]
    assert losses(done) == {T1: f"peer {T1[-6:]} did not finish its work in time"}


def test_a_leader_that_does_not_finish_its_own_round_starts_again() -> None:
    leader, plan = begun(late_s=1e9)
    reported(leader, plan, 3.0)
    committed(leader, plan, 3.0, S1, S2)
    until = 3.0 + 1.5 * leader.facts.waits.round_s
    assert leader.handle(ev.ClockTick(), until - 0.1) == []
    done = leader.handle(ev.ClockTick(), until)
    (said,) = (a for a in done if isinstance(a, ev.RecordFact))
    assert said.text == "epoch 0 starts again: this peer did not finish its own round"


def test_a_death_while_the_held_out_loss_is_measured_ends_no_epoch() -> None:
    leader, plan = begun(eval_every=1)
    commits(leader, plan, 3.0)
    assert leader.phase is Phase.EVALUATE
    assert kinds(leader.handle(ev.Unreachable(S2), 3.5)) == ["peer-lost"]
    assert leader.phase is Phase.EVALUATE
    assert "evaluated" in kinds(leader.handle(ev.Evaluated(1, 2.0), 4.0))
    assert leader.idle


def test_a_probe_without_any_result_is_a_death_in_the_end() -> None:
    leader, _ = begun(late_s=4.0)
    assert ev.ProbePeer(S1) in leader.handle(ev.ClockTick(), 10.0)
    assert losses(leader.handle(ev.ClockTick(), 10.0 + UNANSWERED_S)) == {}
    done = leader.handle(ev.ClockTick(), 10.5 + UNANSWERED_S)
    assert losses(done)[S1] == f"peer {S1[-6:]} was last heard {10.5 + UNANSWERED_S:.1f} s ago"


@pytest.mark.parametrize("answer", [heard(S1), ev.ProbeAnswered(S1), ev.Unreachable(S1, -1.0)])
def test_a_peer_that_was_heard_after_a_probe_is_probed_anew(answer: Any) -> None:
    leader, _ = begun(late_s=4.0)
    leader.handle(ev.ClockTick(), 10.0)
    leader.handle(answer, 11.0)
    assert S1 not in losses(leader.handle(ev.ClockTick(), 11.0 + UNANSWERED_S))


def test_an_answer_to_a_probe_is_a_sign_of_life() -> None:
    leader, _ = begun(late_s=4.0)
    leader.handle(ev.ClockTick(), 9.0)
    assert leader.silent_s(S2, 9.5) == 9.5
    leader.handle(ev.ProbeAnswered(S2), 9.5)
    assert leader.silent_s(S2, 10.0) == 0.0


def test_an_answer_of_a_stranger_is_no_sign_of_life() -> None:
    leader, _ = begun()
    assert leader.handle(ev.ProbeAnswered(STRANGER), 3.0) == []
    assert leader.handle(ev.ProbeAnswered(STRANGER, ours=False), 300.0) == []
    assert leader.silent_s(STRANGER, 300.0) == 0.0


def test_the_longest_recent_silence_is_forgotten_with_time() -> None:
    """A peer that once was silent for a while is asked later, but not for ever."""
    leader = led(facts(late_s=4.0), [heard(E), heard(S1), heard(S2)])
    leader.handle(heard(S1), 8.0)

    def asked_after(since: float) -> float:
        """Seconds of silence after which S1 counts as silent."""
        return next(s / 4 for s in range(400) if leader.silent_s(S1, since + s / 4))

    usual = ASK_AFTER * 2 * 8.0
    assert asked_after(8.0) == pytest.approx(usual, abs=0.3)
    for now in range(9, 69):
        leader.handle(heard(S1), float(now))
    assert asked_after(68.0) == pytest.approx(usual / 2, abs=0.3)
    for now in range(69, 400):
        leader.handle(heard(S1), float(now))
    assert asked_after(399.0) == pytest.approx(ASK_AFTER * 4.0, abs=0.3)


def test_a_very_long_silence_makes_a_peer_no_more_irregular() -> None:
    leader = led(facts(late_s=4.0), [heard(E), heard(S1), heard(S2)])
    leader.handle(heard(S1), 1000.0)
    assert leader.silent_s(S1, 1000.0 + ASK_AFTER * 60.0 - 0.1) == 0.0
    assert leader.silent_s(S1, 1000.0 + ASK_AFTER * 60.0 + 0.1) > 0.0


def test_a_heartbeat_without_news_waits_for_the_next_look_at_the_clock() -> None:
    leader = led(facts(), [heard(E), heard(S1), heard(S2)])
    measured = heard(S2, costs=Measured(1.0, 2.0))
    assert the_plan(leader.handle(measured, 2.0)) is None
    assert the_plan(leader.handle(ev.ClockTick(), 2.0)) is not None


def test_news_in_a_heartbeat_plans_at_once() -> None:
    leader = led(facts(), [heard(E), heard(S1), heard(S2)])
    news = dataclasses.replace(heard(S2), digest="another")
    assert the_plan(leader.handle(news, 2.0)) is not None
    assert tell(leader, [heard(T1)], 2.1) == [], "an epoch is under way"
