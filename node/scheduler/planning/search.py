"""Improve a plan by moves of a few micro-batches, as simulated annealing does; stages stay visited
equally often. Pure.

Never: a clock (`progress` is asked how much of the budget is used) or dice of its own (the seed is
given).
"""

import random
from collections.abc import Callable, Sequence

from node.scheduler.planning.dealing import StageSet, legal, orders
from node.scheduler.planning.estimate import INFINITE, Estimator
from node.scheduler.planning.first import origins_in_turns
from node.scheduler.planning.problem import Route
from node.scheduler.planning.rules import joined, safe

POOL = 160
"""Routes kept for an origin and a set of stages, the shortest."""
LEAST = 6
"""Partial routes kept at least while a pool is made."""
MOST_STEPS = 1500
"""Partial routes lengthened at most while a pool is made: a few milliseconds. Larger pools of long
routes cost more moves than they are worth."""
WARM = 0.02
"""Most that a worse plan may cost at the beginning, as a share of the makespan."""
COLD = 0.0005
"""Most that a worse plan may cost at the end, as a share of the makespan."""
EVEN = 0.05
"""Weight of the mean of the ends peers' last homecomings beside the makespan: an ends peer that is
not critical now may be soon."""
DEBT = 0.02
"""Price of an owed stage that is not trained, over the makespan."""

Change = dict[int, Route]


class PathSearch:
    """A plan being improved. ``routes[i]`` with ``orders[o]``: launch order of each ends peer, as
    indices."""

    def __init__(self, estimator: Estimator, routes: Sequence[Route], seed: int = 0) -> None:
        self.estimator = estimator
        self.problem = estimator.problem
        self.random = random.Random(seed)
        self._pools: dict[tuple[int, StageSet], list[Route]] = {}
        self.moves = 0
        self.lanes = 0
        """Number of paths of every origin, which are taken in turns and moved as a whole; 0: every
        micro-batch for itself."""
        self.begin(routes)

    def begin(self, routes: Sequence[Route]) -> None:
        """Go on from this plan, which must not deadlock."""
        self.routes = list(routes)
        self.orders = self.problem.launches(routes)
        self.makespan = self.estimator.play(self.routes, self.orders)
        self.value = self._cost(self.makespan)

    def plan(self) -> tuple[Route, ...]:
        """The routes in launch order: origins in turns."""
        turn = {o: iter(order) for o, order in self.orders.items()}
        return tuple(self.routes[next(turn[o])] for o in origins_in_turns(self.problem))

    def _cost(self, makespan: float) -> float:
        """The price of the plan evaluated last: its makespan, a little of the other ends peers'
        times, which may become critical, and the price of debts."""
        if makespan == INFINITE:
            return INFINITE
        home = self.estimator.home
        last = [max([home[i] for i in order]) for order in self.orders.values() if order]
        even = makespan + EVEN * sum(last) / len(last)
        if self.problem.owed:
            return even + self._debt() * DEBT * self.makespan
        return even

    def _debt(self) -> int:
        """Stages that are owed and not on any path."""
        return len(self.problem.owed - joined(self.problem, self.routes))

    def run(
        self,
        progress: Callable[[int], float],
        best: float,
        accept: Callable[[tuple[Route, ...], float], bool],
        heat: float = WARM,
    ) -> None:
        """Try moves until ``progress(moves)`` is 1, from ``heat`` down to :data:`COLD`. ``accept``
        is called with every plan that seems shorter than ``best``, and returns True if it is; its
        makespan is then the best."""
        draw = self.random.random
        slack = self.random.expovariate
        moves = self._moves()
        # The clock is asked every few milliseconds, not at every move of a small problem.
        often = max(1, min(16, 500 // len(self.routes)))
        while (used := progress(self.moves)) < 1.0:
            warmth = self.makespan * heat * (COLD / heat) ** max(0.0, used)
            for _ in range(often):
                self.moves += 1
                change = moves[int(draw() * len(moves))]()
                if (
                    change
                    and self._try(change, slack(1.0) * warmth)
                    and self.makespan < best - 1e-9
                    and not (self.problem.owed and self._debt())
                    and accept(self.plan(), self.makespan)
                ):
                    best = self.makespan

    def _try(self, change: Change, slack: float) -> bool:
        """Try a change and return True if it is kept: the plan is at most ``slack`` worse, and
        safe."""
        routes = self.routes
        was = {i: routes[i] for i in change}
        if was == change:
            return False
        for i, route in change.items():
            routes[i] = route
        limit = self.value + slack
        makespan = self.estimator.play(routes, self.orders, limit)
        value = self._cost(makespan)
        if value <= limit and safe(self.problem, routes) is None:
            self.value = value
            self.makespan = makespan
            return True
        for i, route in was.items():
            routes[i] = route
        return False

    def _moves(self) -> list[Callable[[], Change | None]]:
        p = self.problem
        if not p.hops:
            return [self._turn]
        moves = [self._reroute] * 4 + [self._replica] * 2 + [self._trade] * 2 + [self._turn]
        if p.hops < len(p.stages) - 1:
            moves.append(self._exchange)
            change = self._restage
            if p.equal_visits:
                change = self._exchange
            moves += [change] * 3
        return moves

    def _pick(self) -> int:
        return int(self.random.random() * len(self.routes))

    def _stages(self, i: int) -> StageSet:
        return tuple(sorted(self.problem.stage_of[n] for n in self.routes[i][1:]))

    def _choose(self, origin: int, stages: StageSet, bias: float = 3.0) -> Route:
        pool = self.pool(origin, stages)
        return pool[int(len(pool) * self.random.random() ** bias)]

    def _like(self, i: int) -> list[int]:
        """i and micro-batches of the same stages to move with it: none, those on its route, of its
        turn in every wave, or of its wave."""
        route = self.routes[i]
        x = self.random.random()
        if x < 0.4 and not self.lanes:
            return [i]
        order = self.orders[route[0]]
        if self.lanes:
            return order[order.index(i) % self.lanes :: self.lanes]
        if x < 0.6:
            return [j for j in order if self.routes[j] == route]
        slots = self.problem.slots[route[0]]
        if len(order) <= slots or x > 0.9:
            some = self.random.sample(order, self.random.randrange(len(order)))
        else:
            at = order.index(i)
            some = order[at % slots :: slots] if x < 0.8 else order[at - at % slots :][:slots]
        stages = self._stages(i)
        return [i, *(j for j in some if j != i and self._stages(j) == stages)]

    def _reroute(self) -> Change:
        i = self._pick()
        route = self._choose(self.routes[i][0], self._stages(i))
        return dict.fromkeys(self._like(i), route)

    def _replica(self) -> Change:
        i = self._pick()
        route = list(self.routes[i])
        k = 1 + int(self.random.random() * (len(route) - 1))
        route[k] = self.random.choice(self.problem.stages[self.problem.stage_of[route[k]]])
        return dict.fromkeys(self._like(i), tuple(route))

    def _turn(self) -> Change | None:
        """Two micro-batches of one origin change places."""
        order = self.orders[self.routes[self._pick()][0]]
        if len(order) < 2 or self.lanes:
            return None
        i, j = self.random.sample(order, 2)
        return {i: self.routes[j], j: self.routes[i]}

    def _trade(self) -> Change | None:
        """Micro-batches of two origins change the peers of their paths."""
        i = self._pick()
        j = self._pick()
        a = self.routes[i]
        b = self.routes[j]
        if a[0] == b[0]:
            return None
        if self.random.random() < 0.5:
            c = (a[0], *b[1:])
            d = (b[0], *a[1:])
        else:
            c = self._choose(a[0], self._stages(j))
            d = self._choose(b[0], self._stages(i))
        return self._both(i, j, c, d)

    def _both(self, i: int, j: int, c: Route, d: Route) -> Change:
        """Give the route c to micro-batches like i, and d to equally many like j."""
        one = self._like(i)
        two = [x for x in self._like(j) if x not in one] or [j]
        count = min(len(one), len(two))
        return dict.fromkeys(one[:count], c) | dict.fromkeys(two[:count], d)

    def _exchange(self) -> Change | None:
        """Two micro-batches exchange one stage for another."""
        i = self._pick()
        j = self._pick()
        one = self._stages(i)
        two = self._stages(j)
        gives = [s for s in one if s not in two]
        takes = [s for s in two if s not in one]
        if not gives:
            return None
        a = self.random.choice(gives)
        b = self.random.choice(takes)
        one = tuple(sorted({*one, b} - {a}))
        two = tuple(sorted({*two, a} - {b}))
        if not legal(self.problem, one) or not legal(self.problem, two):
            return None
        return self._both(
            i, j, self._choose(self.routes[i][0], one), self._choose(self.routes[j][0], two)
        )

    def _restage(self) -> Change | None:
        """One stage of a path for another, where stages need not be equal."""
        i = self._pick()
        stages = self._stages(i)
        out = self.random.choice(stages)
        new = self.random.randrange(1, len(self.problem.stages))
        if new in stages:
            return None
        changed = tuple(sorted({*stages, new} - {out}))
        if not legal(self.problem, changed):
            return None
        return {i: self._choose(self.routes[i][0], changed)}

    def pool(self, origin: int, stages: StageSet) -> list[Route]:
        """Routes of a set of stages, the shortest first."""
        found = self._pools.get((origin, stages))
        if found is None:
            most = 8
            if len(stages) <= 6:
                most = 64
            several = orders(self.problem, stages, most)
            each = sum(len(self.problem.stages[s]) for s in stages)
            width = max(LEAST, min(POOL, MOST_STEPS // max(1, len(several) * each)))
            made = {r for order in several for r in self._shortest(origin, order, width)}
            found = sorted(made, key=lambda r: (self.estimator.solo(r), r))[:POOL]
            self._pools[origin, stages] = found
        return found

    def _shortest(self, origin: int, order: StageSet, width: int) -> list[Route]:
        """The shortest routes through stages in this order: a beam of ``width``, so all if there
        are few."""
        p = self.problem
        beam: list[tuple[float, Route]] = [(0.0, (origin,))]
        work = 1 + p.backward
        for s in order:
            grown = [
                (t + p.delays[r[-1]][n] + p.delays[n][r[-1]] + work * p.compute[n], (*r, n))
                for t, r in beam
                for n in p.stages[s]
            ]
            home = [(t + p.delays[r[-1]][origin] + p.delays[origin][r[-1]], t, r) for t, r in grown]
            beam = grown
            if len(home) > width:
                beam = [(t, r) for _, t, r in sorted(home)[:width]]
        return [r for _, r in beam]
