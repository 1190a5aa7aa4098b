"""Schedule of the samples in which the model goes on with a fixed prompt, so that people see it
learn to write. Pure.

A sample costs the swarm forward passes, so there are few: a sample at every few epochs, and never
more than a small share of the time.
"""

from dataclasses import dataclass

AGAIN_S = 60.0
"""Seconds until a sample that failed is tried again; doubled with each further failure."""
MOST_AGAIN_S = 900.0


@dataclass(frozen=True, slots=True)
class SamplingPace:
    """How often samples are taken. ``every``: epochs between two; ``least_s``: seconds from the end
    of one to the beginning of the next; ``share``: most of the time that they take. Texts without a
    pause cost training 18 % of its speed (docs/benchmarks/history.md), so the default costs 2 %."""

    every: int = 4
    least_s: float = 30.0
    share: float = 0.1


@dataclass(frozen=True, slots=True)
class Reached:
    """The run is at ``epoch``; ``watched``: somebody wants samples; ``last``: it is complete."""

    epoch: int
    watched: bool = True
    last: bool = False


@dataclass(frozen=True, slots=True)
class SampleEnded:
    """A sample ended after ``seconds``; ``well``: with a text."""

    seconds: float
    well: bool


@dataclass(frozen=True, slots=True)
class TakeSample:
    """Have the model go on with the prompt now, for this epoch."""

    epoch: int


class SampleClock:
    """The state machine. ``newest``: epoch of the newest sample that is kept, -1 for none."""

    def __init__(self, newest: int = -1, pace: SamplingPace | None = None) -> None:
        self._newest = newest
        self._pace = pace or SamplingPace()
        self._taking = -1
        self._not_before = 0.0
        self._failures = 0

    def handle(self, event: Reached | SampleEnded, now: float) -> list[TakeSample]:
        """The samples to take now, at most one. ``now``: monotonic seconds."""
        match event:
            case Reached():
                return self._reached(event, now)
            case SampleEnded(seconds, well):
                self._ended(seconds, well, now)
                return []

    def _reached(self, event: Reached, now: float) -> list[TakeSample]:
        if event.epoch < self._newest:
            # The swarm went back, or this is another run.
            self._newest = -1
        due = self._newest < 0 or event.epoch >= self._newest + self._pace.every
        if event.last:
            due = event.epoch != self._newest
        if not (due and event.watched) or self._taking >= 0 or now < self._not_before:
            return []
        self._taking = event.epoch
        return [TakeSample(event.epoch)]

    def _ended(self, seconds: float, well: bool, now: float) -> None:
        pause = max(self._pace.least_s, seconds / self._pace.share)
        if well:
            self._newest = self._taking
            self._failures = 0
        else:
            pause = max(pause, min(MOST_AGAIN_S, AGAIN_S * 2**self._failures))
            self._failures = min(self._failures + 1, 10)
        self._taking = -1
        self._not_before = now + pause
