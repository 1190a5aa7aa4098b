"""The replay of a plan of paths: every task of every peer, event by event. Pure, exact, and the
judge of all planners.

A peer computes one task at a time, first come first served, and idles ``gap`` after each. Links
have no contention. A forward that finds all slots of a peer held waits in order of arrival; a slot
is held from the forward's arrival to the end of the backward. An ends peer launches its
micro-batches in the order of the plan; the number under way at once is its number of slots. Events
of the same instant are handled in the order in which they became known: that order is part of the
model, because peers of one place have equal delays and ties are common.
"""

import heapq
from collections import deque
from collections.abc import Sequence
from typing import Literal, NamedTuple

from node.scheduler.planning.problem import PathProblem, Route

Kind = Literal["f", "l", "b"]
"""Forward, loss, backward."""
What = Literal["run", "land", "end"]
"""A peer may begin a task; a micro-batch arrives at a peer; a peer ends its task."""


class ReplayTask(NamedTuple):
    """A task of micro-batch ``mb`` at ``peer``; ``hop``: place in its route. ``came``: when it
    arrived at the peer."""

    start: float
    end: float
    peer: int
    kind: Kind
    mb: int
    hop: int
    came: float


class ReplayedRun:
    """The result of :func:`replay`. ``tasks``: in the order in which they began. ``done[i]``: when
    micro-batch i was home again; those that never came are missing: the plan deadlocks."""

    def __init__(self, problem: PathProblem, routes: Sequence[Route]) -> None:
        size = len(problem.compute)
        self.tasks: list[ReplayTask] = []
        self.done: dict[int, float] = {}
        self._problem = problem
        self._routes = routes
        self._now = 0.0
        self._tick = 0
        self._step = [0] * len(routes)
        """Present task of each micro-batch, or the one it travels to: forwards 0..L-1, loss L,
        backwards L+1..2L."""
        self._waiting = {o: deque(mine) for o, mine in problem.launches(routes).items()}
        self._events: list[tuple[float, int, What, int, int]] = []
        """Time, order in which they became known, what happens, peer, micro-batch (-1: none)."""
        self._free = [0.0] * size
        self._held = [0] * size
        self._ready: list[deque[tuple[float, int]]] = [deque() for _ in range(size)]
        self._parked: list[deque[int]] = [deque() for _ in range(size)]
        for o in self._waiting:
            self._launch(o)

    @property
    def makespan(self) -> float:
        """Time of the last homecoming up to now; 0 if nothing came home."""
        return max(self.done.values(), default=0.0)

    def finish(self) -> None:
        """Let everything happen."""
        while self._events:
            self._now, _, what, n, i = heapq.heappop(self._events)
            if what == "run":
                self._run(n)
            elif what == "land":
                self._land(n, i)
            else:
                self._end(n, i)

    def _at(self, t: float, what: What, n: int, i: int = -1) -> None:
        self._tick += 1
        heapq.heappush(self._events, (t, self._tick, what, n, i))

    def _run(self, n: int) -> None:
        ready = self._ready[n]
        t = self._now
        if not ready:
            return
        if t < self._free[n] - 1e-12:
            self._at(self._free[n], "run", n)
            return
        came, i = ready.popleft()
        p = self._problem
        k = self._step[i]
        length = len(self._routes[i])
        kind: Kind = "b"
        if k < length:
            kind = "f"
        elif k == length:
            kind = "l"
        end = t + {"f": 1.0, "l": p.loss, "b": p.backward}[kind] * p.compute[n]
        hop = min(k, 2 * length - k, length - 1)
        self.tasks.append(ReplayTask(t, end, n, kind, i, hop, came))
        self._free[n] = end + p.gap
        self._at(end, "end", n, i)
        if ready:
            self._at(max(t, self._free[n]), "run", n)

    def _enqueue(self, n: int, i: int) -> None:
        self._ready[n].append((self._now, i))
        self._at(max(self._now, self._free[n]), "run", n)

    def _land(self, n: int, i: int) -> None:
        if self._step[i] >= len(self._routes[i]):
            self._enqueue(n, i)
        elif self._held[n] < self._problem.slots[n]:
            self._admit(n, i)
        else:
            self._parked[n].append(i)

    def _admit(self, n: int, i: int) -> None:
        self._held[n] += 1
        self._enqueue(n, i)

    def _end(self, n: int, i: int) -> None:
        route = self._routes[i]
        k = self._step[i]
        length = len(route)
        if k < 2 * length:
            self._step[i] = k + 1
            there = route[0] if k + 1 == length else route[min(k + 1, 2 * length - k - 1)]
            self._at(self._now + self._problem.delays[n][there], "land", there, i)
        if k > length:
            self._release(n)
        if k == 2 * length:
            self.done[i] = self._now
            self._launch(n)

    def _release(self, n: int) -> None:
        self._held[n] -= 1
        while self._parked[n] and self._held[n] < self._problem.slots[n]:
            self._admit(n, self._parked[n].popleft())

    def _launch(self, o: int) -> None:
        waiting = self._waiting[o]
        while waiting and self._held[o] < self._problem.slots[o]:
            self._admit(o, waiting.popleft())


def replay(problem: PathProblem, routes: Sequence[Route]) -> ReplayedRun:
    """Run ``routes``, each (origin, peers...), in launch order, to the end."""
    run = ReplayedRun(problem, routes)
    run.finish()
    return run
