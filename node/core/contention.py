"""Time that the threads of this process wait for a processor, by Linux's count."""

import contextlib
import os

TASKS = "/proc/self/task"
LEAST_S = 0.02
"""Seconds of running and waiting below which nothing is concluded from them."""


class Contention:
    """Measures between two calls. ``tasks``: the directory with one entry for each thread.
    ``last``: the share that the last call found, 0 after a rest."""

    def __init__(self, tasks: str = TASKS) -> None:
        self.last = 0.0
        self._tasks = tasks
        self._before: dict[str, tuple[int, int]] = {}

    def share(self) -> float:
        """Share of the time since the last call for which threads that could run had to wait for a
        processor: 0 on an idle machine, 0.9 beside nine busy processes on one core. 0 at the first
        call and where the system does not tell."""
        now = self._read()
        before = self._before
        self._before = now
        ran_ns = waited_ns = 0
        for thread in now.keys() & before.keys():
            ran_ns += now[thread][0] - before[thread][0]
            waited_ns += now[thread][1] - before[thread][1]
        total_ns = ran_ns + waited_ns
        self.last = 0.0
        if total_ns > LEAST_S * 1e9:
            self.last = waited_ns / total_ns
        return self.last

    def rest(self) -> float:
        """Forget the last call: the next share counts from the call after it. Returns 0."""
        self._before = {}
        self.last = 0.0
        return self.last

    def _read(self) -> dict[str, tuple[int, int]]:
        """Nanoseconds of running and of waiting, by thread."""
        found: dict[str, tuple[int, int]] = {}
        with contextlib.suppress(OSError):
            for thread in os.listdir(self._tasks):
                with contextlib.suppress(OSError, ValueError):
                    with open(f"{self._tasks}/{thread}/schedstat", encoding="ascii") as file:
                        ran_ns, waited_ns, _ = map(int, file.read().split())
                    found[thread] = ran_ns, waited_ns
        return found
