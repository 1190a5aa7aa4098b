"""A moment of the past as others see it."""

from benchmarks.lab.virtual_clock import VirtualClock
from node.core.clock import Since


def test_a_moment_stays_the_same_number_until_the_clock_is_set() -> None:
    clock = VirtualClock(start=0.1, skew=1_795_363_055.4658184)
    since = Since(clock)
    began = since.wall()
    for _ in range(1000):
        clock.advance(0.37)
        clock.skew += 1e-6  # drift
        assert since.wall() == began
    clock.skew += 3600.0
    assert abs(since.wall() - began - 3600.0) < 1.0
