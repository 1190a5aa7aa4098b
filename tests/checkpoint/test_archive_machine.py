"""The machine that decides what is copied to an archive, in virtual time."""

import pytest

from node.checkpoint.archive.machine import (
    RETRY_MOST_S,
    RETRY_S,
    ArchiveSchedule,
    Copied,
    Copy,
    Every,
    Failed,
    OnDisk,
)
from node.core.errors import UsageFault


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
    assert schedule.handle(OnDisk(()), 0.0) == []
    assert schedule.handle(OnDisk((24, 27)), 1.0) == [Copy(24)]
    assert schedule.handle(OnDisk((24, 27, 31)), 2.0) == [], "one at a time"
    schedule.handle(Copied(24), 3.0)
    assert schedule.handle(OnDisk((27,)), 4.0) == []
    assert schedule.handle(OnDisk((27, 31, 38)), 5.0) == [Copy(31)]


def test_peers_of_different_speed_copy_epochs_in_common() -> None:
    def copied(epoch_s: float, began: float, stride: int) -> set[int]:
        """Epochs that a peer copies in 10 hours."""
        schedule = ArchiveSchedule(Every(seconds=3600.0))
        found: set[int] = set()
        now = began
        while now < began + 36_000.0:
            newest = int(now / epoch_s) // stride * stride
            kept = [e for e in (newest - 2 * stride, newest - stride, newest) if e >= 0]
            for action in schedule.handle(OnDisk(kept, stride), now - began):
                found.add(action.epoch)
                schedule.handle(Copied(action.epoch), now - began)
            now += 5.0
        return found

    one = copied(7.0, 70_000.0, 16)
    other = copied(7.0, 71_234.0, 8)
    assert len(one & other) >= 4, (sorted(one), sorted(other))
    assert 8 <= len(one) <= 14 + 8, "about once an hour, a grid is at most twice as dense"


def test_a_grid_is_no_finer_than_the_checkpoints_that_stay_on_the_disk() -> None:
    schedule = ArchiveSchedule(Every(seconds=1.0))
    assert schedule.handle(OnDisk((1024, 1105, 1110), stride=1024), 0.0) == [Copy(1024)]
    schedule.handle(Copied(1024), 1.0)
    assert schedule.handle(OnDisk((1024, 1115, 1120), stride=1024), 2.0) == []
    assert schedule.handle(OnDisk((1024, 2048, 2049), stride=1024), 90.0) == [Copy(2048)]


def test_attempts_become_rare_and_a_success_forgets_that() -> None:
    schedule = ArchiveSchedule(Every(epochs=1))
    now = 0.0
    pauses: list[float] = []
    for _ in range(12):
        assert schedule.handle(OnDisk((5,)), now) == [Copy(5)]
        schedule.handle(Failed("the place is full"), now)
        pauses.append(schedule.again_s(now))
        assert schedule.handle(OnDisk((5,)), now + pauses[-1] - 1.0) == []
        now += pauses[-1]
    assert pauses[:3] == [RETRY_S, 2 * RETRY_S, 4 * RETRY_S]
    assert pauses[-1] == RETRY_MOST_S
    assert schedule.trouble(now) == "the place is full; tried again in 0 s"
    assert schedule.handle(OnDisk((5,)), now) == [Copy(5)]
    schedule.handle(Copied(5), now)
    assert schedule.trouble(now) == ""
    assert schedule.handle(OnDisk((6,)), now) == [Copy(6)]
    schedule.handle(Failed("again"), now)
    assert schedule.again_s(now) == RETRY_S


def test_what_the_archive_has_is_not_copied_again() -> None:
    schedule = ArchiveSchedule(Every(epochs=10), last=31)
    assert schedule.handle(OnDisk((31, 38)), 0.0) == []
    assert schedule.handle(OnDisk((38, 40)), 1.0) == [Copy(40)]


def test_a_run_that_goes_back_is_measured_anew() -> None:
    schedule = ArchiveSchedule(Every(seconds=100.0))
    schedule.handle(OnDisk((100,)), 0.0)
    schedule.handle(Copied(100), 0.0)
    schedule.handle(OnDisk((110,)), 100.0)
    assert schedule.grid == 8
    schedule.handle(OnDisk((50,)), 200.0)
    schedule.handle(OnDisk((51,)), 300.0)
    assert schedule.grid == 1
