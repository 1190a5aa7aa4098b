"""What a plan of paths comes to: every task of every peer, replayed event by event. Pure, exact,
and the judge of all planners.

A peer computes one task at a time, first come first served, and idles ``gap`` after each. Links
have no contention. A forward that reaches a peer whose slots are all held waits in order of
arrival; a slot is held from the forward's arrival to the end of the backward. An ends peer launches
its micro-batches in the order of the plan, as many at a time as it has slots. Events of the same
instant are handled in the order in which they became known: that order is part of the model, for
peers of one place have equal delays and ties are common.

While it runs, peers may die, stall, drift and join. What happens to a micro-batch when a peer of
its path dies (nobody's work is counted twice):
  before its forward there     its path is bent to another replica; the peer before sends again what
                               it keeps until the backward
  between forward and backward the replacement repeats that one forward from what the peer before
                               keeps, then takes the backward
  its origin                   it starts again at another ends peer
  nobody left in the stage     another stage, if it was not there yet and the rules allow; else it
                               is dropped
"""

import heapq
import math
from collections import defaultdict, deque
from collections.abc import Sequence
from copy import copy
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


WAITING, TRAVELS, PARKED, QUEUED, RUNS, HELD, DONE, DROPPED = range(8)
"""Where a micro-batch is: not launched, on its way, at a full peer, in a queue, at work, before a
repair, home, given up."""


class Token(NamedTuple):
    """A micro-batch (``hop`` -1), or the repeated forward of its ``hop`` at a replacement."""

    mb: int
    hop: int = -1


class ReplayedRun:
    """``done[i]``: when micro-batch i was home again; those that never came are missing: the plan
    deadlocks. ``step[i]``: the task micro-batch i is at or travels to: forwards 0..L-1, loss L,
    backwards L+1..2L."""

    def __init__(self, problem: PathProblem, routes: Sequence[Route]) -> None:
        self.problem, self.now, self.tick = problem, 0.0, 0
        size = len(problem.compute)
        self.routes = [list(route) for route in routes]
        self.waiting = {o: deque(mine) for o, mine in problem.launches(routes).items()}
        self.tasks: list[ReplayTask] = []
        self.step, self.state = [0] * len(routes), [WAITING] * len(routes)
        self.version: defaultdict[Token, int] = defaultdict(int)
        self.holds: list[set[int]] = [set() for _ in routes]
        self.repairs: set[tuple[int, int]] = set()
        self.after: dict[tuple[int, int], list[Token]] = {}
        self.events: list[tuple[float, int, str, int, Token, int]] = []
        self.free, self.held = [0.0] * size, [0] * size
        self.ready: list[deque[tuple[float, Token, int]]] = [deque() for _ in range(size)]
        self.parked: list[deque[tuple[Token, int]]] = [deque() for _ in range(size)]
        self.dead: set[int] = set()
        self.done: dict[int, float] = {}
        self.again = 0
        """Micro-batches that started again from their origin."""
        for o in self.waiting:
            self._launch(o)

    def copy(self) -> "ReplayedRun":
        """What would be: to try something and look where it ends."""
        new = copy(self)
        new.routes = [list(r) for r in self.routes]
        new.waiting = {o: deque(w) for o, w in self.waiting.items()}
        new.step, new.state = self.step[:], self.state[:]
        new.version, new.tasks = self.version.copy(), self.tasks[:]
        new.holds = [set(h) for h in self.holds]
        new.after = {k: v[:] for k, v in self.after.items()}
        new.events, new.repairs = self.events[:], set(self.repairs)
        new.free, new.held = self.free[:], self.held[:]
        new.ready = [deque(q) for q in self.ready]
        new.parked = [deque(q) for q in self.parked]
        new.dead, new.done = set(self.dead), dict(self.done)
        return new

    # ------------------------------------------------------------ what is

    def peer(self, i: int, k: int) -> int:
        """Where task k of a micro-batch is done."""
        route = self.routes[i]
        return route[0] if k == len(route) else route[min(k, 2 * len(route) - k)]

    def open_from(self, i: int) -> int:
        """The first hop of micro-batch i to which nothing was sent yet; its length when there is
        none."""
        if self.state[i] == WAITING:
            return 1
        return (
            len(self.routes[i])
            if self.state[i] in (DONE, DROPPED)
            else min(self.step[i] + 1, len(self.routes[i]))
        )

    def needs(self, i: int, h: int) -> bool:
        """Whether the backward of hop h is still to come."""
        return self.state[i] not in (DONE, DROPPED) and self.step[i] <= 2 * len(self.routes[i]) - h

    @property
    def makespan(self) -> float:
        """When the last came home, so far; 0 if nothing did."""
        return max(self.done.values(), default=0.0)

    # ------------------------------------------------------------ time

    def until(self, t: float) -> None:
        """Let everything before t happen."""
        while self.events and self.events[0][0] < t:
            self._next()
        self.now = max(self.now, t)

    def finish(self) -> float:
        """Let everything happen. Micro-batches that wait for each other in a ring are resolved: one
        of them starts again on a rising path. The makespan; infinite when some can never end."""
        left = 4 * len(self.routes)
        while True:
            while self.events:
                self._next()
            stuck = [i for i, state in enumerate(self.state) if state == PARKED]
            if not stuck or not left:
                break
            left -= 1
            i = stuck[-1]
            self.routes[i][1:] = sorted(self.routes[i][1:], key=lambda n: self.problem.stage_of[n])
            self.restart(i, self.routes[i][0])
        return (
            self.makespan if all(state in (DONE, DROPPED) for state in self.state) else float("inf")
        )

    def _at(self, t: float, what: str, n: int, token: Token) -> None:
        self.tick += 1
        heapq.heappush(self.events, (t, self.tick, what, n, token, self.version[token]))

    def _next(self) -> None:
        self.now, _, what, n, token, version = heapq.heappop(self.events)
        if what == "run":
            self._run(n)
        elif what == "free":
            self._launch(n)
        elif self.version[token] != version:
            return
        elif what == "land":
            self._land(n, token)
        else:
            self._end(n, token)

    def _run(self, n: int) -> None:
        ready, t = self.ready[n], self.now
        if not ready:
            return
        if t < self.free[n] - 1e-12:
            self._at(self.free[n], "run", n, Token(-1))
            return
        came, token, version = ready.popleft()
        if self.version[token] == version:
            p, i, length = self.problem, token.mb, len(self.routes[token.mb])
            k = token.hop if token.hop >= 0 else self.step[i]
            kind: Kind = "f" if k < length else "l" if k == length else "b"
            end = t + {"f": 1.0, "l": p.loss, "b": p.backward}[kind] * p.compute[n]
            hop = min(k, 2 * length - k, length - 1)
            self.tasks.append(ReplayTask(t, end, n, kind, i, hop, came))
            self.free[n] = end + p.gap
            if token.hop < 0:
                self.state[i] = RUNS
            self._at(end, "end", n, token)
        if ready:
            self._at(max(t, self.free[n]), "run", n, Token(-1))

    def _enqueue(self, n: int, token: Token) -> None:
        if token.hop < 0:
            self.state[token.mb] = QUEUED
        self.ready[n].append((self.now, token, self.version[token]))
        self._at(max(self.now, self.free[n]), "run", n, Token(-1))

    def _land(self, n: int, token: Token) -> None:
        i, k = token.mb, self.step[token.mb]
        length = len(self.routes[i])
        if token.hop < 0 and k > length and (i, 2 * length - k) in self.repairs:
            self.state[i] = HELD
        elif token.hop < 0 and k >= length:
            self._enqueue(n, token)
        elif self.held[n] < self.problem.slots[n]:
            self._admit(n, token)
        else:
            if token.hop < 0:
                self.state[i] = PARKED
            self.parked[n].append((token, self.version[token]))

    def _admit(self, n: int, token: Token) -> None:
        self.held[n] += 1
        self.holds[token.mb].add(token.hop if token.hop >= 0 else self.step[token.mb])
        self._enqueue(n, token)

    def _end(self, n: int, token: Token) -> None:
        i, k = token.mb, self.step[token.mb]
        length = len(self.routes[i])
        if token.hop >= 0:
            self.repairs.discard((i, token.hop))
            if self.state[i] == HELD and 2 * length - k == token.hop:
                self._enqueue(n, Token(i))
            for waits in self.after.pop((i, token.hop), ()):
                self._send(waits)
            return
        if k < 2 * length:
            self.step[i], self.state[i] = k + 1, TRAVELS
            there = self.peer(i, k + 1)
            self._at(self.now + self.problem.delays[n][there], "land", there, token)
        if k > length:
            self._release(n, i, 2 * length - k)
        if k == 2 * length:
            self.state[i], self.done[i] = DONE, self.now
            self._launch(n)

    def _release(self, n: int, i: int, h: int) -> None:
        if h not in self.holds[i]:
            return
        self.holds[i].discard(h)
        self.held[n] -= 1
        while h and self.parked[n] and self.held[n] < self.problem.slots[n]:
            token, version = self.parked[n].popleft()
            if self.version[token] == version:
                self._admit(n, token)

    def _launch(self, o: int) -> None:
        waiting = self.waiting[o]
        while waiting and o not in self.dead and self.held[o] < self.problem.slots[o]:
            i = waiting.popleft()
            self.step[i] = 0
            self._admit(o, Token(i))

    def _send(self, token: Token) -> None:
        """Send again to the peer of a hop what the peer before it keeps, as soon as that one has
        it."""
        i = token.mb
        h = token.hop if token.hop >= 0 else self.step[i]
        if (i, h - 1) in self.repairs:
            self.after.setdefault((i, h - 1), []).append(token)
            return
        self.version[token] += 1
        route = self.routes[i]
        if token.hop < 0:
            self.state[i] = TRAVELS
        self._at(self.now + self.problem.delays[route[h - 1]][route[h]], "land", route[h], token)

    # ------------------------------------------------------------ what strikes

    def die(self, n: int) -> list[int]:
        """Peer n is gone, with all it held. The unfinished micro-batches that need it: `bend` or
        `restart` each."""
        self.dead.add(n)
        self.ready[n].clear()
        self.parked[n].clear()
        return [
            i
            for i, route in enumerate(self.routes)
            if n in route and (self.needs(i, route.index(n)) or self.state[i] == WAITING)
        ]

    def bend(self, i: int, h: int, n: int) -> None:
        """Hop h of micro-batch i is peer n from now on; the one before is dead, or nothing was sent
        to it yet."""
        route, k = self.routes[i], self.step[i]
        last = 2 * len(route)
        route[h] = n
        if self.state[i] == WAITING or k < h:
            return
        self.holds[i].discard(h)
        if k == h:
            self.version[Token(i)] += 1
            self._send(Token(i))
            return
        if k == last - h:
            source = self.peer(i, k - 1)
            if source in self.dead:
                self.restart(i, route[0])
                return
            self.version[Token(i)] += 1
            self.state[i] = TRAVELS
            self._at(self.now + self.problem.delays[source][n], "land", n, Token(i))
        self.repairs.add((i, h))
        self._send(Token(i, h))

    def restart(self, i: int, origin: int, hops: Sequence[int] | None = None) -> None:
        """Micro-batch i gives up all it has and waits at ``origin`` for its turn, on its path or
        another."""
        self._forget(i)
        self.routes[i] = [origin, *(self.routes[i][1:] if hops is None else hops)]
        self.step[i], self.state[i] = 0, WAITING
        self.again += 1
        self.waiting.setdefault(origin, deque()).append(i)
        self._launch(origin)

    def drop(self, i: int) -> None:
        """Micro-batch i can never end."""
        self._forget(i)
        self.state[i] = DROPPED

    def _forget(self, i: int) -> None:
        length = len(self.routes[i])
        for token in (Token(i), *(Token(i, h) for h in range(length))):
            self.version[token] += 1
        for h in list(self.holds[i]):
            n = self.routes[i][h]
            if n not in self.dead:
                self._release(n, i, h)
                if h == 0 and self.waiting.get(n):
                    self._at(self.now, "free", n, Token(-1))
        self.holds[i].clear()
        self.repairs = {r for r in self.repairs if r[0] != i}
        self.after = {key: waits for key, waits in self.after.items() if key[0] != i}
        for waiting in self.waiting.values():
            if i in waiting:
                waiting.remove(i)

    def stall(self, n: int, seconds: float) -> None:
        """Peer n starts nothing for a while."""
        self.free[n] = max(self.free[n], self.now + seconds)

    def change(self, problem: PathProblem) -> None:
        """Other delays, times or peers from now on; what is under way is not affected."""
        more = len(problem.compute) - len(self.problem.compute)
        self.problem = problem
        self.free += [self.now] * more
        self.held += [0] * more
        self.ready += [deque() for _ in range(more)]
        self.parked += [deque() for _ in range(more)]
        for o in problem.counts:
            self.waiting.setdefault(o, deque())


def replay(problem: PathProblem, routes: Sequence[Route]) -> ReplayedRun:
    """Run ``routes``, each (origin, peers...), in launch order, to the end."""
    run = ReplayedRun(problem, routes)
    run.until(math.inf)
    return run
