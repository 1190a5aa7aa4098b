"""Processor time that other programs took while a benchmark ran."""

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

STAT = Path("/proc/stat")
TICK = 1 / os.sysconf("SC_CLK_TCK")
IDLE, WAITS, STOLEN = 3, 4, 7
"""Fields of the first line of /proc/stat: nothing to do, waits for a disk, taken by the host."""
WORKING = 8
"""Number of fields that are read. Those behind them count guests a second time."""


@dataclass(frozen=True)
class Load:
    """Shares of all cores' time. ``others``: taken by programs that the benchmark did not start;
    ``stolen``: taken by the host of this virtual machine."""

    others: float
    stolen: float

    def __str__(self) -> str:
        return f"other programs {self.others:.0%} of the cores, the host {self.stolen:.0%}"


@dataclass(frozen=True)
class Moment:
    """Counters of processor time at a moment, in seconds over all cores. ``ours``: of this process
    and its child processes."""

    busy: float
    stolen: float
    all: float
    ours: float

    @classmethod
    def now(cls) -> "Moment":
        """Read the counters. Where the system has none, all are 0."""
        try:
            words = STAT.read_text().split("\n", 1)[0].split()[1 : 1 + WORKING]
        except OSError:
            return cls(0.0, 0.0, 0.0, 0.0)
        ticks = [int(word) * TICK for word in words]
        busy = sum(ticks) - ticks[IDLE] - ticks[WAITS] - ticks[STOLEN]
        return cls(busy, ticks[STOLEN], sum(ticks), _ours())

    def load_since(self, before: "Moment") -> Load:
        """The load between two moments; without any time between them no load."""
        passed = self.all - before.all
        if passed <= 0:
            return Load(0.0, 0.0)
        others = (self.busy - before.busy) - (self.ours - before.ours)
        return Load(max(0.0, others) / passed, (self.stolen - before.stolen) / passed)


def _ours() -> float:
    """Seconds of this process, of its ended children and of all that still run."""
    spent = sum(os.times()[:4])
    for child in psutil.Process().children(recursive=True):
        try:
            spent += sum(child.cpu_times()[:4])
        except psutil.Error:  # it has ended meanwhile
            continue
    return spent
