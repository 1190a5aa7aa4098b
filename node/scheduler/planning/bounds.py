"""Lower bounds of the makespan of any plan, each by its name. Pure.

Enters: Problem. Leaves: seconds by bound. Every bound relaxes the replay's own model, so none is
ever above a makespan.
"""

from collections.abc import Sequence
from itertools import combinations, pairwise
from math import comb, inf
from typing import Any

import numpy as np

from node.scheduler.planning.dealing import legal, orders
from node.scheduler.planning.problem import PathProblem

MOST_STEPS = 400_000
"""Additions up to which the shortest round trips are searched through all legal orders of stages;
beyond, stages may repeat."""


RECENT = 64
"""Homecomings looked at for one launch: with fewer the bound is lower, never wrong."""


def lower_bounds(problem: PathProblem) -> dict[str, float]:
    """``round_trips``: an ends peer's micro-batches wait for its slots and each is gone for a round
    trip at least. ``ends``: all tasks of an ends peer one after the other. ``stage``: the visits of
    a stage, spread over its replicas as evenly as their speeds allow. ``slots``: the visits of a
    stage hold its slots, each for a residence at least."""
    p = problem
    trips = shortest_trips(p)
    found = {"round_trips": 0.0, "ends": 0.0, "stage": 0.0, "slots": 0.0}
    for o, count in p.counts.items():
        if count:
            work = count * p.compute[o] * (1 + p.loss + p.backward) + (3 * count - 1) * p.gap
            found["ends"] = max(found["ends"], work)
            found["round_trips"] = max(found["round_trips"], chain(p, o, count, trips[o]))
    blocks = len(p.stages) - 1
    if blocks and (p.equal_visits or p.hops == blocks):
        tails = _tails(p)
        delays = np.array(p.delays)
        for s in range(1, blocks + 1):
            if p.visits:
                visits = p.visits[s - 1]
            else:
                visits = p.total * p.hops // blocks
            found["stage"] = max(found["stage"], _stage(p, s, visits, delays))
            found["slots"] = max(found["slots"], _slots(p, s, visits, tails))
    return found


def chain(p: PathProblem, o: int, count: int, trip: float) -> float:
    """The last of ``count`` homecomings at o, each away for ``trip`` at least.

    Launch k (from 0) follows homecoming k - slots. After homecoming j the ends peer still works off
    one after the other, before launch k can start, the forwards of all launches since and the
    backwards of all homecomings since: one pair for each.
    """
    slots = p.slots[o]
    forward = p.compute[o] + p.gap
    back = p.backward * p.compute[o] + p.gap
    home: list[float] = []
    for k in range(count):
        recent = range(max(0, k - 3 * slots + 1, k - slots - RECENT), k - slots + 1)
        free = (home[j] + p.gap + (k - slots - j) * (forward + back) for j in recent)
        start = max(k * forward, max(free, default=0.0))
        home.append(max(start + trip, home[-1] + back if home else 0.0))
    return home[-1]


def _stage(p: PathProblem, s: int, visits: int, delays: Any) -> float:
    peers = list(p.stages[s])
    cycles = [(1 + p.backward) * p.compute[n] + 2 * p.gap for n in peers]
    if min(cycles) <= 0:
        return 0.0
    spread = visits / sum(1 / c for c in cycles)
    ends = min(p.compute[o] for o in p.stages[0])
    others = [a for a, stage in p.stage_of.items() if stage != s]
    come = float(delays[:, peers][others].min())
    home = float(delays[peers][:, others].min()) + p.backward * ends
    return max(0.0, come + ends + spread - p.gap + home)


def _slots(p: PathProblem, s: int, visits: int, tails: list[dict[int, float]]) -> float:
    """Before stage s a path has been at the stages before it at most, and by a swap at a few behind
    it; the rest comes after."""
    peers = p.stages[s]
    more = p.hops - s
    if p.max_swaps:
        more -= p.max_swap_distance
    more = max(0, min(p.hops - 1, more))
    # A way over more peers can be the shorter one.
    stay = min((1 + p.backward) * p.compute[n] + row[n] for n in peers for row in tails[more:])
    return visits * stay / sum(p.slots[n] for n in peers)


def _tails(p: PathProblem) -> list[dict[int, float]]:
    """``[r][n]``: seconds from peer n over r more hops home for the loss and back, at least; stages
    may repeat."""
    ends = p.stages[0]
    d = p.delays
    block = [n for stage in p.stages[1:] for n in stage]
    at = np.array([min(d[n][o] + d[o][n] + p.loss * p.compute[o] for o in ends) for n in block])
    step = _steps(p, block)
    rows = [dict(zip(block, at.tolist(), strict=True))]
    for _ in range(p.hops - 1):
        at = (step + at[None, :]).min(axis=1)
        rows.append(dict(zip(block, at.tolist(), strict=True)))
    return rows


def shortest_trips(p: PathProblem) -> dict[int, float]:
    """Lower bound of the round trip of each ends peer in seconds: its shortest legal path in an
    otherwise empty swarm, or less."""
    blocks = len(p.stages) - 1
    q = p.hops
    if q == 0:
        return {o: p.compute[o] * (1 + p.backward + p.loss) + 2 * p.delays[o][o] for o in p.counts}
    widest = max(len(stage) for stage in p.stages)
    count = comb(blocks, q)
    if p.max_swaps:
        count *= 1 + q * q // 2
    if len(p.counts) * count * q * widest * widest <= MOST_STEPS:
        walks = [
            order
            for chosen in combinations(range(1, blocks + 1), q)
            if legal(p, chosen)
            for order in orders(p, chosen, 1 << 20)
        ]
        return {o: min(_trip(p, o, order) for order in walks) for o in p.counts}
    return _relaxed(p)


def _trip(p: PathProblem, o: int, order: tuple[int, ...]) -> float:
    work = 1 + p.backward
    best = {o: work * p.compute[o] + p.loss * p.compute[o]}
    for s in order:
        best = {
            n: work * p.compute[n]
            + min(t + p.delays[a][n] + p.delays[n][a] for a, t in best.items())
            for n in p.stages[s]
        }
    return min(t + p.delays[n][o] + p.delays[o][n] for n, t in best.items())


def _steps(p: PathProblem, block: Sequence[int]) -> Any:
    """Seconds between peers of block stages: the way there and back and the work at the second;
    infinite where no path goes."""
    stage = np.array([p.stage_of[n] for n in block])
    delays = np.array(p.delays)[np.ix_(block, block)]
    back = 0
    if p.max_swaps:
        back = p.max_swap_distance
    ahead = stage[None, :] - stage[:, None]
    step = delays + delays.T + (1 + p.backward) * np.array(p.compute)[block][None, :]
    step[(ahead == 0) | (ahead < -back) | (ahead > p.max_jump + back)] = inf
    return step


def _relaxed(p: PathProblem) -> dict[int, float]:
    """Shortest round trips, as :func:`shortest_trips`, over paths that need not be legal: they have
    the same number of hops, a step may go as far ahead or back as jumps and swaps allow, and stages
    may repeat after a swap."""
    block = [n for s in range(1, len(p.stages)) for n in p.stages[s]]
    stage = np.array([p.stage_of[n] for n in block])
    step = _steps(p, block)
    delays = np.array(p.delays)
    work = (1 + p.backward) * np.array(p.compute)
    back = 0
    if p.max_swaps:
        back = p.max_swap_distance
    # Before hop k + 1 of a path are k stages, at most ``back`` of them later ones; likewise after.
    skipped = len(p.stages) - 1 - p.hops
    able = [
        np.flatnonzero((stage > k - back) & (stage <= skipped + k + 1 + back))
        for k in range(p.hops)
    ]
    steps = [step[here][:, then] for here, then in pairwise(able)]
    out: dict[int, float] = {}
    for o in p.counts:
        both = (delays[o] + delays[:, o])[block]
        best = np.where(stage <= p.max_jump, both + work[block], inf)[able[0]]
        for way in steps:
            best = (best[:, None] + way).min(axis=0)
        out[o] = float((best + both[able[-1]]).min() + work[o] + p.loss * p.compute[o])
    return out
