"""Conduct of peers: a peer that costs the others time is on probation for a multiple of it."""

import pytest

from node.core.ids import PeerId
from node.core.journey import Plan
from node.epoch.events import CountFault, RecordFact
from node.epoch.leader import conduct as rules
from node.epoch.leader.conduct import Conduct
from node.epoch.leader.inspection import Inspection, Liar

A = PeerId("a")
B = PeerId("b")
SEED = "ab" * 32


def test_a_peer_listens_for_a_multiple_of_the_time_that_it_cost() -> None:
    conduct = Conduct()
    assert conduct.cost(A, 4.0, 100.0) == 0.0
    until = 100.0 + 4.0 * rules.MULTIPLE
    assert conduct.on_probation(until - 0.1) == {A}
    assert conduct.probation_s(A, until - 10.0) == pytest.approx(10.0)
    assert conduct.on_probation(until) == set()
    assert conduct.probation_s(B, 100.0) == 0.0


def test_a_probation_has_a_shortest_and_a_longest_time() -> None:
    conduct = Conduct()
    conduct.cost(A, 0.0, 0.0)
    assert conduct.probation_s(A, 0.0) == rules.LEAST_S
    conduct.cost(A, 1e9, 0.0)
    assert conduct.probation_s(A, 0.0) == rules.MOST_S
    for _ in range(5000):
        conduct.cost(A, 1.0, 0.0)
    assert conduct.probation_s(A, 0.0) == rules.MOST_S


def test_each_offence_doubles_probation_and_patience_until_an_epoch_is_done_in_time() -> None:
    conduct = Conduct()
    assert conduct.patience([A, B]) == 1.0
    for doubled in (1, 2, 4):
        conduct.cost(A, 4.0, 0.0)
        assert conduct.probation_s(A, 0.0) == 4.0 * rules.MULTIPLE * doubled
        assert conduct.patience([A, B]) == 2.0 * doubled
        assert conduct.patience([B]) == 1.0
    conduct.good(A)
    assert conduct.patience([A]) == 1.0


def test_offences_in_a_row_are_faults() -> None:
    conduct = Conduct()
    weights = [conduct.cost(A, 4.0, 1000.0 * i) for i in range(4)]
    assert weights == [0.0, 0.0, 1.0, 1.0]
    conduct.good(A)
    assert conduct.cost(A, 4.0, 9000.0) == 0.0


def test_a_late_report_ends_a_probation_once_in_its_time() -> None:
    """Otherwise a peer that is late in every second epoch would cost time for ever."""
    conduct = Conduct()
    conduct.cost(A, 4.0, 0.0, missed="one")
    assert not conduct.reported(A, "another", 1.0)
    assert not conduct.reported(B, "one", 1.0)
    assert conduct.reported(A, "one", 1.0)
    assert not conduct.on_probation(1.0)
    conduct.good(A)
    conduct.cost(A, 4.0, 10.0, missed="two")
    assert not conduct.reported(A, "two", 11.0)
    assert conduct.on_probation(11.0) == {A}
    later = 10.0 + 4.0 * rules.MULTIPLE
    conduct.good(A)
    conduct.cost(A, 4.0, later, missed="three")
    assert conduct.reported(A, "three", later + 1.0)


def test_other_offences_are_not_excused_by_a_report() -> None:
    conduct = Conduct()
    conduct.cost(A, 4.0, 0.0)
    assert not conduct.reported(A, "", 1.0)
    assert conduct.on_probation(1.0) == {A}


def test_epochs_are_counted_over_offences() -> None:
    conduct = Conduct()
    conduct.good(A)
    conduct.cost(A, 4.0, 0.0)
    conduct.good(A)
    assert (conduct.epochs(A), conduct.epochs(B)) == (2, 0)


def test_new_keys_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "PEERS_KEPT", 8)
    conduct = Conduct()
    for i in range(100):
        conduct.cost(PeerId(f"p{i}"), 4.0, 0.0)
    assert len(conduct.on_probation(1.0)) == 8


def test_patience_doubles_up_to_a_bound() -> None:
    conduct = Conduct()
    for _ in range(50):
        conduct.cost(A, 4.0, 0.0)
    assert conduct.patience([A, B]) == 2.0**rules.MOST_DOUBLINGS


def test_a_report_on_a_plan_is_counted_once() -> None:
    conduct = Conduct()
    conduct.cost(A, 4.0, 0.0, missed="one")
    assert conduct.reported(A, "one", 1.0)
    assert not conduct.reported(A, "one", 1000.0)


def test_records_of_an_earlier_leader_are_copied() -> None:
    before = Conduct()
    before.good(A)
    before.cost(B, 4.0, 0.0)
    conduct = Conduct(before.records)
    assert conduct.records == before.records
    assert (conduct.epochs(A), conduct.on_probation(1.0)) == (1, {B})
    conduct.good(A)
    conduct.good(B)
    assert (before.epochs(A), before.patience([B])) == (1, 2.0)


def test_a_shorter_probation_does_not_end_a_longer_one() -> None:
    conduct = Conduct()
    conduct.cost(A, 100.0, 0.0)
    conduct.good(A)
    conduct.cost(A, 0.0, 1.0)
    assert conduct.probation_s(A, 0.0) == 100.0 * rules.MULTIPLE


def test_each_lie_doubles_the_probation_of_a_liar(monkeypatch: pytest.MonkeyPatch) -> None:
    conduct = Conduct()
    plan = Plan(1, 1, B, (), (), {})
    monkeypatch.setattr(Inspection, "judge", lambda *_: [Liar(A, "lies")])
    now = 0.0
    for seconds in (rules.LIAR_S, 2 * rules.LIAR_S, 4 * rules.LIAR_S):
        done = conduct.inspect(plan, B, SEED, {}, now)
        assert [type(action) for action in done] == [RecordFact, CountFault]
        assert conduct.probation_s(A, now) == seconds
        conduct.good(A)
        assert conduct.on_probation(now + seconds - 1.0) == {A}
        now += seconds
        assert conduct.on_probation(now) == set()


def test_late_work_excuses_no_liar(monkeypatch: pytest.MonkeyPatch) -> None:
    conduct = Conduct()
    monkeypatch.setattr(Inspection, "judge", lambda *_: [Liar(A, "lies")])
    conduct.cost(A, 4.0, 0.0, "a plan")
    conduct.inspect(Plan(1, 1, B, (), (), {}), B, SEED, {}, 0.0)
    assert conduct.excuse(A, "a plan", 1.0) == []
    assert conduct.on_probation(rules.LIAR_S - 1.0) == {A}


def test_late_work_after_a_lie_excuses_no_liar(monkeypatch: pytest.MonkeyPatch) -> None:
    conduct = Conduct()
    monkeypatch.setattr(Inspection, "judge", lambda *_: [Liar(A, "lies")])
    conduct.inspect(Plan(1, 1, B, (), (), {}), B, SEED, {}, 0.0)
    conduct.cost(A, 4.0, 5.0, "a plan")
    assert conduct.excuse(A, "a plan", 6.0) == []
    assert conduct.on_probation(rules.LIAR_S - 1.0) == {A}
    conduct.cost(A, 4.0, rules.LIAR_S, "another plan")
    assert len(conduct.excuse(A, "another plan", rules.LIAR_S + 60.0)) == 1
