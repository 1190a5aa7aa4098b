"""The share of a device's time that texts may take from training."""

import math

import pytest

from node.pipeline.settings import PipelineSettings
from node.pipeline.text_budget import LONGEST_S, TRAINS_S, TextBudget


@pytest.mark.parametrize(
    ("share", "daemons", "took"),
    [(0.1, 1, 0.01), (0.2, 1, 0.01), (0.2, 4, 0.01), (0.5, 2, 0.01), (0.2, 1, 2.0), (0.2, 4, 0.5)],
)
def test_jobs_of_texts_take_their_share_of_the_time(
    share: float, daemons: int, took: float
) -> None:
    budget = TextBudget(share)
    now = 0.0
    worked = 0.0
    while now < 10_000 * took:
        budget.train(now)
        now += budget.wait_s(now)
        assert budget.wait_s(now) == pytest.approx(0.0, abs=1e-9)
        budget.spend(now, took, now + took, daemons)
        now += took
        worked += took
    assert worked / now == pytest.approx(share / daemons, rel=0.01)


def test_nothing_waits_while_the_device_does_not_train() -> None:
    budget = TextBudget(0.1)
    budget.spend(0.0, 0.05, 0.05)
    assert not budget.wait_s(0.05)
    budget.train(0.1)
    assert budget.wait_s(0.1) == pytest.approx(0.4)
    budget.spend(TRAINS_S + 0.05, 0.05, TRAINS_S + 0.1)
    assert budget.wait_s(TRAINS_S + 0.1)
    assert not budget.wait_s(TRAINS_S + 0.11)


def test_texts_wait_in_a_job_of_training_however_long_it_takes() -> None:
    budget = TextBudget(0.1)
    budget.train(math.inf)
    budget.spend(1000.0, 0.05, 1000.05)
    assert budget.wait_s(1000.05) == pytest.approx(0.45)


def test_a_long_job_makes_the_next_one_wait_no_longer_than_a_hop_has_time() -> None:
    budget = TextBudget(0.01)
    budget.train(10.0)
    budget.spend(10.0, 5.0, 15.0)
    budget.train(15.0)
    assert budget.wait_s(15.0) == LONGEST_S
    assert LONGEST_S < PipelineSettings().forward_timeout_s / 2


def test_with_the_whole_share_nothing_waits() -> None:
    budget = TextBudget(1.0)
    budget.train(1.0)
    budget.spend(1.0, 5.0, 6.0, 9)
    assert not budget.wait_s(6.0)
