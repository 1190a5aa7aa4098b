"""The service around the machine: commands, the pause on the disk, sentences."""

import asyncio

import pytest

from node.availability import kept
from node.availability.keeper import AvailabilityKeeper, minute_of_day
from node.availability.kept import KeptPause
from node.availability.machine import By, Pause
from node.availability.settings import AvailabilitySettings
from node.availability.usage import Usage
from node.availability.words import (
    PUBLIC,
    clock_words,
    is_paused,
    paused_words,
    reason,
    seconds_of,
)
from node.core.clock import ClockReading
from node.core.errors import UsageFault
from node.dht.record import MAX_PAUSED
from node.telemetry.events import Journal

WALL = 1_700_000_000.0


class Clocks:
    """A clock that counts, and one that is set by hand."""

    def __init__(self) -> None:
        self.always = 50.0
        self.wall = WALL

    def __call__(self) -> ClockReading:
        return ClockReading(self.always, self.always, self.wall)

    def passes(self, seconds: float) -> None:
        self.always += seconds
        self.wall += seconds


@pytest.fixture
def clocks() -> Clocks:
    return Clocks()


@pytest.fixture
def make(tmp_path, clocks):
    """Makes the keeper of one home; again, as after a restart."""

    def made(settings: AvailabilitySettings | None = None, usage=None) -> AvailabilityKeeper:
        journal = Journal([])
        keeper = AvailabilityKeeper(
            settings or AvailabilitySettings(), tmp_path / "pause.json", journal, usage, clocks
        )
        keeper.journal = journal
        return keeper

    return made


async def test_a_pause_survives_a_restart_and_runs_out(make, clocks, tmp_path):
    keeper = make()
    assert keeper.open.is_set()
    keeper.pause(7200.0, "a film")
    assert keeper.closed.is_set()
    assert not keeper.open.is_set()
    assert keeper.reason == f"by its operator (a film), until {clock_words(WALL + 7200)}"
    clocks.passes(3600)
    clocks.always = 5.0  # the machine has started again
    again = make()
    assert again.paused == Pause(By.OPERATOR, "a film", 5.0 + 3600)
    assert again.ends_at == WALL + 7200
    clocks.passes(3599)
    await again.sample()
    assert again.closed.is_set()
    clocks.passes(1)
    await again.sample()
    assert again.open.is_set()
    assert again.reason == ""
    assert not (tmp_path / "pause.json").exists()
    assert make().paused is None


async def test_a_pause_that_ran_out_while_the_daemon_was_down_is_over(make, clocks):
    make().pause(60.0, "")
    clocks.passes(61)
    assert make().paused is None


async def test_a_clock_set_back_makes_no_pause_longer(make, clocks):
    keeper = make()
    keeper.pause(60.0, "")
    clocks.wall -= 86400
    assert make().paused == Pause(By.OPERATOR, "", clocks.always + 60)
    clocks.always += 60
    await keeper.sample()
    assert keeper.paused is None


async def test_a_pause_without_end_survives_and_a_resume_removes_it(make, clocks):
    make().pause(None, "")
    clocks.passes(1e6)
    keeper = make()
    assert keeper.reason == "by its operator, until  tutti resume"
    assert (keeper.ends_at, keeper.count.pauses) == (0.0, 1)
    clocks.passes(10)
    assert keeper.seconds_paused() == 10
    keeper.resume()
    clocks.passes(10)
    assert keeper.seconds_paused() == 10
    assert make().paused is None


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"seconds": "x", "ends_at": 1, "reason": ""}'])
async def test_a_damaged_file_is_no_pause(make, tmp_path, text):
    (tmp_path / "pause.json").write_text(text)
    assert make().paused is None


def test_a_kept_pause_comes_back_as_it_was(tmp_path):
    path = tmp_path / "deep" / "pause.json"
    for pause in (KeptPause(60.0, WALL, "tea"), KeptPause(None, 0.0, "")):
        kept.write(path, pause)
        assert kept.read(path) == pause
    kept.write(path, None)
    kept.write(path, None)
    assert kept.read(path) is None


async def test_signs_of_use_are_sampled_and_told(make, clocks):
    signs = [Usage(input_s=5.0), Usage(input_s=700.0)]
    changes: list[str] = []
    keeper = make(AvailabilitySettings(idle_only=10), lambda: signs.pop(0))
    keeper.on_change = lambda: changes.append(keeper.public_reason)
    with keeper.journal.subscribe(level="info") as feed:
        await keeper.sample()
        clocks.passes(700)
        await keeper.sample()
        feed.close()
        told = [event.text async for event in feed]
    assert changes == ["its machine is in use", ""]
    assert told[0] == "paused: this machine is in use, until 10 min pass without key and mouse"
    assert len(told) == 2


async def test_it_looks_by_itself(make):
    looked = asyncio.Event()

    def usage() -> Usage:
        loop.call_soon_threadsafe(looked.set)
        return Usage()

    loop = asyncio.get_running_loop()
    keeper = make(AvailabilitySettings(max_load=50), usage)
    task = asyncio.create_task(keeper.run())
    async with asyncio.timeout(30):
        await looked.wait()
    task.cancel()


def test_every_reason_fits_into_a_record_and_says_no_name():
    for by in By:
        text = reason(Pause(by, "blender, pid 42", None), None)
        assert text
        assert "\n" not in text
        assert 0 < len(PUBLIC[by]) <= MAX_PAUSED
        assert "blender" not in PUBLIC[by]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2h", 7200), ("90m", 5400), ("1h30m", 5400), ("45s", 45), ("1d", 86400), ("1.5 h", 5400)],
)
def test_durations(text, seconds):
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "2", "h", "2h x", "-1h", "0s", "31d", "2 hours"])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(UsageFault):
        seconds_of(text)


def test_the_minute_of_the_day_is_the_local_one(monkeypatch):
    import time

    for zone, hour in (("UTC", 22), ("Etc/GMT-2", 0)):
        monkeypatch.setenv("TZ", zone)
        assert int(minute_of_day(WALL) // 60) == hour
    monkeypatch.undo()
    time.tzset()


def closed_now() -> AvailabilitySettings:
    hour = int(minute_of_day(WALL) // 60)
    return AvailabilitySettings(hours=f"{(hour + 3) % 24}-{(hour + 5) % 24}")


async def test_a_resume_against_a_rule_holds_in_the_process_of_the_next_stage(make, tmp_path):
    keeper = make(closed_now())
    await keeper.sample()
    assert keeper.paused.by is By.HOURS
    keeper.resume()
    keeper.hand_on()
    keeper = make(closed_now())
    keeper.run_resumed()  # before the first look
    await keeper.sample()
    assert keeper.open.is_set()
    again = make(closed_now())
    await again.sample()
    assert again.paused.by is By.HOURS, "the rule may have been open since"


@pytest.mark.parametrize("text", ["", "{", "7", "[7]", '["no rule"]', "[[]]"])
async def test_damaged_words_about_overruled_rules_overrule_nothing(make, tmp_path, text):
    (tmp_path / "overruled.json").write_text(text)
    keeper = make(closed_now())
    await keeper.sample()
    assert keeper.paused.by is By.HOURS


async def test_the_reason_names_both_pauses(make, clocks):
    keeper = make()
    keeper.run_paused(0.0, "moving disks")
    assert keeper.paused_by_run
    assert keeper.reason.startswith("by the run's owner ")
    assert keeper.reason.endswith(" d ago: 'moving disks'")
    assert keeper.public_reason == "by the run's owner"
    assert keeper.closed.is_set()
    keeper.pause(None, "a film")
    both = keeper.reason
    assert both.startswith("by its operator (a film), until  tutti resume; the run was paused by ")
    assert both.endswith("'moving disks'")
    keeper.run_resumed()
    assert keeper.reason == "by its operator (a film), until  tutti resume"
    assert not keeper.open.is_set()
    keeper.resume()
    assert keeper.open.is_set()


@pytest.mark.parametrize(
    ("why", "alone", "behind"),
    [
        ("by its operator", "paused by its operator", "is paused by its operator"),
        (
            "by its operator (as long ago), until 23:10",
            "paused by its operator (as long ago), until 23:10",
            "is paused by its operator (as long ago), until 23:10",
        ),
        ("outside its hours 22-07", "paused outside its hours 22-07", None),
        ("its memory is in use", "paused: its memory is in use", None),
        (
            "by the run's owner a moment ago: 'x'",
            "paused by the run's owner a moment ago: 'x'",
            "was paused by the run's owner a moment ago: 'x'",
        ),
    ],
)
def test_a_pause_is_told_in_a_sentence(why: str, alone: str, behind: str | None):
    assert paused_words(why) == alone
    assert is_paused(why) == (behind or f"is {alone}")
