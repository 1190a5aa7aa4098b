"""What a plan of paths comes to: every task of every peer, replayed event by event. Pure, exact,
and the judge of all planners.

A peer computes one task at a time, first come first served, and idles ``gap`` after each. Links
have no contention. A forward that reaches a peer whose slots are all held waits in order of
arrival; a slot is held from the forward's arrival to the end of the backward. An ends peer launches
its micro-batches in the order of the plan, as many at a time as it has slots.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from node.scheduler.planning.problem import PathProblem, Route

Kind = Literal["f", "l", "b"]
"""Forward, loss, backward."""


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


@dataclass(frozen=True)
class Replayed:
    """``done[i]``: when micro-batch i was home again; those that never came are missing: the plan
    deadlocks."""

    tasks: tuple[ReplayTask, ...]
    done: dict[int, float]
    held: tuple[tuple[float, int, int], ...]
    """(time, peer, change of slots held), as it happened."""

    @property
    def makespan(self) -> float:
        """When the last came home; 0 if nothing did."""
        return max(self.done.values(), default=0.0)


def replay(problem: PathProblem, routes: Sequence[Route]) -> Replayed:
    """Run ``routes``, each (origin, peers...), in launch order.

    Events of the same instant are handled in the order in which they became known: that order is
    part of the model, for peers of one place have equal delays and ties are common.
    """
    delays, gap, compute, slots = problem.delays, problem.gap, problem.compute, problem.slots
    cost: dict[str, float] = {"f": 1.0, "l": problem.loss, "b": problem.backward}
    size = len(compute)
    waiting: dict[int, deque[int]] = {o: deque() for o in sorted(problem.counts)}
    for i, route in enumerate(routes):
        waiting[route[0]].append(i)
    events: list[tuple[float, int, str, int, Kind, int, int, float]] = []
    free, held = [0.0] * size, [0] * size
    ready: list[deque[tuple[float, Kind, int, int]]] = [deque() for _ in range(size)]
    parked: list[deque[tuple[int, int]]] = [deque() for _ in range(size)]
    tasks: list[ReplayTask] = []
    log: list[tuple[float, int, int]] = []
    done: dict[int, float] = {}
    tick = 0

    def at(
        t: float, what: str, n: int, kind: Kind = "f", i: int = 0, h: int = 0, came: float = 0.0
    ) -> None:
        nonlocal tick
        tick += 1
        heapq.heappush(events, (t, tick, what, n, kind, i, h, came))

    def take(t: float, n: int) -> None:
        held[n] += 1
        log.append((t, n, 1))

    def enqueue(t: float, n: int, kind: Kind, i: int, h: int) -> None:
        ready[n].append((t, kind, i, h))
        at(max(t, free[n]), "run", n)

    def launch(t: float, o: int) -> None:
        while waiting[o] and held[o] < slots[o]:
            take(t, o)
            enqueue(t, o, "f", waiting[o].popleft(), 0)

    for o in waiting:
        launch(0.0, o)
    while events:
        t, _, what, n, kind, i, h, came = heapq.heappop(events)
        if what == "run":
            if not ready[n]:
                continue
            if t < free[n] - 1e-12:
                at(free[n], "run", n)
                continue
            came, kind, i, h = ready[n].popleft()
            end = t + cost[kind] * compute[n]
            free[n] = end + gap
            tasks.append(ReplayTask(t, end, n, kind, i, h, came))
            at(end, "end", n, kind, i, h)
            if ready[n]:
                at(free[n], "run", n)
        elif what == "land":
            if kind != "f":
                enqueue(t, n, kind, i, h)
            elif held[n] < slots[n]:
                take(t, n)
                enqueue(t, n, kind, i, h)
            else:
                parked[n].append((i, h))
        else:
            route = routes[i]
            if kind == "f" and h + 1 < len(route):
                at(t + delays[n][route[h + 1]], "land", route[h + 1], "f", i, h + 1)
            elif kind == "f":
                at(t + delays[n][route[0]], "land", route[0], "l", i, h)
            elif kind == "l":
                at(t + delays[n][route[h]], "land", route[h], "b", i, h)
            else:
                held[n] -= 1
                log.append((t, n, -1))
                if h == 0:
                    done[i] = t
                    launch(t, n)
                else:
                    at(t + delays[n][route[h - 1]], "land", route[h - 1], "b", i, h - 1)
                    if parked[n]:
                        j, g = parked[n].popleft()
                        take(t, n)
                        enqueue(t, n, "f", j, g)
    return Replayed(tuple(tasks), done, tuple(log))


def solo(problem: PathProblem, route: Route) -> float:
    """Seconds of a route when nobody else is there, from launch to home."""
    delays, o, last = problem.delays, route[0], route[-1]
    way = sum(delays[a][b] + delays[b][a] for a, b in zip(route, route[1:], strict=False))
    work = (
        sum(problem.compute[n] for n in route) * (1 + problem.backward)
        + problem.compute[o] * problem.loss
    )
    return way + delays[last][o] + delays[o][last] + work
