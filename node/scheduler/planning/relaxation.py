"""A lower bound of the makespan from the balance of slots, devices and visits over routes. Pure.

Enters: Problem. Leaves: seconds, 0 where there are too many routes to list. Never: a figure that
rests on how well the search for prices went: any prices prove a bound (:func:`_proven`).

A plan of makespan T uses routes ``r`` from origins ``o`` so often that, counting micro-batches
``x[o, r]``:

* every origin starts its micro-batches, and every stage gets its visits, if they must be equal;
* a slot of peer n is held for the stay of each visit, from the arrival of the forward to the end of
  the backward, and a stay is never shorter than in an empty swarm. No visit begins before the first
  arrival that any route allows, and none ends later than the shortest way home before T. So the
  stays at n take at most ``slots[n] * (T - first[n] - last[n])`` seconds;
* the device of peer n works within the same time, one task after another;
* a slot of an ends peer is held for whole round trips. Of its first micro-batches each waits for
  the forwards before it, later ones for a gap, and slots that come free after the last launch stay
  free, because homecomings are a backward and a gap apart.

Without whole numbers for ``x`` this is a linear programme; its least T is a lower bound.
"""

from collections.abc import Iterator
from itertools import combinations, pairwise, product
from math import comb
from typing import Any, NamedTuple

import numpy as np

from node.scheduler.planning.dealing import legal, orders
from node.scheduler.planning.problem import PathProblem

MOST_CELLS = 2_000_000
"""Numbers in the matrix of the programme, beyond which the bound is not computed: about a second of
work."""
STEPS = 40
"""Steps of the search for prices at most; ten to twenty are usual."""
CLOSE = 1e-8
"""Relative distance of prices and plan at which the search ends."""
REGULAR = 1e-13
"""Added to the diagonal of matrices whose diagonal is 1."""
SAFE = 1e-9
"""Share of the bound that is given up for rounding."""


class _Programme(NamedTuple):
    """Minimise T under ``uses @ x <= most * T - least`` by resource and ``visits @ x == due``.
    Columns of both matrices: an origin with a route; rows of ``uses``: the slots of ends peers, of
    block peers, then the devices of block peers. ``origin[j]``: place of column j's origin in
    ``counts``."""

    uses: Any
    most: Any
    least: Any
    visits: Any
    due: Any
    origin: Any
    counts: Any


def balance_bound(problem: PathProblem) -> float:
    """Seconds that no plan can beat; 0 without block stages or with too many routes to list."""
    programme = _programme(problem)
    if programme is None:
        return 0.0
    best = 0.0
    try:
        for prices, fees in _prices(programme):
            best = max(best, _proven(programme, prices, fees))
    except np.linalg.LinAlgError:
        # Rounding has ended the search for better prices.
        pass
    return best * (1 - SAFE)


def _proven(lp: _Programme, prices: Any, fees: Any) -> float:
    """The bound that any ``prices >= 0`` of resources and ``fees`` of visits prove.

    Each column costs its uses at these prices less the fees of its stages. A plan of makespan T
    pays at least the cheapest column of the origin for every micro-batch, and at most ``prices @
    (most * T - least) - fees @ due``. Solved for T.
    """
    prices = np.maximum(prices, 0.0)
    scale = float(prices @ lp.most)
    if scale <= 0:
        return 0.0
    cheapest = _cheapest(lp, prices @ lp.uses - fees @ lp.visits)
    return float(lp.counts @ cheapest + prices @ lp.least + fees @ lp.due) / scale


def _cheapest(lp: _Programme, costs: Any) -> Any:
    """The least cost of a column of each origin."""
    least = np.full(len(lp.counts), np.inf)
    np.minimum.at(least, lp.origin, costs)
    return least


def _routes(problem: PathProblem, most: int) -> Any:
    """Block peers of every legal route, a row each; None if there are more than ``most``."""
    rows: list[tuple[int, ...]] = []
    if comb(len(problem.stages) - 1, problem.hops) > most:
        return None
    for chosen in combinations(range(1, len(problem.stages)), problem.hops):
        if not legal(problem, chosen):
            continue
        for order in orders(problem, chosen, most):
            size = 1
            for s in order:
                size *= len(problem.stages[s])
            if len(rows) + size > most:
                return None
            rows += product(*(problem.stages[s] for s in order))
    return np.array(rows)


def _programme(problem: PathProblem) -> _Programme | None:
    """The programme over all legal routes; None if there is none, or there are too many."""
    p = problem
    block = [n for stage in p.stages[1:] for n in stage]
    origins = [o for o in p.stages[0] if p.counts.get(o)]
    stages = len(p.stages) - 1
    if not p.hops:
        return None
    height = 2 * len(origins) + 2 * len(block) + stages
    routes = _routes(p, MOST_CELLS // height // len(origins))
    if routes is None:
        return None
    walks = [_walk(p, o, routes) for o in origins]
    compute = np.array(p.compute)
    slots = np.array(p.slots, dtype=float)
    counts = np.array([p.counts[o] for o in origins], dtype=float)
    row = np.zeros(len(compute), dtype=int)
    row[block] = np.arange(len(block))
    columns = np.arange(len(routes))
    uses = np.zeros((len(origins) + 2 * len(block), len(origins) * len(routes)))
    visits = np.zeros((stages, uses.shape[1]))
    first = np.full(len(compute), np.inf)
    last = np.full(len(compute), np.inf)
    for i, walk in enumerate(walks):
        at = i * len(routes) + columns
        uses[i, at] = walk.trips
        for k, peers in enumerate(routes.T):
            device = len(origins) + len(block) + row[peers]
            uses[len(origins) + row[peers], at] = walk.stays[k]
            uses[device, at] = (1 + p.backward) * compute[peers] + 2 * p.gap
            visits[np.array([p.stage_of[n] - 1 for n in peers.tolist()]), at] = 1.0
            np.minimum.at(first, peers, walk.arrivals[k])
            np.minimum.at(last, peers, walk.returns[k])
    # A peer that is on no route has no first arrival.
    idle = np.where(np.isfinite(first), first + last, 0.0)[block]
    at_ends = np.minimum(slots[origins], counts)
    due = np.array(p.visits or (p.total * p.hops // stages,) * stages, dtype=float)
    if not p.equal_visits:
        visits = visits[:0]
        due = due[:0]
    return _Programme(
        uses,
        np.concatenate((at_ends, slots[block], np.ones(len(block)))),
        np.concatenate(([_waits(p, o) for o in origins], slots[block] * idle, idle - p.gap)),
        visits,
        due,
        np.repeat(np.arange(len(origins)), len(routes)),
        counts,
    )


class _Walk(NamedTuple):
    """Every route from one origin in an empty swarm, in seconds. ``trips``: from the first forward
    to home; by hop, ``stays`` at the peer, ``arrivals`` there, and ``returns`` home from there
    after its backward."""

    trips: Any
    stays: list[Any]
    arrivals: list[Any]
    returns: list[Any]


def _walk(p: PathProblem, o: int, routes: Any) -> _Walk:
    delays = np.array(p.delays)
    compute = np.array(p.compute)
    hops = [np.full(len(routes), o), *routes.T]
    come = compute[hops[0]]
    back = np.zeros(len(routes))
    arrivals: list[Any] = []
    returns: list[Any] = []
    for a, b in pairwise(hops):
        come = come + delays[a, b]
        back = back + delays[b, a] + p.backward * compute[a]
        arrivals.append(come)
        returns.append(back)
        come = come + compute[b]
    stays: list[Any] = []
    rest = delays[hops[-1], o] + p.loss * compute[o] + delays[o, hops[-1]]
    for a, b in pairwise([*hops[::-1], hops[0]]):
        rest = rest + (1 + p.backward) * compute[a]
        stays.append(rest)
        rest = rest + delays[b, a] + delays[a, b]
    return _Walk(stays[-1], stays[-2::-1], arrivals, returns)


def _waits(p: PathProblem, o: int) -> float:
    """Seconds for which the slots of an ends peer are held or free besides round trips."""
    count = p.counts[o]
    slots = min(p.slots[o], count)
    pairs = slots * (slots - 1) / 2
    forward = p.compute[o] + p.gap
    backward = p.backward * p.compute[o] + p.gap
    return pairs * (forward + backward) + (count - slots) * p.gap


def _prices(lp: _Programme) -> Iterator[tuple[Any, Any]]:
    """Prices of resources with fees of visits, better from one to the next, by an interior point
    method."""
    height = len(lp.most)
    width = lp.uses.shape[1]
    origins = np.zeros((len(lp.counts), width))
    origins[lp.origin, np.arange(width)] = 1.0
    top = np.hstack((lp.uses, -lp.most[:, None], np.eye(height)))
    # The visits of the last stage follow from all others, because every route has its hops.
    bottom = np.vstack((origins, lp.visits[:-1]))
    a = np.vstack((top, np.hstack((bottom, np.zeros((len(bottom), height + 1))))))
    b = np.concatenate((-lp.least, lp.counts, lp.due[:-1]))
    c = np.zeros(a.shape[1])
    c[width] = 1.0
    # Begin with all routes equally often, more time than they need, and equal prices.
    x = lp.counts[lp.origin] / (width / len(lp.counts))
    load = lp.uses @ x + lp.least
    time = 2 * max(load / lp.most)
    prices = 0.5 / (height * lp.most)
    cheapest = _cheapest(lp, prices @ lp.uses)
    start = np.concatenate((-prices, 0.9 * cheapest, np.zeros(len(lp.due[:-1]))))
    for y in _interior(a, b, c, np.concatenate((x, [time], lp.most * time - load)), start):
        fees = np.zeros(len(lp.due))
        fees[:-1] = y[height + len(lp.counts) :]
        yield -y[:height], fees


def _interior(a: Any, b: Any, c: Any, x: Any, y: Any) -> Iterator[Any]:
    """Prices of the rows of ``minimise c @ x, a @ x == b, x >= 0``, after every step of Mehrotra's
    predictor and corrector (Nocedal and Wright, Numerical Optimization, section 14.2).

    ``x``: positive columns to begin with. ``y``: prices at which every column costs more than it is
    worth. ``s``: by how much it does.
    """
    s = c - a.T @ y
    for _ in range(STEPS):
        unmet = a @ x - b
        off = a.T @ y + s - c
        mean = (x @ s) / len(x)
        if mean * len(x) <= CLOSE * abs(c @ x):
            return
        normal = _Normal(a, x / s)
        dx, _, ds = normal.step(x, s, x * s, unmet, off)
        ahead = ((x + _most(x, dx) * dx) @ (s + _most(s, ds) * ds)) / len(x)
        target = x * s + dx * ds - (ahead / mean) ** 3 * mean
        dx, dy, ds = normal.step(x, s, target, unmet, off)
        x = x + 0.995 * _most(x, dx) * dx
        y = y + 0.995 * _most(s, ds) * dy
        s = s + 0.995 * _most(s, ds) * ds
        yield y


class _Normal:
    """Normal equations ``a @ diag(weights) @ a.T``, scaled to a diagonal of ones."""

    def __init__(self, a: Any, weights: Any) -> None:
        self._a = a
        self._weights = weights
        m = (a * weights) @ a.T
        self._scale = 1 / np.sqrt(np.diag(m))
        m *= self._scale[:, None] * self._scale[None, :]
        # Rows may depend on each other, nearly; this keeps the matrix regular.
        m[np.diag_indices_from(m)] += REGULAR
        self._inverse = np.linalg.inv(m)

    def solve(self, right: Any) -> Any:
        return self._scale * (self._inverse @ (self._scale * right))

    def step(self, x: Any, s: Any, target: Any, unmet: Any, off: Any) -> tuple[Any, Any, Any]:
        """Newton's step to ``x * s`` less by ``target``, with rows ``unmet`` and prices ``off``
        mended."""
        a = self._a
        dy = self.solve(a @ (target / s) - a @ (self._weights * off) - unmet)
        ds = -off - a.T @ dy
        return -(target + x * ds) / s, dy, ds


def _most(x: Any, dx: Any) -> float:
    """The longest step of at most 1 that keeps ``x`` from falling below 0."""
    down = dx < 0
    return min(1.0, float((-x[down] / dx[down]).min(initial=1.0)))
