"""When the model is asked to go on with the prompt."""

import pytest

from node.inference.sampling import Reached, SampleClock, SampleEnded, SamplingPace, TakeSample

PACE = SamplingPace()


def test_the_first_sample_is_at_once_and_the_next_some_epochs_later():
    clock = SampleClock()
    assert clock.handle(Reached(7), 0.0) == [TakeSample(7)]
    assert clock.handle(Reached(50), 1.0) == [], "one at a time"
    clock.handle(SampleEnded(0.1, True), 2.0)
    assert clock.handle(Reached(7 + PACE.every - 1), 1000.0) == []
    assert clock.handle(Reached(7 + PACE.every), 1000.0) == [TakeSample(7 + PACE.every)]


@pytest.mark.parametrize(("took", "pause"), [(0.1, PACE.least_s), (10.0, 10.0 / PACE.share)])
def test_samples_take_a_small_share_of_the_time(took, pause):
    clock = SampleClock()
    clock.handle(Reached(1), 0.0)
    clock.handle(SampleEnded(took, True), took)
    assert clock.handle(Reached(99), took + pause - 0.1) == []
    assert clock.handle(Reached(99), took + pause) == [TakeSample(99)]


def test_nobody_looks_and_nothing_is_taken():
    assert SampleClock().handle(Reached(7, watched=False), 0.0) == []


def test_the_last_epoch_has_a_sample_once():
    clock = SampleClock(newest=99)
    assert clock.handle(Reached(100, last=True), 0.0) == [TakeSample(100)]
    clock.handle(SampleEnded(0.1, True), 0.1)
    assert clock.handle(Reached(100, last=True), 1000.0) == []


def wait_after(clock: SampleClock, epoch: int, now: float) -> float:
    """Seconds from a failure of the sample under way until the next one is taken."""
    clock.handle(SampleEnded(0.0, False), now)
    for waited in range(0, 2000, 10):
        if clock.handle(Reached(epoch), now + waited):
            return waited
    raise AssertionError("no sample is taken any more")


def test_failures_wait_longer_each_time():
    clock = SampleClock()
    assert clock.handle(Reached(3), 0.0)
    waits = [wait_after(clock, 3, 1e6 * turn) for turn in range(1, 7)]
    assert waits == [60, 120, 240, 480, 900, 900]
    clock.handle(SampleEnded(0.0, True), 9e6)
    assert clock.handle(Reached(3 + PACE.every), 9e6 + PACE.least_s)
    assert wait_after(clock, 3 + PACE.every, 10e6) == 60


def test_a_run_that_went_back_is_sampled_anew():
    clock = SampleClock(newest=80)
    assert clock.handle(Reached(60), 0.0) == [TakeSample(60)]


def test_a_short_run_has_its_own_pace():
    clock = SampleClock(pace=SamplingPace(every=10, least_s=5.0, share=0.5))
    clock.handle(Reached(0), 0.0)
    clock.handle(SampleEnded(1.0, True), 1.0)
    assert clock.handle(Reached(9), 100.0) == []
    assert clock.handle(Reached(10), 5.9) == []
    assert clock.handle(Reached(10), 6.0) == [TakeSample(10)]
