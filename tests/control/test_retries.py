"""Retries of a joiner's question, in virtual time."""

import math

import pytest

from node.control.retries import (
    ACCEPTED_S,
    ATTEMPT_S,
    EARLIEST,
    GONE_S,
    LATEST,
    LONGEST_ATTEMPT_S,
    LONGEST_PAUSE_S,
    MOST_BUSY_S,
    PROVEN_S,
    REFUSED_S,
    SILENT_S,
    Again,
    Busy,
    GiveUp,
    Nobody,
    Outcome,
    Retries,
    Unanswered,
    busy_s,
    ordinal,
)
from protos.ask_pb2 import Answer, PingAnswer, Refusal


class Joiner:
    """Attempts that all come out as told; each takes the time that it was given."""

    def __init__(self) -> None:
        self.now = 0.0
        self.said = list[str]()
        self.pauses = list[float]()
        self.within_s = ATTEMPT_S
        self.retries = Retries(self.now)

    def plays(self, outcome: Outcome, times: int = 1, took: float | None = None) -> GiveUp | None:
        """Play an outcome `times` times; returns the final result or error, if there is one."""
        for _ in range(times):
            self.now += self.within_s if took is None else took
            decided = self.retries.handle(outcome, self.now, 0.5)
            if isinstance(decided, GiveUp):
                return decided
            self.said += [decided.says] if decided.says else []
            self.pauses.append(decided.after_s)
            self.now += decided.after_s
            self.within_s = decided.within_s
        return None


def test_a_busy_swarm_is_waited_for_as_long_as_it_answers():
    joiner = Joiner()
    for place in range(60, 0, -1):
        assert joiner.plays(Busy(place, 2.0 * place), took=0.1) is None
    assert joiner.now > 3600
    assert "60th" in joiner.said[0]
    assert len(joiner.said) <= joiner.now / 10.0 + 1, "no flood"
    assert len(joiner.said) > 30, "the place is said as it changes"


def test_the_same_word_is_not_said_twice():
    joiner = Joiner()
    joiner.plays(Busy(3, 20.0), times=50, took=0.1)
    joiner.plays(Unanswered(True, "connected, and nothing comes"), times=5)
    assert len(joiner.said) == 2


@pytest.mark.parametrize(("proven", "most_s"), [(True, PROVEN_S), (False, ACCEPTED_S)])
def test_somebody_who_is_there_and_never_answers_ends_it_late_with_the_true_reason(proven, most_s):
    joiner = Joiner()
    end = joiner.plays(Unanswered(proven, "connected, and nothing comes"), times=1000)
    assert end is not None
    assert most_s <= joiner.now < most_s + LONGEST_ATTEMPT_S + 2 * LONGEST_PAUSE_S
    assert "answers nothing" in end.why
    assert joiner.within_s == LONGEST_ATTEMPT_S, "what is slow gets more time"


def test_an_answer_begins_the_wait_anew():
    joiner = Joiner()
    for _ in range(20):
        assert joiner.plays(Unanswered(False, "it accepts connections"), 3, took=9.0) is None
        assert joiner.plays(Busy(5, 5.0), took=0.1) is None
    assert joiner.now > 4 * ACCEPTED_S


@pytest.mark.parametrize(
    ("outcome", "most_s", "took"),
    [
        (Nobody(), SILENT_S, ATTEMPT_S),
        (Nobody(refused=True), REFUSED_S, 0.01),
        (Nobody(final=True), 0.0, 0.01),
    ],
)
def test_where_nobody_is_a_few_attempts_are_made(outcome, most_s, took):
    joiner = Joiner()
    assert joiner.plays(outcome, times=1000, took=took) == GiveUp()
    assert most_s <= joiner.now <= most_s + ATTEMPT_S + LATEST * LONGEST_PAUSE_S


def test_whoever_was_there_is_waited_for():
    joiner = Joiner()
    joiner.plays(Busy(2, 2.0), took=0.1)
    since = joiner.now
    end = joiner.plays(Nobody(refused=True), times=1000, took=0.01)
    assert end is not None
    assert "no sign of life" in end.why
    assert GONE_S - 5 <= joiner.now - since <= GONE_S + LATEST * LONGEST_PAUSE_S


def test_a_crowd_does_not_come_in_waves():
    pauses = set()
    for roll in (0.0, 0.3, 0.7, 1.0):
        decided = Retries(0.0).handle(Busy(9, 10.0), 1.0, roll)
        assert isinstance(decided, Again)
        pauses.add(decided.after_s)
    assert min(pauses) == 10.0 * EARLIEST
    assert max(pauses) == 10.0 * LATEST
    assert len(pauses) == 4
    joiner = Joiner()
    joiner.plays(Unanswered(True, "nothing"), times=8)
    assert joiner.pauses == sorted(joiner.pauses)
    assert joiner.pauses[-1] > 4 * joiner.pauses[0]


def test_only_a_time_that_makes_sense_means_busy():
    def answer(again_s: float) -> Answer:
        return Answer(refusal=Refusal(code=7, reason="busy", again_s=again_s))

    assert busy_s(answer(6.0)) == 6.0
    assert busy_s(answer(math.inf)) == MOST_BUSY_S
    for nothing in (0.0, -1.0, math.nan):
        assert busy_s(answer(nothing)) == 0.0
    assert busy_s(Answer(ping=PingAnswer())) == 0.0


def test_places_are_said_as_people_say_them():
    assert [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 17, 21, 22, 101, 111)] == [
        *("1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "17th", "21st", "22nd", "101st"),
        "111th",
    ]
