"""The state machine that decides when this machine works for the swarm and when it pauses.

Enters: commands of the operator, orders of the run's owner, and every few seconds a sample: the
local time of day and the signs of use. Leaves: :class:`Close` with the reason, :class:`Open`.
Never: a clock, a measurement.

The first of these rules that closes the machine gives the reason: the operator's pause, that of the
run's owner, a failed return, the hours, another program on the GPU, other load, keyboard or mouse.
A ``resume`` ends the operator's pause, and sets aside the rules that close the machine at that
moment; each of them counts again after it has been open once. The pause of the run's owner ends
only by the owner's own order.
"""

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from node.availability.hours import Hours

LOAD_FOR_S = 15.0
"""Seconds for which other programs must need the cores before the machine counts as used: a
program that starts, or a page that loads, is shorter."""
CALM_S = 60.0
"""Seconds without load or another program on the GPU after which the machine counts as unused, or
``idle_s`` where that is longer."""
RELEASE = 0.75
"""Share of the limit below which load must fall to count as gone."""
IDLE_LOAD = 0.25
"""Share of the cores that other programs may keep busy on an idle machine."""
RETRY_S = 60.0
"""Seconds until the next attempt after one failed because others have the memory."""
SAME_S = 90.0
"""Two ends of a pause that differ by less are the same: a sample is a moment late."""


class By(StrEnum):
    """The rule that pauses the daemon."""

    OPERATOR = "operator"
    RUN = "run"
    MEMORY = "memory"
    HOURS = "hours"
    GPU = "gpu"
    LOAD = "load"
    INPUT = "input"


@dataclass(frozen=True, slots=True)
class OwnerRules:
    """The operator's rules. ``idle_s``: seconds without a sign of use after which the machine
    counts as idle, 0 to work while it is used too; ``max_load``: share of the cores that other
    programs may keep busy, 0 for no limit."""

    idle_s: float = 0.0
    hours: Hours | None = None
    max_load: float = 0.0

    @property
    def load_limit(self) -> float:
        """Share of the cores above which load counts as use; 0 if load does not count."""
        if self.max_load:
            return self.max_load
        if self.idle_s:
            return IDLE_LOAD
        return 0.0

    @property
    def any(self) -> bool:
        """True if the machine is not open all the time."""
        return bool(self.idle_s or self.hours or self.max_load)


@dataclass(frozen=True, slots=True)
class Pause:
    """A pause. ``detail``: a part of the sentence for this machine's people, perhaps empty;
    ``until``: its end in seconds of the machine's clock, None while nobody knows; ``since``: its
    beginning in Unix seconds, 0 where the sentence does not tell it."""

    by: By
    detail: str = ""
    until: float | None = None
    since: float = 0.0


# ----------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class PauseAsked:
    """The operator pauses the daemon for ``seconds``, or until a resume if None."""

    seconds: float | None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ResumeAsked:
    """The operator wants the daemon to work."""


@dataclass(frozen=True, slots=True)
class RunPaused:
    """The run's owner has paused the run, since ``since`` Unix seconds."""

    since: float
    reason: str = ""


@dataclass(frozen=True, slots=True)
class RunResumed:
    """The run's owner lets the run go on."""


@dataclass(frozen=True, slots=True)
class ReturnFailed:
    """The stage could not be taken back, because its memory is in use."""

    why: str


@dataclass(frozen=True, slots=True)
class Sampled:
    """The time of day in minutes since local midnight, and signs of use. ``input_s``: seconds since
    a key or the mouse was used, None if that is unknown; ``gpu``: another program that computes on
    the GPU, empty for none; ``load``: share of the cores that other programs keep busy, None if
    unknown."""

    minute: float
    input_s: float | None = None
    gpu: str = ""
    load: float | None = None


AvailabilityEvent = PauseAsked | ResumeAsked | RunPaused | RunResumed | ReturnFailed | Sampled


# ----------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Close:
    """Pause, or go on pausing for another reason."""

    pause: Pause


@dataclass(frozen=True, slots=True)
class Open:
    """Take part again."""


class Availability:
    """The machine. ``pause``: why it is closed now, None while it is open; ``by_run``: the pause of
    the run's owner, None without one. ``asked``: a pause of the operator that this start found;
    ``overruled``: rules that a resume before this start has set aside."""

    def __init__(
        self, rules: OwnerRules, asked: Pause | None = None, overruled: Collection[By] = ()
    ) -> None:
        self.rules = rules
        self.pause = asked
        self.by_run: Pause | None = None
        self._asked = asked
        self._failed: Pause | None = None
        self.overruled = set(overruled)
        """Rules that the operator has set aside, until they are open."""
        self._minute: float | None = None
        self._gpu = ""
        self._used: dict[By, float] = {}
        """Time of the last sign of use, by its kind."""
        self._above: float | None = None
        """Time since when other programs need the cores without a break."""

    def handle(self, event: AvailabilityEvent, now: float) -> list[Close | Open]:
        """Handle one event; ``now`` in seconds of a clock that nobody sets and that counts while
        the machine sleeps. Returns nothing while nothing changes."""
        match event:
            case PauseAsked(seconds, reason):
                until = None
                if seconds is not None:
                    until = now + seconds
                self._asked = Pause(By.OPERATOR, reason, until)
            case ResumeAsked():
                self._asked = None
                self._failed = None
                self.overruled |= {pause.by for pause in self._closing(now)}
            case RunPaused(since, reason):
                self.by_run = Pause(By.RUN, reason, since=since)
            case RunResumed():
                self.by_run = None
            case ReturnFailed(why):
                self._failed = Pause(By.MEMORY, why, now + RETRY_S)
            case Sampled():
                self._sample(event, now)
        return self._decide(now)

    def _sample(self, e: Sampled, now: float) -> None:
        if self._minute is None:
            # The first sample cannot show that a load lasts, so no overruled rule is open yet.
            self._used = dict.fromkeys(self.overruled, now)
        self._minute = e.minute
        if e.input_s is not None:
            self._used[By.INPUT] = now - e.input_s
        if e.gpu:
            self._gpu = e.gpu
            self._used[By.GPU] = now
        limit = self.rules.load_limit
        if e.load is None or not limit:
            return
        if e.load > limit:
            if self._above is None:
                self._above = now
            if now - self._above >= LOAD_FOR_S:
                self._used[By.LOAD] = now
            return
        self._above = None
        if e.load > RELEASE * limit and self._in_use(By.LOAD, now):
            self._used[By.LOAD] = now

    def _in_use(self, by: By, now: float) -> bool:
        at = self._used.get(by)
        return at is not None and now - at < self._needed(by)

    def _needed(self, by: By) -> float:
        """Seconds after a sign of use in which the machine still counts as used."""
        if by is By.INPUT:
            return self.rules.idle_s
        return max(CALM_S, self.rules.idle_s)

    def _closing(self, now: float) -> Iterator[Pause]:
        """Rules that close the machine now, without the operator's pause."""
        if self._failed is not None and self._failed.until is not None:
            if now < self._failed.until:
                yield self._failed
            else:
                self._failed = None
        hours = self.rules.hours
        if hours is not None and self._minute is not None and not hours.open(self._minute):
            until = now + 60.0 * hours.opens_in(self._minute)
            yield Pause(By.HOURS, f"{hours.said}, until {hours.next_begin(self._minute)}", until)
        if self.rules.idle_s and self._in_use(By.GPU, now):
            yield Pause(By.GPU, self._gpu)
        if self.rules.load_limit and self._in_use(By.LOAD, now):
            yield Pause(By.LOAD, f"above {self.rules.load_limit:.0%}")
        if self.rules.idle_s and self._in_use(By.INPUT, now):
            yield Pause(By.INPUT, f"{self.rules.idle_s / 60:g}")

    def _decide(self, now: float) -> list[Close | Open]:
        asked = self._asked
        if asked is not None and asked.until is not None and now >= asked.until:
            asked = None
            self._asked = None
        closing = list(self._closing(now))
        if self._minute is not None:
            self.overruled &= {pause.by for pause in closing}
        pauses = [pause for pause in closing if pause.by not in self.overruled]
        if self.by_run is not None:
            pauses.insert(0, self.by_run)
        if asked is not None:
            pauses.insert(0, asked)
        before = self.pause
        if not pauses:
            self.pause = None
            return [Open()] if before is not None else []
        if before is not None and _same(before, pauses[0]):
            return []
        self.pause = pauses[0]
        return [Close(self.pause)]


def _same(a: Pause, b: Pause) -> bool:
    """Return True if two pauses read the same. Only the end that the operator named is exact."""
    if By.OPERATOR in (a.by, b.by):
        return a == b
    if replace(a, until=None) != replace(b, until=None):
        return False
    if a.until is None or b.until is None:
        return a.until is b.until
    return abs(a.until - b.until) < SAME_S
