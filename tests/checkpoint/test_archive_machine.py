"""The machine that decides what is copied to an archive, in virtual time."""

import pytest

from node.checkpoint.archive.machine import (
    RETRY_MOST_S,
    RETRY_S,
    ArchiveSchedule,
    AttemptFailed,
    Copied,
    Copy,
    Every,
    OnDisk,
)
from node.core.errors import UsageFault
from node.core.journey import Version

OLD = "aa" * 16
NEW = "bb" * 16
"""Lineages of the history that a run gave up, and of the one in which it goes on."""


def version(epoch: int, line: str = OLD) -> Version:
    return Version(epoch, line)


def on_disk(*epochs: int, stride: int = 1) -> OnDisk:
    return OnDisk([version(epoch) for epoch in epochs], stride=stride)


def copied_at(epoch: int, line: str = OLD) -> Copied:
    return Copied(version(epoch, line))


@pytest.mark.parametrize(
    ("text", "every"),
    [
        ("1h", Every(seconds=3600.0)),
        ("90m", Every(seconds=5400.0)),
        ("20", Every(epochs=20)),
        ("20 epochs", Every(epochs=20)),
        ("1 epoch", Every(epochs=1)),
    ],
)
def test_an_interval_is_time_or_epochs(text: str, every: Every) -> None:
    assert Every.parse(text) == every


@pytest.mark.parametrize("text", ["", "0", "0 epochs", "soon", "1 fortnight", "-1", "40d"])
def test_no_interval_is_refused(text: str) -> None:
    with pytest.raises(UsageFault, match="no interval"):
        Every.parse(text)


def test_the_first_checkpoint_behind_each_line_is_copied() -> None:
    schedule = ArchiveSchedule(Every(epochs=10))
    assert schedule.handle(on_disk(), 0.0) == []
    assert schedule.handle(on_disk(24, 27), 1.0) == [Copy(24)]
    assert schedule.handle(on_disk(24, 27, 31), 2.0) == [], "one at a time"
    schedule.handle(copied_at(24), 3.0)
    assert schedule.handle(on_disk(27), 4.0) == []
    assert schedule.handle(on_disk(27, 31, 38), 5.0) == [Copy(31)]


def test_peers_of_different_speed_copy_epochs_in_common() -> None:
    def copied(epoch_s: float, began: float, stride: int) -> set[int]:
        """Epochs that a peer copies in 10 hours."""
        schedule = ArchiveSchedule(Every(seconds=3600.0))
        found: set[int] = set()
        now = began
        while now < began + 36_000.0:
            newest = int(now / epoch_s) // stride * stride
            kept = [e for e in (newest - 2 * stride, newest - stride, newest) if e >= 0]
            for action in schedule.handle(on_disk(*kept, stride=stride), now - began):
                found.add(action.epoch)
                schedule.handle(copied_at(action.epoch), now - began)
            now += 5.0
        return found

    one = copied(7.0, 70_000.0, 16)
    other = copied(7.0, 71_234.0, 8)
    assert len(one & other) >= 4, (sorted(one), sorted(other))
    assert 8 <= len(one) <= 14 + 8, "about once an hour, a grid is at most twice as dense"


def test_a_grid_is_no_finer_than_the_checkpoints_that_stay_on_the_disk() -> None:
    schedule = ArchiveSchedule(Every(seconds=1.0))
    assert schedule.handle(on_disk(1024, 1105, 1110, stride=1024), 0.0) == [Copy(1024)]
    schedule.handle(copied_at(1024), 1.0)
    assert schedule.handle(on_disk(1024, 1115, 1120, stride=1024), 2.0) == []
    assert schedule.handle(on_disk(1024, 2048, 2049, stride=1024), 90.0) == [Copy(2048)]


def test_attempts_become_rare_and_a_success_forgets_that() -> None:
    schedule = ArchiveSchedule(Every(epochs=1))
    now = 0.0
    pauses: list[float] = []
    for _ in range(12):
        assert schedule.handle(on_disk(5), now) == [Copy(5)]
        schedule.handle(AttemptFailed("the place is full"), now)
        pauses.append(schedule.again_s(now))
        assert schedule.handle(on_disk(5), now + pauses[-1] - 1.0) == []
        now += pauses[-1]
    assert pauses[:3] == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S]
    assert pauses[-1] == RETRY_MOST_S
    assert schedule.trouble(now) == "the place is full; tried again in 0 s"
    assert schedule.handle(on_disk(5), now) == [Copy(5)]
    schedule.handle(copied_at(5), now)
    assert schedule.trouble(now) == ""
    assert schedule.handle(on_disk(6), now) == [Copy(6)]
    schedule.handle(AttemptFailed("again"), now)
    assert schedule.again_s(now) == RETRY_S


def test_what_the_archive_has_is_not_copied_again() -> None:
    schedule = ArchiveSchedule(Every(epochs=10), last=version(31))
    assert schedule.handle(on_disk(31, 38), 0.0) == []
    assert schedule.handle(on_disk(38, 40), 1.0) == [Copy(40)]


def test_a_run_that_goes_back_is_measured_anew() -> None:
    schedule = ArchiveSchedule(Every(seconds=100.0))
    schedule.handle(on_disk(100), 0.0)
    schedule.handle(copied_at(100), 0.0)
    schedule.handle(on_disk(110), 100.0)
    assert schedule.grid == 8
    schedule.handle(on_disk(50), 200.0)
    schedule.handle(on_disk(51), 300.0)
    assert schedule.grid == 1


def gone_back(schedule: ArchiveSchedule) -> OnDisk:
    """A run that has copied epoch 52 and goes on from epoch 34 anew; its disk still has later
    checkpoints."""
    schedule.handle(on_disk(40, 52), 0.0)
    schedule.handle(copied_at(52), 0.0)
    return OnDisk(
        [version(33), version(34), version(35, NEW), version(41), version(52)],
        written=version(35, NEW),
    )


def test_a_run_that_goes_back_is_copied_at_once() -> None:
    schedule = ArchiveSchedule(Every(epochs=10))
    there = gone_back(schedule)
    assert schedule.lacks(there) == version(35, NEW)
    assert schedule.handle(there, 1.0) == [Copy(33)], "not what was given up"
    schedule.handle(copied_at(33), 1.0)
    assert schedule.lacks(there) == version(35, NEW)
    later = OnDisk([version(34), version(38, NEW), version(41), version(52)], version(38, NEW))
    assert schedule.handle(later, 2.0) == []
    at_41 = OnDisk([version(38, NEW), version(40, NEW), version(41), version(52)], version(40, NEW))
    assert schedule.handle(at_41, 3.0) == [Copy(40)]
    schedule.handle(copied_at(40, NEW), 3.0)
    past = OnDisk([version(40, NEW), version(44, NEW), version(41), version(52)], version(44, NEW))
    assert schedule.handle(past, 4.0) == []
    far = OnDisk([version(41), version(52), version(53, NEW)], version(53, NEW))
    assert schedule.handle(far, 5.0) == [Copy(53)], "52 stays given up when the run is beyond it"


def test_an_epoch_that_is_made_anew_counts_as_not_copied() -> None:
    schedule = ArchiveSchedule(Every(epochs=10), last=version(52))
    there = OnDisk([version(52, NEW), version(53, NEW)])
    assert schedule.lacks(there) == version(53, NEW)
    assert schedule.handle(there, 0.0) == [Copy(52)]


def test_a_disk_behind_the_archive_alone_is_no_run_that_goes_back() -> None:
    """Nothing was written since the start: the run may be where the archive is."""
    schedule = ArchiveSchedule(Every(epochs=10), last=version(52))
    assert schedule.handle(on_disk(33, 41), 0.0) == []
    assert schedule.lacks(on_disk(33, 41)) is None
