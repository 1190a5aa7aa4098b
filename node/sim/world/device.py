"""The one thing a simulated peer computes with: jobs one after the other, backward before forward.
A job runs when its turn comes, and is done when the virtual time that it has spent is over."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from itertools import count
from typing import Any

from node.pipeline.device import DeviceThread, Priority
from node.sim.world.loop import ProcessLoop, ran


class SimDevice(DeviceThread):
    """``slowness`` stretches every job; ``busy_s`` is how long it has worked."""

    def __init__(self, loop: ProcessLoop, slowness: float = 1.0) -> None:
        self._loop, self.slowness, self.busy_s = loop, slowness, 0.0
        self._began = loop.time()
        self._jobs: list[tuple[int, int, asyncio.Future[Any], Callable[[], Any]]] = []
        self._counter = count()
        self._busy, self._spent, self._running_since = False, 0.0, 0.0

    @property
    def idle_s(self) -> float:  # type: ignore[override]
        return self._loop.time() - self._began - self.busy_s

    def now(self) -> float:
        return self._loop.time() + self._spent

    def spend(self, seconds: float) -> None:
        """The job that runs takes so much longer."""
        self._spent += seconds * self.slowness

    def enqueue(self, priority: Priority, fn: Callable[[], Any]) -> Any:
        future = self._loop.create_future()
        heapq.heappush(self._jobs, (int(priority), next(self._counter), future, fn))
        if not self._busy:
            self._next()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for _, _, future, _ in self._jobs:
            future.cancel()
        self._jobs.clear()

    def _next(self) -> None:
        while self._jobs and not self._busy:
            _, _, future, fn = heapq.heappop(self._jobs)
            if future.cancelled():
                continue
            self._spent = 0.0
            tell = ran(future, fn)
            took, self._spent = self._spent, 0.0
            self.busy_s += took
            if took > 0:
                self._busy = True
                self._loop.call_later(took, self._done, tell)
            else:
                tell()

    def _done(self, tell: Callable[[], object]) -> None:
        self._busy = False
        tell()
        self._next()
