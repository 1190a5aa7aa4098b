"""Routes for many micro-batches at once, by prices. Pure.

Enters: Problem, a set of stages for every micro-batch. Leaves: rising routes. Never: a time at
which anything happens: only the seconds for which a peer is taken count.

A second at a peer costs the more, the longer that peer is taken already. Every micro-batch goes the
cheapest way, so no peer is taken much longer than others that could stand in for it. The price is
the derivative of a p-norm of all peers' seconds, which keeps the longest of them short (Awerbuch et
al., Load balancing in the l_p norm, FOCS 1995).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from node.scheduler.planning.dealing import StageSet
from node.scheduler.planning.first import offered, origins_in_turns, take
from node.scheduler.planning.problem import PathProblem, Route

NEAR = 16
"""Replicas of a stage looked at from an ends peer: those with the least work and way."""
BATCH = 16
"""Ends peers whose micro-batches are sent at the same prices. With more, all take the replica that
was the cheapest before; with fewer, arrays are too small to be worth their calls."""
ROUNDS = 48
"""Times that an ends peer chooses at most; each choice is for an equal share of its
micro-batches."""
STEPS = 64
"""Hops of all sets of stages that are tried for one choice, about."""
LEAST = 1e-4
"""Least price of a second of an ends peer, beside the dearest second of any peer: otherwise a way
through idle peers would cost nothing, however long."""


def priced(
    problem: PathProblem, sets: Sequence[StageSet], go_on: Callable[[], bool] = lambda: True
) -> list[Route] | None:
    """A route for every micro-batch, the cheapest at the prices of its time. Returns None if
    ``go_on`` ends it, or if no path visits a block stage.

    Takes ``sets`` of stages as insertion does. All results are those of single additions and
    products of IEEE numbers, so they do not depend on the machine.
    """
    if not problem.hops:
        return None
    market = _Market(problem)
    pool = Counter(sets)
    owed = {o: {s for p, s in problem.owed if p == o} for o in problem.counts}
    left = {o: count for o, count in problem.counts.items() if count}
    lists: dict[int, list[Route]] = {o: [] for o in left}
    tries = max(1, STEPS // problem.hops)
    while left:
        for origins in _batches(left, owed):
            if not go_on():
                return None
            kinds = offered(pool, owed[origins[0]], tries, None)
            offers = market.offers(origins, kinds)
            for row, o in enumerate(origins):
                able = [(offers.prices[k][row], k) for k, z in enumerate(kinds) if pool[z]]
                if not able:
                    # Others of the batch took the last of these sets; it has its turn later.
                    continue
                _, kind = min(able)
                route, stays = offers.route(o, row, kind)
                due = -(-problem.counts[o] // ROUNDS)
                count = min(due, left[o], pool[kinds[kind]])
                for _ in range(count):
                    take(kinds[kind], pool, owed[o])
                market.charge(route, stays, count)
                lists[o] += [route] * count
                left[o] -= count
        left = {o: count for o, count in left.items() if count}
    turn = {o: iter(routes) for o, routes in lists.items()}
    return [next(turn[o]) for o in origins_in_turns(problem)]


def _batches(left: dict[int, int], owed: dict[int, set[int]]) -> list[list[int]]:
    """The ends peers in groups that choose together; a peer with debts chooses alone, because only
    some sets of stages pay them."""
    free = [o for o in sorted(left) if not owed[o]]
    found = [[o] for o in sorted(left) if owed[o]]
    return found + [free[at : at + BATCH] for at in range(0, len(free), BATCH)]


class _Leg(NamedTuple):
    """The rest of the way through some stages, a row for each origin, a column for each peer near
    it. ``costs``: price of the rest; ``stays``: seconds from the arrival at the peer to the end of
    its backward; ``after``: column of the next peer, None for the last stage."""

    peers: Any
    costs: Any
    stays: Any
    after: Any


class _Offers(NamedTuple):
    """Cheapest routes of a batch of origins. ``prices[kind][row]``: price of the cheapest route
    through a set of stages; ``firsts``: column of its first peer; ``trips``: seconds until home."""

    kinds: Sequence[StageSet]
    legs: dict[StageSet, _Leg]
    trips: list[Any]
    firsts: Any
    prices: list[list[float]]

    def route(self, origin: int, row: int, kind: int) -> tuple[Route, list[float]]:
        """A route, and the seconds of its stay at each peer; at the origin, of the whole trip."""
        stages = self.kinds[kind]
        at = int(self.firsts[kind, row])
        route = [origin]
        stays = [float(self.trips[kind][row, at])]
        for k in range(len(stages)):
            leg = self.legs[stages[k:]]
            route.append(int(leg.peers[row, at]))
            stays.append(float(leg.stays[row, at]))
            if leg.after is not None:
                at = int(leg.after[row, at])
        return tuple(route), stays


class _Market:
    """Seconds for which peers are taken, and the prices that follow from them. ``held[n]``: seconds
    of stays at peer n over its slots; ``busy[n]``: seconds of its device's work."""

    def __init__(self, problem: PathProblem) -> None:
        self._problem = problem
        delays = np.array(problem.delays)
        self._both: Any = delays + delays.T
        self._work: Any = (1 + problem.backward) * np.array(problem.compute) + 2 * problem.gap
        self._slots: Any = np.array(problem.slots, dtype=float)
        self._held: Any = np.zeros(len(problem.compute))
        self._busy: Any = np.zeros(len(problem.compute))
        self._row = {o: row for row, o in enumerate(problem.counts)}
        self._near: dict[int, Any] = {}

    def charge(self, route: Route, stays: Sequence[float], count: int) -> None:
        """Add the stays and the work of ``count`` micro-batches on this route."""
        for n, stay in zip(route, stays, strict=True):
            self._held[n] += count * stay / self._problem.slots[n]
            self._busy[n] += count * self._work[n]

    def offers(self, origins: Sequence[int], kinds: Sequence[StageSet]) -> "_Offers":
        """For each of ``origins`` the cheapest route through every set of stages.

        Backwards from home, the best next peer of every peer is found for all origins at once. A
        stay at a peer lasts until the micro-batch is back from all later ones, so a longer way is
        paid for at every peer before it. Those are not known on the way backwards: only the price
        of the ends peer and of the peer itself count in the choice.
        """
        o = np.array(origins)
        held, busy = self._prices()
        home = (self._problem.loss * np.array(self._problem.compute)[o])[:, None]
        legs: dict[StageSet, _Leg] = {}
        for stages in sorted({z[k:] for z in kinds for k in range(len(z))}, key=len):
            peers = self._nearest(stages[0])[[self._row[n] for n in origins]]
            each = held[peers]
            work = self._work[peers]
            cost = busy[peers] * work
            after: Any = None
            if len(stages) == 1:
                stay = work + self._both[peers, o[:, None]] + home
            else:
                then = legs[stages[1:]]
                away = self._both[peers[:, :, None], then.peers[:, None, :]]
                away += then.stays[:, None, :]
                prices = (held[o][:, None] + each)[:, :, None] * away + then.costs[:, None, :]
                after = prices.argmin(axis=2)
                stay = work + np.take_along_axis(away, after[:, :, None], 2)[:, :, 0]
                cost += np.take_along_axis(then.costs, after, 1)
            legs[stages] = _Leg(peers, cost + each * stay, stay, after)
        trips = [
            legs[z].stays + self._both[legs[z].peers, o[:, None]] + self._work[o][:, None]
            for z in kinds
        ]
        totals = [
            legs[z].costs + held[o][:, None] * trip for z, trip in zip(kinds, trips, strict=True)
        ]
        firsts = np.stack([total.argmin(axis=1) for total in totals])
        prices = [
            np.take_along_axis(total, first[:, None], 1)[:, 0].tolist()
            for total, first in zip(totals, firsts, strict=True)
        ]
        return _Offers(kinds, legs, trips, firsts, prices)

    def _prices(self) -> tuple[Any, Any]:
        """Price of a second's stay and of a second's work at each peer."""
        most = max(float(self._held.max()), float(self._busy.max()))
        if most <= 0:
            return np.ones(len(self._slots)) * LEAST, np.zeros(len(self._slots))
        held = _seventh(self._held / most) / self._slots
        ends = list(self._problem.counts)
        held[ends] = np.maximum(held[ends], LEAST)
        return held, _seventh(self._busy / most)

    def _nearest(self, stage: int) -> Any:
        """The nearest replicas of a stage, a row for each ends peer."""
        found = self._near.get(stage)
        if found is None:
            peers = np.array(self._problem.stages[stage])
            way = self._both[list(self._row)][:, peers] + self._work[peers]
            # A stable order: every machine takes the same ones of equally near peers.
            order = np.argsort(way, axis=1, kind="stable")[:, :NEAR]
            found = peers[np.sort(order, axis=1)]
            self._near[stage] = found
        return found


def _seventh(x: Any) -> Any:
    """The seventh power by products: ``numpy.power`` rounds differently on different processors."""
    square = x * x
    return square * square * square * x
