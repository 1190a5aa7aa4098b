"""The machine that pauses a daemon, in virtual time: commands, hours, idleness, load."""

from collections.abc import Callable

import pytest

from node.availability.hours import Hours
from node.availability.machine import (
    CALM_S,
    LOAD_FOR_S,
    RETRY_S,
    Availability,
    AvailabilityEvent,
    By,
    Close,
    Open,
    OwnerRules,
    Pause,
    PauseAsked,
    ResumeAsked,
    ReturnFailed,
    RunPaused,
    RunResumed,
    Sampled,
)
from node.core.errors import UsageFault

NOON = 12 * 60.0
IDLE_S = 600.0


class Scene:
    """A machine, its clock, and the time of day."""

    def __init__(self, rules: OwnerRules, asked: Pause | None = None, minute: float = NOON) -> None:
        self.machine = Availability(rules, asked)
        self.now = 1000.0
        self.minute = minute
        self.actions: list[Close | Open] = []

    @property
    def by(self) -> By | None:
        return self.machine.pause.by if self.machine.pause is not None else None

    def feed(self, event: AvailabilityEvent) -> list[Close | Open]:
        done = self.machine.handle(event, self.now)
        self.actions += done
        return done

    def sample(self, seconds: float = 0.0, **signs) -> By | None:
        """Let time pass, look, and return the rule that closes the machine."""
        self.now += seconds
        self.minute = (self.minute + seconds / 60) % (24 * 60)
        self.feed(Sampled(self.minute, **signs))
        return self.by

    def until(self, state: By | None, most_s: float, **signs) -> float:
        """Look every second until the machine is in this state; the seconds that took."""
        began = self.now
        while self.sample(1.0, **signs) is not state:
            assert self.now - began < most_s
        return self.now - began


def test_without_rules_nothing_ever_pauses():
    scene = Scene(OwnerRules())
    for load in (0.0, 1.0):
        scene.sample(3600, input_s=0.0, gpu="game, pid 1", load=load)
    assert scene.actions == []


def test_a_pause_with_a_duration_ends_by_itself():
    scene = Scene(OwnerRules())
    assert scene.feed(PauseAsked(7200.0, "a film")) == [
        Close(Pause(By.OPERATOR, "a film", 1000.0 + 7200))
    ]
    assert scene.sample(7199) is By.OPERATOR
    assert scene.sample(1) is None
    assert scene.actions[1:] == [Open()]


def test_a_pause_without_a_duration_ends_with_a_resume():
    scene = Scene(OwnerRules())
    scene.feed(PauseAsked(None))
    assert scene.sample(30 * 86400) is By.OPERATOR
    assert scene.feed(ResumeAsked()) == [Open()]
    assert scene.feed(ResumeAsked()) == []


def test_a_pause_can_be_made_shorter_and_longer():
    scene = Scene(OwnerRules())
    scene.feed(PauseAsked(60.0))
    assert scene.feed(PauseAsked(90.0)) == [Close(Pause(By.OPERATOR, "", 1090.0))]
    assert scene.sample(80) is By.OPERATOR
    scene.feed(PauseAsked(5.0))
    assert scene.sample(5) is None


def test_a_pause_from_before_the_start_holds_until_its_end():
    scene = Scene(OwnerRules(), asked=Pause(By.OPERATOR, "", 1030.0))
    assert scene.by is By.OPERATOR
    assert scene.sample(29) is By.OPERATOR
    assert scene.sample(1) is None


@pytest.mark.parametrize(
    ("text", "open_at", "closed_at"),
    [
        ("22-07", ("22:00", "23:59", "00:00", "06:59"), ("21:59", "07:00", "12:00")),
        ("9:30-17", ("09:30", "16:59"), ("09:29", "17:00", "00:00")),
        ("22-24, 12-13:15", ("23:59", "13:14"), ("00:00", "13:15", "21:59")),
        ("0-6", ("00:00",), ("06:00", "23:59")),
    ],
)
def test_hours_go_over_midnight(text, open_at, closed_at):
    hours = Hours.parse(text)
    for said in open_at + closed_at:
        hour, minute = said.split(":")
        assert hours.open(60 * int(hour) + int(minute)) is (said in open_at), said


@pytest.mark.parametrize("text", ["22", "22-25", "7-7", "0-24", "22:60-3", "22-7 Mon", "24-3", "-"])
def test_hours_that_are_none_are_refused(text):
    with pytest.raises(UsageFault, match="hours = "):
        Hours.parse(text)


def test_the_machine_works_in_its_hours_only_and_says_when_it_goes_on():
    scene = Scene(OwnerRules(hours=Hours.parse("22-07")), minute=21 * 60.0)
    assert scene.sample() is By.HOURS
    assert scene.machine.pause == Pause(By.HOURS, "22-07, until 22:00", 1000.0 + 3600)
    assert scene.sample(3599) is By.HOURS
    assert scene.sample(1) is None
    assert scene.sample(9 * 3600 - 1) is None
    assert scene.sample(1) is By.HOURS
    # One pause is told once, however often it is looked at.
    assert [type(a) for a in scene.actions] == [Close, Open, Close]


def test_a_clock_that_is_set_moves_the_hours_and_not_a_pause():
    scene = Scene(OwnerRules(hours=Hours.parse("22-07")), minute=23 * 60.0)
    assert scene.sample() is None
    scene.minute -= 2 * 60  # the end of summer time, or a wrong clock that is put right
    assert scene.sample() is By.HOURS
    scene.minute += 60
    assert scene.sample() is None
    scene.feed(PauseAsked(600.0))
    scene.minute += 60
    assert scene.sample(599) is By.OPERATOR
    assert scene.sample(1) is None


def test_an_operators_pause_comes_before_the_hours_and_leaves_them():
    scene = Scene(OwnerRules(hours=Hours.parse("22-07")), minute=21 * 60.0)
    scene.sample()
    assert scene.feed(PauseAsked(60.0)) == [Close(Pause(By.OPERATOR, "", 1060.0))]
    assert scene.sample(60) is By.HOURS
    assert [type(a) for a in scene.actions] == [Close, Close, Close]


def test_a_resume_sets_the_hours_aside_until_they_have_been_open():
    scene = Scene(OwnerRules(hours=Hours.parse("22-07")), minute=21 * 60.0)
    scene.sample()
    assert scene.feed(ResumeAsked()) == [Open()]
    assert scene.sample(1800) is None
    assert scene.sample(1800) is None  # 22:00
    assert scene.sample(9 * 3600) is By.HOURS


def test_a_key_pauses_at_once_and_idleness_is_waited_for():
    scene = Scene(OwnerRules(idle_s=IDLE_S))
    assert scene.sample(input_s=IDLE_S - 1) is By.INPUT
    assert scene.sample(1, input_s=IDLE_S) is None
    assert scene.sample(1, input_s=0.0) is By.INPUT
    began = scene.now
    while scene.by is By.INPUT:
        scene.sample(5, input_s=scene.now + 5 - began)
    assert scene.now - began == IDLE_S


def test_a_machine_that_tells_nothing_counts_as_idle():
    scene = Scene(OwnerRules(idle_s=IDLE_S))
    assert scene.sample(input_s=None) is None


def test_another_program_on_the_gpu_pauses_an_idle_machine():
    scene = Scene(OwnerRules(idle_s=IDLE_S))
    assert scene.sample(gpu="blender, pid 42") is By.GPU
    assert scene.machine.pause == Pause(By.GPU, "blender, pid 42")
    assert scene.until(None, 2 * IDLE_S) == IDLE_S


def test_a_resume_in_use_holds_until_the_machine_was_idle_once():
    scene = Scene(OwnerRules(idle_s=IDLE_S))
    scene.sample(input_s=0.0)
    scene.feed(ResumeAsked())
    assert scene.sample(60, input_s=0.0) is None
    assert scene.sample(IDLE_S, input_s=IDLE_S) is None
    assert scene.sample(60, input_s=0.0) is By.INPUT


@pytest.mark.parametrize(
    ("rule", "rules", "signs"),
    [
        (By.LOAD, OwnerRules(max_load=0.5), {"load": 0.9}),
        (By.GPU, OwnerRules(idle_s=IDLE_S), {"gpu": "blender, pid 42"}),
        (By.INPUT, OwnerRules(idle_s=IDLE_S), {"input_s": 0.0}),
    ],
)
def test_a_rule_overruled_before_the_start_stays_so_until_it_is_open(rule, rules, signs):
    scene = Scene(rules)
    scene.machine = Availability(rules, overruled=[rule])
    scene.feed(ResumeAsked())
    for _ in range(40):
        assert scene.sample(2, **signs) is None
    assert scene.sample(2 * IDLE_S, input_s=IDLE_S, load=0.0) is None
    scene.until(rule, 60, **signs)


@pytest.fixture
def limited() -> Callable[..., Scene]:
    return lambda: Scene(OwnerRules(max_load=0.5))


def test_a_short_load_is_no_reason(limited):
    scene = limited()
    for _ in range(20):
        assert scene.sample(LOAD_FOR_S - 1, load=0.9) is None
        assert scene.sample(1, load=0.1) is None


def test_a_lasting_load_pauses_and_calm_resumes(limited):
    scene = limited()
    assert scene.until(By.LOAD, 60, load=0.9) == pytest.approx(LOAD_FOR_S, abs=1)
    assert scene.until(None, 600, load=0.1) == pytest.approx(CALM_S, abs=1)


def test_a_load_around_the_limit_does_not_flap(limited):
    scene = limited()
    scene.until(By.LOAD, 60, load=0.51)
    for _ in range(100):
        scene.sample(10, load=0.51)
        scene.sample(10, load=0.45)
    assert [type(a) for a in scene.actions] == [Close]
    # Well below the limit it is over.
    assert scene.until(None, 600, load=0.3) == pytest.approx(CALM_S, abs=1)
    # The same load does not pause a daemon that works.
    for _ in range(100):
        assert scene.sample(10, load=0.45) is None


def test_an_idle_machine_is_one_without_load_too():
    scene = Scene(OwnerRules(idle_s=IDLE_S))
    assert scene.until(By.LOAD, 60, load=0.3) == pytest.approx(LOAD_FOR_S, abs=1)
    assert scene.until(None, 2 * IDLE_S, load=0.0) == pytest.approx(IDLE_S, abs=1)


def test_memory_that_others_have_is_asked_for_again():
    scene = Scene(OwnerRules())
    assert scene.feed(ReturnFailed("no room")) == [
        Close(Pause(By.MEMORY, "no room", 1000.0 + RETRY_S))
    ]
    assert scene.sample(RETRY_S - 1) is By.MEMORY
    assert scene.sample(1) is None
    scene.feed(ReturnFailed("no room"))
    assert scene.feed(ResumeAsked()) == [Open()]


def test_the_same_events_give_the_same_actions():
    def played() -> list[Close | Open]:
        scene = Scene(OwnerRules(IDLE_S, Hours.parse("22-07"), 0.4), minute=20 * 60.0)
        for step in range(2000):
            if step == 300:
                scene.feed(PauseAsked(900.0))
            if step % 500 == 499:
                scene.feed(ResumeAsked())
            scene.sample(60, input_s=float(step % 1200), load=(step % 7) / 10)
        return scene.actions

    first = played()
    assert first == played()
    assert len(first) > 5


def test_the_owners_pause_and_the_operators_must_both_end():
    scene = Scene(OwnerRules())
    scene.feed(RunPaused(1_800_000_000.0, "moving disks"))
    assert scene.by is By.RUN
    assert scene.feed(RunPaused(1_800_000_000.0, "moving disks")) == []
    scene.feed(PauseAsked(None, "a film"))
    assert scene.by is By.OPERATOR
    scene.feed(RunResumed())
    assert scene.by is By.OPERATOR, "the volunteer's own pause stays"
    scene.feed(RunPaused(1_800_000_000.0))
    assert scene.by is By.OPERATOR
    scene.feed(ResumeAsked())
    assert scene.by is By.RUN, "a volunteer does not take the owner's order back"
    scene.feed(ResumeAsked())
    assert scene.by is By.RUN
    assert scene.feed(RunResumed()) == [Open()]


def test_a_pause_of_the_operator_that_runs_out_leaves_the_owners():
    scene = Scene(OwnerRules())
    scene.feed(PauseAsked(60.0))
    scene.feed(RunPaused(1_800_000_000.0))
    assert scene.sample(59.0) is By.OPERATOR
    assert scene.sample(2.0) is By.RUN
    assert scene.sample(1e6) is By.RUN, "it has no end of its own"
