"""Timing the ways of multiplying: everything the rule asks for is run, the shortest time counts,
and it can be stopped."""

import threading
from itertools import count

import torch

from node.optim import trials
from node.optim.kernel_rule import (
    CPU,
    CUDA,
    LAYER_TOKENS,
    NEVER_S,
    KernelTrial,
    TrialMenu,
    following,
    rule_from,
)

SMALL = TrialMenu(CPU, {16: 3, 32: 2}, ((32, 32), (40, 64)), layers=(64,))
"""The same trials, with matrices that take no time."""
SMALL_CARD = TrialMenu(CUDA, {16: 3, 32: 2}, ((32, 32),), grams=(16, 32))
"""Trials of a GPU, which a processor can do as well."""


def measured(stop, clock, menu=SMALL):
    return trials.measure(stop, clock=clock, menu=menu)


def ticking():
    """A clock that moves by a second every time it is read."""
    return map(float, count()).__next__


def test_all_that_is_asked_for_is_timed():
    times = measured(threading.Event(), ticking())
    assert (following(times, SMALL), {seconds for seconds in times.values()}) == ([], {1.0})
    assert KernelTrial(40, 64, 1, "fp32", "panels") in times
    assert KernelTrial(64, LAYER_TOKENS, 1, "bf16", "layer") in times


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
    times = measured(threading.Event(), clock)
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

    times = measured(stop, stopping)
    assert reads == 56
    assert following(times, SMALL) != []
    assert {trial.rows == trial.cols and trial.many > 1 for trial in times} == {True}, (
        "the squares, and no half of a pair"
    )
    assert (len(times), measured(stop, stopping)) == (8, {})


def test_the_number_of_threads_is_as_before(two_threads):
    seen = []

    def clock():
        seen.append(torch.get_num_threads())
        return float(len(seen))

    measured(threading.Event(), clock)
    assert (set(seen), torch.get_num_threads()) == ({1}, 2)


def test_the_trials_of_a_gpu_are_timed_to_the_end_of_its_work(monkeypatch):
    """In both forms of the whole iteration; the device is waited for in every turn."""
    waits = []
    card = trials.Device(torch.device("cpu"))
    monkeypatch.setattr(trials.Device, "synchronise", lambda self: waits.append(self))
    times = trials.measure(threading.Event(), card, ticking(), SMALL_CARD)
    assert following(times, SMALL_CARD) == []
    assert {trial.form for trial in times} >= {"standard", "gram", "panels"}
    assert len(waits) >= len(times) * trials.LEAST_ROUNDS


def test_a_format_that_a_device_refuses_is_never_taken(monkeypatch):
    act = trials._act

    def refusing(trial, device):
        def refuse():
            raise RuntimeError("not implemented for BFloat16")

        return refuse if trial.precision == "bf16" else act(trial, device)

    monkeypatch.setattr(trials, "_act", refusing)
    times = measured(threading.Event(), ticking())
    assert following(times, SMALL) == []
    assert {s for trial, s in times.items() if trial.precision == "bf16"} == {NEVER_S}
    assert rule_from(times, SMALL).bf16_from == 0


def test_memory_that_runs_out_ends_the_trials_with_what_was_measured(monkeypatch):
    act = trials._act

    def full(trial, device):
        if trial.rows == 32:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return act(trial, device)

    monkeypatch.setattr(trials, "_act", full)
    times = measured(threading.Event(), ticking())
    assert {trial.rows for trial in times} == {16}
