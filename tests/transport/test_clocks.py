"""Offset of this clock from the clocks of the peers that answered."""

import math

import pytest

from node.core.ids import PeerId
from node.transport.clocks import FRESH_S, SLOW_S, ClockOffset, PeerClocks
from testbed.fakes.clock import VirtualClock

A, B, C = (PeerId(name) for name in "ABC")
NOW = 1_800_000_000.0


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock(50.0)


@pytest.fixture
def clocks(clock: VirtualClock) -> PeerClocks:
    return PeerClocks(clock.now)


def test_the_middle_of_a_round_trip_is_compared(clocks: PeerClocks):
    clocks.told(A, NOW + 1.0, asked=NOW + 3600.0, took_s=2.0)
    assert clocks.offset() == ClockOffset(3600.0, (A,))
    assert clocks.of(A) == 3600.0
    assert clocks.of(B) is None


def test_most_clocks_outvote_one(clocks: PeerClocks):
    for peer, theirs in ((A, NOW), (B, NOW - 3600.0), (C, NOW + 0.5)):
        clocks.told(peer, theirs, asked=NOW, took_s=0.0)
    assert clocks.offset() == ClockOffset(0.0, (A, B, C))


def test_old_comparisons_count_no_more(clocks: PeerClocks, clock: VirtualClock):
    clocks.told(A, NOW, asked=NOW, took_s=0.0)
    assert clocks.knows(A, 60.0)
    clock.advance(61.0)
    assert not clocks.knows(A, 60.0)
    assert clocks.offset() is not None
    clock.advance(FRESH_S)
    assert clocks.offset() is None


def test_a_clock_that_was_set_is_compared_anew(clocks: PeerClocks):
    clocks.told(A, NOW, asked=NOW + 3600.0, took_s=0.0)
    clocks.forget()
    assert clocks.offset() is None


@pytest.mark.parametrize("theirs", [0.0, -5.0, math.nan, math.inf, 2.0**41])
def test_what_is_no_time_is_ignored(clocks: PeerClocks, theirs: float):
    clocks.told(A, theirs, asked=NOW, took_s=0.0)
    assert clocks.offset() is None


def test_a_slow_answer_is_ignored(clocks: PeerClocks):
    clocks.told(A, NOW, asked=NOW, took_s=SLOW_S + 0.1)
    assert clocks.offset() is None
