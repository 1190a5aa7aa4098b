"""Adaptive timeouts: the floor, the measured durations, and the lateness of this process itself."""

import math

from node.core.patience import (
    DEVIATIONS,
    GAP_S,
    HALF_LIFE_S,
    KNOWN,
    MOST_LATE_S,
    MOST_S,
    SPARE,
    Patience,
    Took,
)


def test_without_a_measurement_the_floor_is_waited() -> None:
    assert Patience().within("word", 1.5, 10.0) == 1.5


def test_slow_answers_widen_the_wait_quick_ones_keep_the_floor() -> None:
    patience = Patience()
    for _ in range(50):
        patience.took("slow", 3.0)
        patience.took("quick", 0.01)
    assert 3.0 * SPARE <= patience.within("slow", 1.5, 0.0) < 3.5 * SPARE
    assert patience.within("quick", 1.5, 0.0) == 1.5
    assert patience.within("another", 1.5, 0.0) == 1.5, "one kind says nothing of another"


def test_unsteady_answers_widen_the_wait_beyond_their_mean() -> None:
    steady = Took()
    unsteady = Took()
    for i in range(200):
        steady.add(2.0)
        unsteady.add(4.0 * (i % 2))
    assert steady.expected < 2.1
    assert unsteady.expected > 2.0 + DEVIATIONS


def test_no_measurement_makes_a_wait_endless() -> None:
    patience = Patience()
    patience.took("word", 1e9)
    for seconds in (math.nan, math.inf, -1.0):
        patience.took("word", seconds)
    assert patience.within("word", 1.0, 0.0) == MOST_S


def test_a_process_that_runs_late_again_and_again_waits_longer_for_a_while() -> None:
    patience = Patience()
    patience.woke(10.0, 14.0)
    patience.woke(15.0, 18.0)
    assert (patience.slack(18.0), patience.within("word", 1.5, 18.0)) == (3.0, 4.5)
    patience.woke(19.0, 19.0)
    assert patience.slack(18.0 + HALF_LIFE_S) == 1.5, "one timer in time does not undo it"
    assert patience.slack(18.0 + 20 * HALF_LIFE_S) < 0.001
    patience.woke(100.0, 1e6)
    patience.woke(1e6, 2e6)
    assert patience.slack(2e6) <= MOST_LATE_S, "a machine that slept is no busy one"


def test_a_process_that_stood_still_once_is_not_a_busy_one() -> None:
    patience = Patience()
    patience.woke(10.0, 10.0)
    patience.woke(10.25, 40.0)
    patience.woke(11.0, 40.0)
    assert patience.slack(40.0) == 0.0, "timers that were late together are one delay"


def test_answers_are_measured_while_the_process_runs() -> None:
    patience = Patience()
    patience.woke(10.0, 10.0)
    asked = patience.running(10.1)
    assert patience.running(40.0) - asked < GAP_S + 0.1, "before its timers have told"
    patience.woke(10.25, 40.0)
    assert round(patience.running(40.3) - asked, 3) == 0.45


def test_only_so_many_kinds_are_remembered_and_the_newest() -> None:
    patience = Patience()
    patience.took("first", 5.0)
    for i in range(KNOWN):
        patience.took(i, 5.0)
    assert patience.within("first", 1.0, 0.0) == 1.0
    assert patience.within(KNOWN - 1, 1.0, 0.0) > 5.0
