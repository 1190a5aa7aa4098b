"""What no honest peer says: epochs and tokens beyond the run's, terms that no number of plans
explains, an end before the end."""

import dataclasses

import pytest

from node.core.errors import WireError
from node.core.ids import PeerId
from node.core.journey import Hop, Path, Plan, PlanMember, Version
from node.training.protocol import events as ev
from node.training.protocol import notes
from node.training.protocol.bounds import MOST_TERM, PLANS_PER_S, STEP, STEP_HEARD, Bounds, Terms

E, S = PeerId("ends"), PeerId("stage")
RUN = Bounds(epochs=120, tokens=128)
PATH = Path(0, E, (0, 1), (Hop(1, S),))


def plan(epoch: int = 7, **about: object) -> Plan:
    made = Plan(
        epoch, 9, E, (PlanMember(E, 0), PlanMember(S, 1)), (PATH,), {"w": S}, lineage="ab" * 16
    )
    return dataclasses.replace(made, **about)  # type: ignore[arg-type]


def test_a_history_counts_no_more_than_its_epochs_can_have_made() -> None:
    assert RUN.of_history(7, 7 * 128) == ""
    assert "tokens" in RUN.of_history(7, 7 * 128 + 1)
    assert "tokens" in RUN.of_history(0, 1)
    assert "epoch 121" in RUN.of_history(121, 0)
    assert Bounds(120, 0).of_history(7, 2**53) == "", (
        "where a sample's length is not known there is no bound"
    )
    assert (RUN.counted(7, 2**53), RUN.counted(7, 5)) == (7 * 128, 5)


def test_a_heartbeat_stands_where_the_run_can_have_come() -> None:
    good = ev.Heartbeat(
        S, 1, Version(7, "ab" * 16), "d", tokens=7 * 128, reachable=(Version(120, "cd" * 16),)
    )
    assert RUN.of_heard(good) == ""
    assert "tokens" in RUN.of_heard(dataclasses.replace(good, tokens=2**53))
    assert "epoch" in RUN.of_heard(dataclasses.replace(good, at=Version(2**40, "ab" * 16)))
    assert "epoch" in RUN.of_heard(dataclasses.replace(good, reachable=(Version(121, "cd" * 16),)))
    with pytest.raises(WireError):
        notes.leader_event(notes.ready_note(dataclasses.replace(good, term=MOST_TERM + 1)), S)


def test_a_plan_without_micro_batches_ends_no_run_early() -> None:
    assert RUN.of_plan(plan()) == ""
    assert "ends the run at epoch 7" in RUN.of_plan(plan(paths=()))
    assert RUN.of_plan(plan(120, paths=())) == ""
    assert RUN.of_plan(plan(paths=(), outer=1)) == "", "an outer round has none either"
    assert "works on" in RUN.of_plan(plan(120))
    assert "tokens" in RUN.of_plan(plan(tokens=2**53))
    assert "epoch 121" in RUN.of_plan(plan(121, paths=()))


def test_a_round_counts_no_more_than_one_epoch() -> None:
    closed = ev.RoundArrived(E, 7, 9, "hash", 0, (), {}, (), (), 6.0, tokens=128)
    assert RUN.of_round(closed) == ""
    assert "tokens" in RUN.of_round(dataclasses.replace(closed, tokens=129))


def test_a_term_grows_by_what_plans_can_explain() -> None:
    terms = Terms()
    assert terms.most(0.0) == MOST_TERM, "a newcomer has seen nothing to compare with"
    terms.saw(500, 100.0)
    assert terms.most(100.0) == 500 + STEP
    assert terms.most(110.0) == 500 + int(STEP * (1 + 10 * PLANS_PER_S))
    assert terms.most(90.0) == 500 + STEP, "a clock that was set back"
    assert terms.most(1e12) == MOST_TERM
    assert terms.most(100.0) < 2**62


def test_a_misled_leader_stays_within_what_members_accept() -> None:
    leads, follows = Terms(1), Terms(1)
    leads.saw(1, 0.0)
    follows.saw(1, 0.0)
    term = 1
    # a member that misses every plan, while others say the most that is believed of them
    for i in range(1, 200):
        now = i / PLANS_PER_S
        term = leads.most(now, STEP_HEARD) + 1
        assert term <= follows.most(now)
        leads.saw(term, now)
