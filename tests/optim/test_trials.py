"""Timing the ways of multiplying: everything the rule asks for is run, the shortest time counts,
and it can be stopped."""

import threading
from itertools import count

import pytest
import torch

from node.optim import kernel_rule, trials
from node.optim.kernel_rule import KernelTrial, following


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """The same trials, with matrices that take no time."""
    monkeypatch.setattr(kernel_rule, "SQUARES", {16: 3, 32: 2})
    monkeypatch.setattr(kernel_rule, "OPERANDS", ((32, 32), (40, 64)))
    monkeypatch.setattr(kernel_rule, "LAYERS", (64,))


def ticking():
    """A clock that moves by a second every time it is read."""
    return map(float, count()).__next__


def test_all_that_is_asked_for_is_timed():
    times = trials.measure(threading.Event(), ticking())
    assert (following(times), {seconds for seconds in times.values()}) == ([], {1.0})
    assert KernelTrial(40, 64, 1, "fp32", "panels") in times
    assert KernelTrial(64, kernel_rule.LAYER_TOKENS, 1, "bf16", "layer") in times


def test_the_shortest_time_counts_and_the_first_does_not(monkeypatch):
    # Four trials of the first group take turns: the first round takes no time, the next ones 9, 5
    # and 7 seconds each.
    took = iter([0.0] * 4 + [9.0] * 4 + [5.0] * 4 + [7.0] * 4)
    now = 0.0
    reads = 0

    def clock():
        nonlocal now, reads
        reads += 1
        if reads % 2 == 0:
            now += next(took, 1.0)
        return now

    monkeypatch.setattr(trials, "LEAST_ROUNDS", 3)
    times = trials.measure(threading.Event(), clock)
    assert {seconds for trial, seconds in times.items() if trial.rows == 16} == {5.0}
    assert {seconds for trial, seconds in times.items() if trial.rows != 16} == {1.0}


def test_measuring_stops_between_trials_without_half_groups():
    stop = threading.Event()
    clock = ticking()
    reads = 0

    def stopping():
        nonlocal reads
        reads += 1
        if reads == 55:
            stop.set()
        return clock()

    times = trials.measure(stop, stopping)
    assert reads == 56
    assert following(times) != []
    assert {trial.rows == trial.cols and trial.many > 1 for trial in times} == {True}, (
        "the squares, and no half of a pair"
    )
    assert (len(times), trials.measure(stop, stopping)) == (8, {})


def test_the_number_of_threads_is_as_before(two_threads):
    seen = []

    def clock():
        seen.append(torch.get_num_threads())
        return float(len(seen))

    trials.measure(threading.Event(), clock)
    assert (set(seen), torch.get_num_threads()) == ({1}, 2)
