"""Moments as others see them, and the news that the clocks of a machine tell."""

import pytest

from node.core.clock import CLOCK_S, ClockNews, ClockReading, ClockWatch, Since
from node.dht.settings import DirectorySettings
from testbed.fakes.clock import VirtualClock

BEFORE = ClockReading(100.0, 500.0, 1_800_000_000.0)


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


@pytest.mark.parametrize(
    ("running", "always", "wall", "news"),
    [
        (1.0, 1.0, 1.0, None),
        (4.0, 4.0, 4.0, None),  # a busy machine
        (1.0, 1.0, 1.2, None),  # a time server at work
        (181.0, 181.0, 181.0, ClockNews(stopped_s=180.0)),
        (1.5, 181.0, 181.0, ClockNews(stopped_s=180.0, slept=True)),
        (1.0, 1.0, 3601.0, ClockNews(set_s=3600.0)),
        (1.0, 1.0, -3599.0, ClockNews(set_s=-3600.0)),
        (21.0, 21.0, 3621.0, ClockNews(stopped_s=20.0, set_s=3600.0)),
    ],
)
def test_stops_sleep_and_a_clock_that_is_set_are_told_apart(
    running: float, always: float, wall: float, news: ClockNews | None
) -> None:
    watch = ClockWatch(BEFORE, every_s=1.0)
    now = ClockReading(BEFORE.running + running, BEFORE.always + always, BEFORE.wall + wall)
    assert watch.read(now) == news
    later = ClockReading(now.running + 1.0, now.always + 1.0, now.wall + 1.0)
    assert watch.read(later) is None, "news once"


def test_the_clocks_of_this_machine_can_be_read() -> None:
    first = ClockReading.now()
    second = ClockReading.now()
    assert first.running <= second.running
    assert first.always <= second.always


def test_clocks_that_differ_by_less_leave_every_record_valid() -> None:
    settings = DirectorySettings()
    assert settings.ttl_s - settings.refresh_s >= CLOCK_S
