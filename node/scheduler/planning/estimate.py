"""The makespan of a plan, computed as fast as Python allows: the search evaluates it thousands of
times. Pure.

The twin of :func:`node.scheduler.planning.replay.replay`, which decides. Both agree except where
several events have the very same instant: their order is not kept here. Because a peer serves first
come first, a task's start is known when it arrives; so a task costs one event.
"""

import heapq
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from node.scheduler.planning.problem import PathProblem, Route

INFINITE = float("inf")


class RouteTasks(NamedTuple):
    """The tasks of a route in order: forwards, loss, backwards. ``ways[k]``: delay from task k to
    the next; ``rest[k]``: seconds from arrival at task k to home when nobody is in the way."""

    peers: tuple[int, ...]
    times: tuple[float, ...]
    ways: tuple[float, ...]
    rest: tuple[float, ...]


class Estimator:
    """Evaluates plans of one problem. Keeps the steps of every route it has seen."""

    def __init__(self, problem: PathProblem) -> None:
        self.problem = problem
        self._steps: dict[Route, RouteTasks] = {}
        self.home: dict[int, float] = {}
        """Times at which the micro-batches of the plan evaluated last were home."""

    def steps(self, route: Route) -> RouteTasks:
        """The tasks of a route."""
        found = self._steps.get(route)
        if found is not None:
            return found
        p = self.problem
        o = route[0]
        peers = (*route, o, *reversed(route))
        forward = [p.compute[n] for n in route]
        times = (*forward, p.compute[o] * p.loss, *(x * p.backward for x in reversed(forward)))
        ways = (*(p.delays[a][b] for a, b in zip(peers, peers[1:], strict=False)), 0.0)
        back = accumulate(t + way for t, way in zip(times[::-1], ways[::-1], strict=True))
        made = RouteTasks(peers, times, ways, tuple(back)[::-1])
        if len(self._steps) > 200_000:
            self._steps.clear()
        self._steps[route] = made
        return made

    def solo(self, route: Route) -> float:
        """Seconds of a route in an otherwise empty swarm."""
        return self.steps(route).rest[0]

    def play(
        self, routes: Sequence[Route], orders: Mapping[int, Sequence[int]], cutoff: float = INFINITE
    ) -> float:
        """The makespan; infinite when it is above ``cutoff`` or micro-batches are lost.
        ``orders[o]``: indices into ``routes`` in launch order of ends peer o."""
        problem = self.problem
        steps = self.steps
        gap = problem.gap
        slots = problem.slots
        size = len(slots)
        middle = problem.length
        last = 2 * middle
        free = [0.0] * size
        held = [0] * size
        ends: dict[int, deque[float]] = {}
        parked: dict[int, deque[tuple[int, int]]] = {}
        plans = [steps(route) for route in routes]
        home: dict[int, float] = {}
        self.home = home
        heap: list[tuple[float, int, int, int]] = []
        push = heapq.heappush
        pop = heapq.heappop
        tick = 0
        upcoming: dict[int, int] = {}
        for o in sorted(orders):
            order = orders[o]
            first = min(slots[o], len(order))
            upcoming[o] = first
            t = 0.0
            for i in order[:first]:
                plan = plans[i]
                if t + plan.rest[0] > cutoff:
                    return INFINITE
                end = t + plan.times[0]
                tick += 1
                push(heap, (end + plan.ways[0], tick, i, 1))
                t = end + gap
            free[o] = t
        top = 0.0
        while heap:
            t, _, i, k = pop(heap)
            peers, times, ways, rest = plans[i]
            if k < 0:
                # A slot falls free for the forward that has waited longest.
                k = -k
                n = peers[k]
                ends[n].popleft()
                parked[n].popleft()
            elif t + rest[k] > cutoff:
                return INFINITE
            else:
                n = peers[k]
                if 0 < k < middle:
                    queue = parked.get(n)
                    if queue is None:
                        queue = parked[n] = deque()
                        ends[n] = deque()
                    leaving = ends[n]
                    if not queue:
                        while leaving and leaving[0] <= t:
                            leaving.popleft()
                            held[n] -= 1
                    if queue or held[n] >= slots[n]:
                        queue.append((i, k))
                        if len(leaving) >= len(queue):
                            tick += 1
                            push(heap, (leaving[len(queue) - 1], tick, i, -k))
                        continue
                    held[n] += 1
            start = free[n]
            if start < t:
                start = t
            end = start + times[k]
            free[n] = end + gap
            if k < last:
                tick += 1
                push(heap, (end + ways[k], tick, i, k + 1))
                if k > middle:
                    leaving = ends[n]
                    queue = parked[n]
                    leaving.append(end)
                    if len(leaving) <= len(queue):
                        j, g = queue[len(leaving) - 1]
                        tick += 1
                        push(heap, (end, tick, j, -g))
            else:
                home[i] = end
                if end > top:
                    top = end
                at = upcoming[n]
                if at < len(orders[n]):
                    upcoming[n] = at + 1
                    tick += 1
                    push(heap, (end, tick, orders[n][at], 0))
        if len(home) == len(routes) and top <= cutoff:
            return top
        return INFINITE
