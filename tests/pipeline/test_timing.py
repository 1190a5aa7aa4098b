"""Costs of work and of paths, measured in passing."""

import math

import pytest

from node.core.ids import PeerId
from node.pipeline.timing import COMPARABLE, STALE_S, SURE, WILD, RunningAverage, Timing

A, B, C = (PeerId(x) for x in "abc")


def test_an_average_has_a_deviation_and_takes_no_nonsense() -> None:
    a = RunningAverage()
    for x in (1.0, 3.0):
        a.add(x, 0.0)
    assert (a.mean, a.steady(1.0)) == (2.0, 3.0)
    for x in (0.0, -1.0, math.nan, math.inf):
        a.add(x, 0.0)
    assert (a.count, RunningAverage().steady(1.0)) == (2, 0.0)


def test_a_pause_of_the_machine_counts_as_no_more_than_wild() -> None:
    a = RunningAverage()
    for _ in range(SURE + 20):
        a.add(1.0, 0.0)
    a.add(1e6, 0.0)
    assert a.mean <= 1.0 + 0.1 * WILD


def test_ways_are_those_measured_lately_and_probes_go_round() -> None:
    t = Timing()
    t.sent(A, 0.5, 100.0)
    t.probed(B, 0.1, 100.0)
    assert t.ways(100.0) == {A: (0.5, 0.0), B: (0.0, 0.1)}
    for n, due in enumerate(([A, B], [B], [A], [B], [A])):
        assert t.due((A, B), 101.0 + n, 60.0, 5.0) == due, "a new way is measured three times"
        t.probed(due[0], 0.1, 101.0 + n)
    assert t.due((A, B), 110.0, 60.0, 5.0) == []
    assert t.due((A, B), 170.0, 60.0, 5.0) == [B]
    assert t.ways(104.0 + STALE_S) == {A: (0.0, 0.1)}
    t.keep((B,))
    assert t.ways(110.0) == {B: (0.0, 0.1)}


def test_a_link_that_was_silent_for_long_is_measured_anew() -> None:
    t = Timing()
    for _ in range(SURE):
        t.probed(A, 0.1, 0.0)
        t.sent(A, 10.0, 0.0)
    late = STALE_S + 1.0
    t.probed(A, 0.2, late)
    t.sent(A, 1.0, late)
    assert t.ways(late) == {A: (1.0, 0.2)}


def test_the_shortest_of_the_first_probes_counts() -> None:
    t = Timing()
    for seconds in (1.0, 0.1, 0.3):
        t.probed(A, seconds, 0.0)
    assert t.ways(0.0) == {A: (0.0, 0.1)}
    t.probed(A, 0.3, 0.0)
    assert 0.1 < t.ways(0.0)[A][1] < 0.3


def test_a_tensor_of_unknown_time_proves_a_way() -> None:
    t = Timing()
    t.probed(A, 0.1, 0.0)
    t.unanswered(A, 10.0)
    t.sent(A, None, 13.0)
    t.unanswered(A, 14.0)
    assert t.ways(14.0) == {A: (0.0, 0.1)}


def test_a_way_is_lost_after_two_failed_probes() -> None:
    t = Timing()
    t.probed(A, 0.1, 0.0)
    t.unanswered(A, 10.0)
    assert (t.ways(10.0), t.silent()) == ({A: (0.0, 0.1)}, set())
    assert t.due((A,), 12.0, 60.0, 5.0) == []
    assert t.due((A,), 16.0, 60.0, 5.0) == [A], "one failure is tried again soon"
    t.unanswered(A, 16.0)
    assert (t.ways(16.0), t.silent()) == ({}, {A})
    t.probed(A, 0.1, 22.0)
    assert (t.ways(22.0), t.silent()) == ({A: (0.0, 0.1)}, set())


def test_frames_that_overlap_are_not_charged_twice() -> None:
    t = Timing()
    for i in range(40):  # four under way at a time, one done every 0.1 s
        t.observe(A, i * 0.1, i * 0.1 + 0.4)
    assert t.rates()[A] == pytest.approx(0.5 / 0.1, rel=0.05)
    t.observe(A, 1.0, 1.5)  # over long ago
    assert t.rates()[A] == pytest.approx(0.5 / 0.1, rel=0.05)


def test_a_slow_sibling_is_detected_when_sure_and_forgiven() -> None:
    t = Timing()
    for i in range(COMPARABLE):
        assert t.slow([A, B, C]) == frozenset()
        t.observe(A, float(i), i + 0.1)
        t.observe(B, float(i), i + 0.9)
    assert t.slow([A, B, C]) == {B}
    assert t.slow([B, C]) == frozenset()
    for i in range(10, 40):
        t.observe(B, float(i), i + 0.1)
    assert t.slow([A, B]) == frozenset()
    t.keep((B,))
    assert set(t.rates()) == {B}, "heartbeats have room for few, and not for those long gone"


def test_one_pause_makes_no_replica_slow() -> None:
    t = Timing()
    for i in range(20):
        t.observe(A, float(i), i + 0.1)
        t.observe(B, float(i), i + 0.1)
    t.observe(B, 20.0, 80.0)
    assert t.slow([A, B]) == frozenset()
