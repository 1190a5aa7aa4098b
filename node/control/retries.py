"""Retries of a question to a peer: the decision to ask again, its time, and the words meanwhile.

    Busy        it has answered, and others come first   -> ask again when it said
    Unanswered  somebody is there and does not answer    -> ask again, with more time
    Nobody      no sign of life                          -> a few more attempts, then the end

Enters: the outcome of each attempt. Leaves: the next attempt, or the end. Pure: time and chance are
arguments.
"""

from dataclasses import dataclass

from node.control.words import span
from protos.ask_pb2 import Answer

ATTEMPT_S = 7.5
"""Seconds of the first attempt. An attempt that is connected and not answered doubles the time of
the next one: a slow peer needs more time, and every new question is more work for it."""
LONGEST_ATTEMPT_S = 60.0
"""Most seconds of an attempt."""
PAUSE_S = 1.0
"""Pause before the second attempt; each further attempt without an answer doubles it."""
LONGEST_PAUSE_S = 15.0
"""Longest pause between two attempts that were not answered."""
EARLIEST = 0.75
LATEST = 1.5
"""Bounds of a random factor of every pause, so that a crowd does not come in waves."""
REFUSED_S = 5.0
"""Longest time for attempts while connections are refused, if there was never a sign of life."""
SILENT_S = 60.0
"""Longest time for attempts while nothing comes back, if there was never a sign of life."""
GONE_S = 90.0
"""Longest time without a sign of life after there was one."""
ACCEPTED_S = 120.0
"""Longest time without an answer while connections are accepted."""
PROVEN_S = 600.0
"""Longest time without an answer while the peer proves its identity."""
MOST_BUSY_S = 60.0
"""Longest time for which a busy peer can send a newcomer away."""
SAY_S = 10.0
"""Least seconds between two lines about a new place in the queue."""


def busy_s(answer: Answer) -> float:
    """Seconds after which a busy peer wants to be asked again; 0 for any other answer."""
    again_s = answer.refusal.again_s
    if again_s > 0:
        return min(again_s, MOST_BUSY_S)
    return 0.0


@dataclass(frozen=True, slots=True)
class Busy:
    """The peer answers others first. ``place``: position in its queue from 1, or 0 if unknown;
    ``again_s``: seconds after which it wants to be asked again."""

    place: int
    again_s: float


@dataclass(frozen=True, slots=True)
class Unanswered:
    """A connection was made, and no answer came. ``proven``: the peer has proven its identity;
    ``cause``: a sentence about the answer that is missing."""

    proven: bool
    cause: str


@dataclass(frozen=True, slots=True)
class Nobody:
    """No sign of life. ``final``: another attempt would not change that; ``refused``: the machine
    answers that nobody listens."""

    final: bool = False
    refused: bool = False


Outcome = Busy | Unanswered | Nobody
"""Outcome of one attempt at all addresses."""


@dataclass(frozen=True, slots=True)
class Again:
    """Ask again after ``after_s``, for at most ``within_s``. ``says``: a sentence for the user, ""
    where nothing has changed."""

    after_s: float
    within_s: float
    says: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Ask no more. ``why``: a sentence, "" where the findings at the addresses say enough."""

    why: str = ""


class Retries:
    """The attempts of one question, the first of which begins at ``now``."""

    def __init__(self, now: float) -> None:
        self._began = self._life = self._answer = now
        self._ever = False
        """There was a sign of life."""
        self._within_s = ATTEMPT_S
        self._pause_s = PAUSE_S
        self._kind: type[Outcome] | None = None
        self._place = 0
        self._said = float("-inf")

    def handle(self, outcome: Outcome, now: float, roll: float) -> Again | GiveUp:
        """Decide after an attempt. ``roll``: a number drawn from 0 to 1."""
        match outcome:
            case Busy(place, again_s):
                self._ever = True
                self._life = self._answer = now
                self._pause_s = PAUSE_S
                return self._again(outcome, again_s, now, roll, _in_queue(place, again_s))
            case Unanswered(proven, cause):
                self._ever = True
                self._life = now
                most_s = ACCEPTED_S
                if proven:
                    most_s = PROVEN_S
                if now - self._answer >= most_s:
                    return GiveUp(
                        f"somebody is there and answers nothing for {span(most_s)}: {cause}"
                    )
                self._within_s = min(LONGEST_ATTEMPT_S, 2 * self._within_s)
                return self._again(outcome, self._next_pause(), now, roll, f"{cause}; asking again")
            case Nobody(final, refused):
                return self._nobody(outcome, now, roll, final=final, refused=refused)

    def _nobody(
        self, outcome: Nobody, now: float, roll: float, *, final: bool, refused: bool
    ) -> Again | GiveUp:
        if self._ever:
            if now - self._life >= GONE_S:
                return GiveUp(f"whoever was there has given no sign of life for {span(GONE_S)}")
            says = "no sign of life any more; trying on"
        else:
            most_s = SILENT_S
            if refused:
                most_s = REFUSED_S
            if final or now - self._began >= most_s:
                return GiveUp()
            # The few seconds for a daemon that is being started are waited for without a word.
            says = ""
            if not refused:
                says = f"nobody answers yet; trying for {span(most_s)}"
        return self._again(outcome, self._next_pause(), now, roll, says)

    def _again(self, outcome: Outcome, pause_s: float, now: float, roll: float, says: str) -> Again:
        place = 0
        if isinstance(outcome, Busy):
            place = outcome.place
        news = type(outcome) is not self._kind
        if not news and place != self._place and now - self._said >= SAY_S:
            news = True
        if news:
            self._kind = type(outcome)
            self._place = place
            self._said = now
        else:
            says = ""
        after_s = pause_s * (EARLIEST + (LATEST - EARLIEST) * roll)
        return Again(after_s, self._within_s, says)

    def _next_pause(self) -> float:
        pause_s = self._pause_s
        self._pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
        return pause_s


def _in_queue(place: int, again_s: float) -> str:
    where = ""
    if place:
        where = f", about {ordinal(place)} in its queue"
    return f"the swarm is busy{where}; asking again in about {max(1.0, again_s):.0f} s"


def ordinal(number: int) -> str:
    """1 -> "1st", 17 -> "17th", 22 -> "22nd"."""
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
