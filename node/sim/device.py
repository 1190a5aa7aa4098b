"""The one thing a simulated peer computes with: jobs one after the other, backward before forward,
each takes its time."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from enum import IntEnum
from typing import Any

from node.sim.world import Host


class Priority(IntEnum):
    """What goes first."""

    BACKWARD = 0
    LOSS = 1
    FORWARD = 2
    STEP = 3


class Device:
    """``slowness`` stretches every job; ``busy_s`` is how long it has worked."""

    def __init__(self, host: Host, slowness: float = 1.0) -> None:
        self._host, self.slowness, self.busy_s = host, slowness, 0.0
        self._jobs: list[tuple[int, int, float, Callable[..., None], tuple[Any, ...]]] = []
        self._count, self._busy = 0, False

    def run(
        self, priority: Priority, seconds: float, then: Callable[..., None], *args: Any
    ) -> None:
        """Work for ``seconds``, then call."""
        self._count += 1
        heapq.heappush(self._jobs, (priority, self._count, seconds, then, args))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        if not self._jobs:
            return
        _, _, seconds, then, args = heapq.heappop(self._jobs)
        self._busy = True
        took = seconds * self.slowness
        self.busy_s += took
        self._host.after(took, self._done, then, args)

    def _done(self, then: Callable[..., None], args: tuple[Any, ...]) -> None:
        self._busy = False
        then(*args)
        if not self._busy:
            self._next()
