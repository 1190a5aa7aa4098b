"""The schedule of checkpoints: a crash costs at most what the settings allow, and peers that never
speak of it have a version in common."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.checkpoint.schedule import FIRST_WRITE_S, CheckpointSchedule, current, kept
from node.checkpoint.settings import CheckpointSettings

WITHIN_S = 300.0
TICK_S = 1.0


class Disk:
    """A peer's disk and schedule, driven as the stage drives them: versions are settled, ticks
    pass, a writing takes ``write_s``."""

    def __init__(self, write_s: float, keep: int = 3) -> None:
        self.schedule = CheckpointSchedule(CheckpointSettings(WITHIN_S))
        self.write_s = write_s
        self.keep = keep
        self.newest = (0, 0.0)
        self.there: dict[int, float] = {}
        """Epoch on disk to the time at which its version was settled."""
        self.writing: tuple[float, int, float] | None = None
        self.seconds = 0.0

    def settle(self, epoch: int, now: float) -> None:
        self.finish(now)
        self.newest = (epoch, now)
        if self.schedule.settled(epoch, now):
            self.begin(now)

    def tick(self, now: float) -> None:
        self.finish(now)
        if self.schedule.overdue(now):
            self.begin(now)

    def begin(self, now: float) -> None:
        if self.writing is None:
            self.writing = (now + self.write_s, *self.newest)
            self.seconds += self.write_s

    def finish(self, now: float) -> None:
        if self.writing is None or now < self.writing[0]:
            return
        _, epoch, settled_at = self.writing
        self.schedule.written(settled_at, self.write_s)
        self.there[epoch] = settled_at
        stay = kept(self.there, {epoch}, keep=self.keep, stride=self.schedule.stride)
        self.there = {e: at for e, at in self.there.items() if e in stay}
        self.writing = None

    def lost(self) -> float:
        """Seconds of committed work that a crash would cost."""
        return self.newest[1] - max(self.there.values(), default=0.0)


def lived(disk: Disk, epochs: list[float]) -> Iterator[float]:
    """Let epochs of these durations in seconds pass; yields the time at every moment."""
    now = 0.0
    epoch = 0
    disk.settle(0, now)
    for seconds in epochs:
        end = now + seconds
        while now + TICK_S < end:
            now += TICK_S
            disk.tick(now)
            yield now
        now = end
        epoch += 1
        disk.settle(epoch, now)
        yield now


@given(
    st.lists(st.floats(0.05, 400.0), min_size=1, max_size=60),
    st.sampled_from([0.0, 1.0, 5.0, 30.0]),
)
@settings(max_examples=150, deadline=None)
def test_a_crash_costs_what_is_allowed_or_one_epoch(epochs: list[float], write_s: float) -> None:
    disk = Disk(write_s)
    # A version is written, at the earliest, when an epoch has made it.
    allowed = max(WITHIN_S, max(epochs) + write_s) + 2 * TICK_S + max(0.0, write_s - FIRST_WRITE_S)
    for _ in lived(disk, epochs):
        assert disk.lost() <= allowed


@pytest.mark.parametrize("epoch_s", [0.1, 1.0, 20.0, 60.0, 140.0, 250.0, 900.0])
def test_writing_takes_little_of_steady_epochs(epoch_s: float) -> None:
    disk = Disk(5.0)
    *_, seconds = lived(disk, [epoch_s] * max(8, round(3000 / epoch_s)))
    assert disk.seconds / seconds <= 0.06
    assert len(disk.there) <= 3


@pytest.mark.parametrize("seed", range(20))
def test_peers_that_write_at_different_speeds_have_a_version_in_common(seed: int) -> None:
    dice = random.Random(seed)
    usual = 10 ** dice.uniform(-0.5, 2.0)
    lengths = [usual * dice.uniform(0.8, 1.25) for _ in range(min(3000, round(4000 / usual)))]
    disks = [Disk(dice.choice([0.1, 2.0, 10.0, 40.0])) for _ in range(4)]
    lives = [lived(disk, lengths) for disk in disks]
    for now in lives[0]:
        for life in lives[1:]:
            assert next(life) == now
        common = set.intersection(*(set(d.there) for d in disks))
        # A disk that takes many epochs for one checkpoint has its second one late.
        slowest = max(d.write_s for d in disks)
        first = lengths[0] + slowest if slowest <= 4 * usual else WITHIN_S + slowest
        if now <= first:
            continue
        assert common, f"nothing in common at {now:.0f} s: {[d.there for d in disks]}"
        newest = max(disks[0].there[e] for e in common)
        assert disks[0].newest[1] - newest <= WITHIN_S + max(d.write_s for d in disks)


def test_checkpoints_by_number_are_written_besides() -> None:
    schedule = CheckpointSchedule(CheckpointSettings(0.0, 4))
    assert [e for e in range(9) if schedule.settled(e, 100.0 * e)] == [0, 4, 8]
    assert not schedule.overdue(1e6), "none by time"


def test_a_version_is_written_in_the_middle_of_a_long_epoch_once() -> None:
    schedule = CheckpointSchedule(CheckpointSettings(WITHIN_S))
    due = [epoch for epoch in range(1, 8) if schedule.settled(epoch, 10.0 * epoch)]
    assert due == [1, 2, 4], "a young run writes powers of two"
    assert not schedule.overdue(200.0)
    assert schedule.overdue(306.0)
    schedule.written(schedule.newest, 5.0)
    assert not schedule.overdue(1000.0), "the version in place is on disk"


@pytest.mark.parametrize(
    ("epochs", "protected", "keep", "stride", "stays"),
    [
        (range(1, 10), {9}, 3, 4, {9, 8, 4}),
        (range(1, 10), {9}, 3, 1, {9, 8, 7}),
        ([3, 5], {5}, 3, 8, {3, 5}),
        (range(1, 6), {4, 5}, 1, 2, {4, 5}),
        ([2, 9], {2}, 1, 1, {2}),
    ],
)
def test_multiples_of_the_stride_stay_before_others(
    epochs: range, protected: set[int], keep: int, stride: int, stays: set[int]
) -> None:
    assert kept(epochs, protected, keep=keep, stride=stride) == stays


def test_epochs_that_the_run_gave_up_go_first() -> None:
    went_back = [88, 96, 98, 100, 92, 94]
    assert current(went_back) == [94, 92, 88]
    assert current([96, 98, 100, 98]) == [98, 96], "to an epoch that it had written before"
    assert kept(went_back, {94}, keep=3, stride=2) == {94, 92, 88}
    assert kept(went_back, {94}, keep=4, stride=8) == {94, 92, 88, 96}
