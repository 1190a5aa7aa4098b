"""Claims that no honest peer makes: epochs and tokens beyond the run's, terms that no number of
plans explains, an end before the end."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from node.consensus.terms import MOST_TERM, PLANS_PER_S, STEP, STEP_HEARD, Terms
from node.core.ids import PeerId
from node.core.journey import MOST_PATHS, Hop, Path, Plan, PlanMember, Version
from node.core.samples import SampleClass
from node.epoch import events as ev
from node.epoch.bounds import MOST_SAMPLES, Bounds

E = PeerId("ends")
S = PeerId("stage")
RUN = Bounds(epochs=120, tokens=128, stages=2, micro_batches=4)
PATH = Path(0, E, (0, 1), (Hop(1, S),))


def plan(epoch: int = 7, **about: object) -> Plan:
    members = PlanMember(E, 0), PlanMember(S, 1)
    given: dict[str, Any] = {"paths": (PATH,), "owners": {"w": S}, "lineage": "ab" * 16}
    return Plan(epoch, 9, E, members, **given | about)


GOOD = ev.Heartbeat(
    S, 1, Version(7, "ab" * 16), "d", tokens=7 * 128, reachable=(Version(120, "cd" * 16),)
)
CLOSED = ev.RoundArrived(E, 7, 9, "hash", 0, (), {}, (), (), 6.0, tally=ev.EpochTally(128))


@pytest.mark.parametrize(
    ("bound", "why"),
    [
        (lambda: RUN.of_history(7, 7 * 128), ""),
        (lambda: RUN.of_history(7, 7 * 128 + 1), "tokens"),
        (lambda: RUN.of_history(0, 1), "tokens"),
        (lambda: RUN.of_history(121, 0), "epoch 121"),
        (lambda: Bounds(120, 0).of_history(7, 2**53), ""),  # the length of a sample is not known
        (lambda: RUN.of_heard(GOOD), ""),
        (lambda: RUN.of_heard(dataclasses.replace(GOOD, tokens=2**53)), "tokens"),
        (lambda: RUN.of_heard(dataclasses.replace(GOOD, at=Version(2**40, "ab" * 16))), "epoch"),
        (
            lambda: RUN.of_heard(dataclasses.replace(GOOD, reachable=(Version(121, "cd" * 16),))),
            "epoch",
        ),
        (lambda: RUN.of_heard(dataclasses.replace(GOOD, stage=2)), ""),
        (lambda: RUN.of_heard(dataclasses.replace(GOOD, stage=3)), "stage 3 of 2"),
        (lambda: RUN.of_plan(plan()), ""),
        (lambda: RUN.of_plan(plan(paths=())), "ends the run at epoch 7"),
        (lambda: RUN.of_plan(plan(120, paths=())), ""),
        (
            lambda: RUN.of_plan(plan(paths=(), outer=1)),
            "",
        ),  # an outer round has no micro-batches either
        (lambda: RUN.of_plan(plan(120)), "works on"),
        (lambda: RUN.of_plan(plan(tokens=2**53)), "tokens"),
        (lambda: RUN.of_plan(plan(121, paths=())), "epoch 121"),
        (lambda: RUN.of_plan(plan(cursor=(SampleClass(0, 0, MOST_SAMPLES + 1),))), "sample order"),
        (lambda: RUN.of_round(CLOSED), ""),
        (lambda: RUN.of_round(dataclasses.replace(CLOSED, tally=ev.EpochTally(129))), "tokens"),
        (lambda: RUN.of_round(dataclasses.replace(CLOSED, dropped=(0, 1, 2, 3))), ""),
        (lambda: RUN.of_round(dataclasses.replace(CLOSED, dropped=(0, 1, 2, 3, 4))), "5 dropped"),
        (lambda: RUN.of_results(4), ""),
        (lambda: RUN.of_results(5), "5 results"),
        (lambda: Bounds(120, 0).of_results(MOST_PATHS), ""),  # the epoch's size is not known
    ],
)
def test_numbers_go_as_far_as_the_run_can_have_come(bound: Callable[[], str], why: str) -> None:
    said = bound()
    assert why in said
    assert bool(said) is bool(why)


def test_a_written_count_of_tokens_is_believed_up_to_the_bound() -> None:
    assert (RUN.counted(7, 2**53), RUN.counted(7, 5)) == (7 * 128, 5)


def test_a_term_grows_by_what_plans_can_explain() -> None:
    terms = Terms()
    assert terms.most(0.0) == MOST_TERM, "a newcomer has seen nothing to compare with"
    terms.saw(500, 100.0)
    assert terms.most(100.0) == 500 + STEP
    assert terms.most(110.0) == 500 + int(STEP * (1 + 10 * PLANS_PER_S))
    assert terms.most(90.0) == 500 + STEP, "a clock that was set back"
    assert terms.most(1e12) == MOST_TERM
    assert terms.most(100.0) < 2**62


def test_a_term_never_falls_and_grows_with_time_only_after_a_plan() -> None:
    terms = Terms(500)
    assert terms.most(1e12) == 500 + STEP, "no plan was in force here"
    terms.saw(400, 100.0)
    assert terms.term == 500
    assert terms.most(101.0) == 500 + int(STEP * (1 + PLANS_PER_S))


def test_a_misled_leader_stays_within_what_members_accept() -> None:
    leads = Terms(1)
    follows = Terms(1)
    leads.saw(1, 0.0)
    follows.saw(1, 0.0)
    term = 1
    # a member that misses every plan, while others say the most that is believed of them
    for i in range(1, 200):
        now = i / PLANS_PER_S
        term = leads.most(now, STEP_HEARD) + 1
        assert term <= follows.most(now)
        leads.saw(term, now)
