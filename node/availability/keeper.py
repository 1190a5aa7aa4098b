"""The service around the machine: samples the signs of use, takes the operator's commands, and
tells the daemon when to pause and when to work.

Enters: commands, samples. Leaves: :attr:`AvailabilityKeeper.paused` and two events that the daemon
waits for. Never: the daemon's stage, which :mod:`node.app.daemon` gives up and takes again.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from node.availability import kept
from node.availability.hours import Hours
from node.availability.kept import KeptPause
from node.availability.machine import (
    Availability,
    AvailabilityEvent,
    By,
    Close,
    OwnerRules,
    Pause,
    PauseAsked,
    ResumeAsked,
    ReturnFailed,
    RunPaused,
    RunResumed,
    Sampled,
)
from node.availability.settings import AvailabilitySettings
from node.availability.usage import Usage, UsageMeter
from node.availability.words import PUBLIC, is_paused, paused_words, reason
from node.core.clock import ClockReading
from node.telemetry.events import Journal

LOOK_S = 2.0
"""Seconds between two samples."""


def rules_of(settings: AvailabilitySettings) -> OwnerRules:
    """The operator's rules. Raises UsageFault for hours that are none."""
    hours = None
    if settings.hours:
        hours = Hours.parse(settings.hours)
    return OwnerRules(60.0 * settings.idle_only, hours, settings.max_load / 100.0)


def minute_of_day(wall: float) -> float:
    """Minutes since local midnight at ``wall`` Unix seconds."""
    # A laptop travels: its time zone may be another one than at the start of the daemon.
    time.tzset()
    there = time.localtime(wall)
    return 60.0 * there.tm_hour + there.tm_min + there.tm_sec / 60.0


class PauseCount:
    """Pauses since the start of a daemon. Times are seconds of a clock that never stops."""

    def __init__(self, now: float, *, paused: bool) -> None:
        self.pauses = int(paused)
        """Number of pauses, the one under way included."""
        self._paused_s = 0.0
        """Seconds of the pauses that are over."""
        self._since: float | None = None
        if paused:
            self._since = now

    def begin(self, now: float) -> None:
        """A pause begins."""
        self._since = now
        self.pauses += 1

    def end(self, now: float) -> None:
        """The pause under way is over."""
        self._paused_s = self.seconds(now)
        self._since = None

    def seconds(self, now: float) -> float:
        """Seconds of all pauses, the one under way included."""
        if self._since is None:
            return self._paused_s
        return self._paused_s + now - self._since


class AvailabilityKeeper:
    """Availability of one daemon. ``path``: file of the operator's pause; ``usage``: looks for
    signs of use, and may block; ``clock``: reads the machine's clocks."""

    def __init__(
        self,
        settings: AvailabilitySettings,
        path: Path,
        journal: Journal,
        usage: Callable[[], Usage] | None = None,
        clock: Callable[[], ClockReading] = ClockReading.now,
    ) -> None:
        self.rules = rules_of(settings)
        self._path = path
        self._journal = journal
        self._clock = clock
        self.measures = ""
        """The measured signs of use, for people; empty for none."""
        self._usage = usage
        if usage is None and (self.rules.idle_s or self.rules.load_limit):
            meter = UsageMeter(idle=bool(self.rules.idle_s), load=bool(self.rules.load_limit))
            self.measures = meter.sources()
            self._usage = meter.read
        overruled = kept.taken(self._overruled_path)
        self.machine = Availability(self.rules, self._recalled(), overruled)
        self.count = PauseCount(self._clock().always, paused=self.machine.pause is not None)
        self._ends_at: float | None = None
        self.open = asyncio.Event()
        self.closed = asyncio.Event()
        self.on_change: Callable[[], None] = lambda: None
        """The reason of the pause is another one, or there is none any more."""
        self._follow()

    @property
    def _overruled_path(self) -> Path:
        """The file of the rules that a resume has overruled, while the daemon changes its stage."""
        return self._path.with_name("overruled.json")

    def _recalled(self) -> Pause | None:
        found = kept.read(self._path)
        if found is None:
            return None
        reading = self._clock()
        left_s = found.left_s(reading.wall)
        if left_s is None:
            return Pause(By.OPERATOR, found.reason)
        if left_s <= 0:
            return None
        return Pause(By.OPERATOR, found.reason, reading.always + left_s)

    # ----------------------------------------------------------- looking

    @property
    def paused(self) -> Pause | None:
        """The pause in force; None while the daemon works."""
        return self.machine.pause

    @property
    def reason(self) -> str:
        """The reason of the pause in one line, empty while there is none. A pause of the run's
        owner beside the operator's is named too: both must end."""
        if self.paused is None:
            return ""
        said = reason(self.paused, self._ends_at)
        by_run = self.machine.by_run
        if by_run is not None and self.paused.by is not By.RUN:
            said += f"; the run {is_paused(reason(by_run, None))}"
        return said

    @property
    def public_reason(self) -> str:
        """The reason for other peers, empty while there is none."""
        if self.paused is None:
            return ""
        return PUBLIC[self.paused.by]

    @property
    def ends_at(self) -> float:
        """End of the pause in Unix seconds, 0 while nobody knows."""
        return self._ends_at or 0.0

    def seconds_paused(self) -> float:
        """Seconds that this daemon has been paused since its start."""
        return self.count.seconds(self._clock().always)

    # ----------------------------------------------------------- commands and samples

    def pause(self, seconds: float | None, why: str) -> None:
        """Pause for ``seconds``, or until :meth:`resume` if None. The pause is kept on the disk.
        Raises OSError if it cannot be, and then pauses all the same."""
        self._feed(PauseAsked(seconds, why))
        ends_at = 0.0
        if seconds is not None:
            ends_at = self._clock().wall + seconds
        kept.write(self._path, KeptPause(seconds, ends_at, why))

    def resume(self) -> None:
        """End the operator's pause, and set aside the rules that close the machine now. Raises
        OSError if the pause cannot be removed from the disk."""
        self._feed(ResumeAsked())
        kept.write(self._path, None)

    def hand_on(self) -> None:
        """Write the rules that the operator has overruled to the disk, for the process that
        replaces this one. If the disk takes nothing, only they are lost."""
        with contextlib.suppress(OSError):
            kept.hand_on(self._overruled_path, self.machine.overruled)

    def run_paused(self, since: float, why: str) -> None:
        """The run's owner has paused the run, at ``since`` Unix seconds. The order is kept
        elsewhere."""
        self._feed(RunPaused(since, why))

    def run_resumed(self) -> None:
        """The run's owner lets the run go on."""
        self._feed(RunResumed())

    @property
    def paused_by_run(self) -> bool:
        """True while the run's owner pauses the run, whatever else pauses this daemon."""
        return self.machine.by_run is not None

    @property
    def run_paused_at(self) -> float:
        """Unix second from which the run's owner pauses the run; 0 while the run is not paused."""
        by_run = self.machine.by_run
        if by_run is None:
            return 0.0
        return by_run.since

    def failed(self, why: str) -> None:
        """The daemon could not take its stage back, because others have the memory."""
        self._feed(ReturnFailed(why))

    async def sample(self) -> None:
        """Look once."""
        usage = Usage()
        if self._usage is not None:
            usage = await asyncio.to_thread(self._usage)
        minute = minute_of_day(self._clock().wall)
        self._feed(Sampled(minute, usage.input_s, usage.gpu, usage.load))

    async def run(self) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(LOOK_S)
            await self.sample()

    def _feed(self, event: AvailabilityEvent) -> None:
        before = self.paused
        now = self._clock().always
        for action in self.machine.handle(event, now):
            if isinstance(action, Close) and before is None:
                self.count.begin(now)
            elif not isinstance(action, Close) and before is not None:
                self.count.end(now)
                if before.by is By.OPERATOR and isinstance(event, Sampled):
                    # It has run out, so a file that stays says nothing new.
                    with contextlib.suppress(OSError):
                        kept.write(self._path, None)
            self._follow()
            said = "goes on: nothing pauses this daemon any more"
            if isinstance(action, Close):
                said = paused_words(self.reason)
            self._journal.emit("daemon", "availability", said)
            self.on_change()

    def _follow(self) -> None:
        """Bring the events and the end of the pause up to the machine."""
        pause = self.paused
        self._ends_at = None
        if pause is None:
            self.closed.clear()
            self.open.set()
            return
        if pause.until is not None:
            reading = self._clock()
            self._ends_at = reading.wall + pause.until - reading.always
        self.open.clear()
        self.closed.set()
