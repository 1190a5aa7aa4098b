"""A whole plan at once: round robin, a cheap rule, and the insertion of one path after the other
into reservation tables. Pure.

All make rising paths only, so that no order of events can end in a deadlock.
"""

import heapq
import random
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from operator import itemgetter

from node.scheduler.planning.dealing import StageSet
from node.scheduler.planning.problem import PathProblem, Route

EFFORTS = ((8, 12), (3, 2), (1, 2))
"""Partial paths kept while one is built, and sets of stages tried for it: for few micro-batches,
for many, in haste. The second takes a tenth of the first's time, the third a third of the second's;
plans get a few percent longer."""
CAREFUL = 0.35
"""Share of its time limit in which an insertion with the first of ``EFFORTS`` is to end."""
PROMPT = 0.95
"""Share of its time limit in which an insertion with the second of ``EFFORTS`` is to end."""
SLACK = 0.02
"""Share of its time limit by which it may be late before it takes the next lower effort."""
FEW = 300
"""Micro-batches up to which the first of ``EFFORTS`` is used."""
FINAL = 6
"""Partial paths of which the whole way home is computed."""
NEAR = 6
"""Nearest replicas looked at in a large stage."""
SPREAD = 3
"""Other replicas looked at in a large stage, in turn."""


def origins_in_turns(problem: PathProblem) -> Iterator[int]:
    """The origin of every micro-batch: ends peers in turns, until they have none left."""
    for k in range(max(problem.counts.values())):
        for o, count in sorted(problem.counts.items()):
            if k < count:
                yield o


def round_robin(problem: PathProblem, sets: Sequence[StageSet]) -> list[Route]:
    """Replicas of every stage in turns, whatever they cost: the plan that any other must beat."""
    turn = [cycle(peers) for peers in problem.stages]
    return [
        (o, *(next(turn[s]) for s in stages))
        for o, stages in zip(origins_in_turns(problem), sets, strict=True)
    ]


def cheap(problem: PathProblem, sets: Sequence[StageSet], slots: bool = True) -> list[Route]:
    """Every micro-batch by the next replica that is near and has little to do: no tables, a few
    microseconds a hop.

    ``slots``: a peer is also taken while its slots are held.
    """
    rule = _Cheap(problem, slots)
    left = Counter(sets)
    owed = {o: {s for p, s in problem.owed if p == o} for o in problem.counts}
    return [rule.route(o, _taken(left, owed[o])) for o in origins_in_turns(problem)]


class _Cheap:
    """``load[n]``: seconds for which peer n is taken: by work, or by micro-batches that hold its
    slots until they have been home."""

    def __init__(self, problem: PathProblem, slots: bool = True) -> None:
        self.problem = problem
        self.near = _Near(problem)
        self.slots = slots
        self.load = [0.0] * len(problem.compute)

    def route(self, o: int, stages: StageSet) -> Route:
        """The path through ``stages``, hop by hop where the next one is done first."""
        p = self.problem
        load = self.load
        delays = p.delays
        compute = p.compute
        slots = p.slots
        route = [o]
        for s in stages:
            way = delays[route[-1]]
            n = min(self.near(route[-1], s), key=lambda n: way[n] + load[n] + compute[n])
            work = (1 + p.backward) * compute[n] + 2 * p.gap
            if self.slots:
                work = max(work, (work + delays[n][o] + delays[o][n]) / slots[n])
            load[n] += work
            route.append(n)
        return tuple(route)


def _taken(pool: Counter[StageSet], owed: set[int]) -> StageSet:
    """Take one of the remaining sets out of ``pool``: one that pays debts, if there is any."""
    if owed:
        found = offered(pool, owed, 1, None)[0]
    else:
        found = next(iter(pool))
    take(found, pool, owed)
    return found


def take(stages: StageSet, pool: Counter[StageSet], owed: set[int]) -> None:
    pool[stages] -= 1
    if not pool[stages]:
        del pool[stages]
    owed.difference_update(stages)


class Tables:
    """Reservations: tasks by peer, and the peer's slots from arrival to the end of the backward.

    ``in_order``: reservations come in order of launch. A slot is then taken after all earlier
    reservations; otherwise it is taken at any time at which, by the reservations known so far,
    fewer slots are held than the peer has.
    """

    def __init__(self, problem: PathProblem, in_order: bool = True) -> None:
        self.problem = problem
        self.in_order = in_order
        self.busy: list[list[tuple[float, float]]] = [[] for _ in problem.compute]
        self.leave: list[list[float]] = [[] for _ in problem.compute]
        self.stays: list[list[tuple[float, float]]] = [[] for _ in problem.compute]

    def slot(self, n: int, t: float) -> float:
        """The time at which a micro-batch that reaches peer n at t has a slot."""
        slots = self.problem.slots[n]
        if self.in_order:
            leave = self.leave[n]
            if len(leave) >= slots:
                return max(t, leave[-slots])
            return t
        stays = self.stays[n]
        if len(stays) < slots:
            return t
        held = sorted(out for came, out in stays if came <= t < out)
        if len(held) < slots:
            return t
        return held[-slots]

    def crowd(self, n: int, came: float, out: float) -> float:
        """Seconds from came to out during which peer n would hold more than it has slots,
        roughly."""
        stays = self.stays[n]
        if len(stays) < self.problem.slots[n]:
            return 0.0
        overlaps = sorted(
            (min(out, o) - max(came, c) for c, o in stays if c < out and o > came), reverse=True
        )
        if len(overlaps) < self.problem.slots[n]:
            return 0.0
        return overlaps[self.problem.slots[n] - 1]

    def start(self, n: int, t: float, took: float) -> float:
        """The earliest start at or after t of a task of ``took`` seconds in a gap between the
        reservations at peer n."""
        busy = self.busy[n]
        at = bisect_left(busy, (t, 0.0))
        if at and busy[at - 1][1] > t:
            t = busy[at - 1][1]
        took += self.problem.gap
        while at < len(busy) and busy[at][0] < t + took:
            if busy[at][1] > t:
                t = busy[at][1]
            at += 1
        return t

    def book(self, n: int, start: float, took: float) -> float:
        """Reserve; the end of the task, without the gap."""
        insort(self.busy[n], (start, start + took + self.problem.gap))
        return start + took


def insertion(
    problem: PathProblem,
    sets: Sequence[StageSet],
    seed: int = 0,
    by_origin: bool = False,
    go_on: Callable[[], bool] = lambda: True,
    spent: Callable[[], float] | None = None,
) -> list[Route] | None:
    """Insert launch after launch, each on the path that is home first beside all reservations.
    Returns None if ``go_on`` stops it.

    ``spent``: share of its time that is used. Where that runs ahead of the work, paths are looked
    for less carefully; at 1, the remaining launches go by the cheap rule. ``by_origin``: the ends
    peer with the longest way places all its launches first, then the next ends peer; later launches
    go around earlier ones. ``seed`` 0: as described; other seeds add noise, for other plans.
    ``sets`` are given out so that owed stages come first.
    """
    dice = random.Random(seed)
    noise = 0.0
    shuffler = None
    if seed:
        noise = 0.15
        shuffler = dice
    small = problem.total <= FEW
    tables = Tables(problem, in_order=not (by_origin and small))
    pool = Counter(sets)
    owed = {o: {s for p, s in problem.owed if p == o} for o in problem.counts}
    far = {
        o: -_distance(problem, o) * count / problem.slots[o] * (1 + noise * dice.random())
        for o, count in problem.counts.items()
    }
    launches = [
        (far[o] if by_origin else 0.0, 0.0, far[o], o)
        for o, c in problem.counts.items()
        for _ in range(min(c, problem.slots[o]))
    ]
    heapq.heapify(launches)
    left = {o: max(0, c - problem.slots[o]) for o, c in problem.counts.items()}
    lists: dict[int, list[Route]] = {o: [] for o in left}
    near = _Near(problem)
    done = 0
    while launches:
        if not go_on():
            return None
        used = 0.0
        if spent:
            used = spent()
        if used >= 1.0:
            _finish(tables, lists, pool, owed)
            break
        behind = used - SLACK
        part = done / problem.total
        effort = 2
        if small and behind <= CAREFUL * part:
            effort = 0
        elif behind <= PROMPT * part:
            effort = 1
        width, tries = EFFORTS[effort]
        first, t, _, o = heapq.heappop(launches)
        if not by_origin:
            t = max(t, first)
        tried: list[tuple[float, StageSet, Route]] = []
        for stages in offered(pool, owed[o], tries, shuffler):
            score, route = _route(tables, near, o, t, stages, width)
            tried.append((score * (1 + noise * dice.random() / 2), stages, route))
        _, stages, route = min(tried, key=itemgetter(0))
        take(stages, pool, owed[o])
        lists[o].append(route)
        done += 1
        home = _book(tables, route, t)
        if left[o]:
            left[o] -= 1
            heapq.heappush(launches, (far[o] if by_origin else home, home, far[o], o))
    turn = {o: iter(routes) for o, routes in lists.items()}
    return [next(turn[o]) for o in origins_in_turns(problem)]


def _finish(
    tables: Tables,
    lists: dict[int, list[Route]],
    pool: Counter[StageSet],
    owed: dict[int, set[int]],
) -> None:
    """Append the micro-batches that ``lists`` lacks, by the cheap rule, beside all reservations."""
    problem = tables.problem
    rule = _Cheap(tables.problem)
    rule.load = [sum(end - start for start, end in busy) for busy in tables.busy]
    rest = replace(
        problem, counts={o: count - len(lists[o]) for o, count in problem.counts.items()}
    )
    for o in origins_in_turns(rest):
        lists[o].append(rule.route(o, _taken(pool, owed[o])))


def _distance(problem: PathProblem, o: int) -> float:
    """Mean way from an ends peer to its nearer half of the others and back."""
    ways = sorted(
        problem.delays[o][n] + problem.delays[n][o] for n, s in problem.stage_of.items() if s
    )
    return sum(ways[: (len(ways) + 1) // 2]) or 1.0


def offered(
    pool: Counter[StageSet], owed: set[int], tries: int, dice: random.Random | None
) -> list[StageSet]:
    """Sets to try: first the sets that train the most owed stages, then those with the most copies
    left."""
    sets = list(pool)
    if dice is not None:
        dice.shuffle(sets)
    sets.sort(key=lambda z: (-len(owed.intersection(z)), -pool[z] if dice is None else 0))
    best = len(owed.intersection(sets[0]))
    return [z for z in sets if len(owed.intersection(z)) == best][:tries]


class _Near:
    """Replicas of a stage worth looking at from a peer."""

    def __init__(self, problem: PathProblem) -> None:
        self.problem = problem
        self.known: dict[tuple[int, int], tuple[int, ...]] = {}
        self.turn = 0

    def __call__(self, a: int, stage: int) -> tuple[int, ...]:
        peers = self.problem.stages[stage]
        if len(peers) <= NEAR + SPREAD:
            return peers
        found = self.known.get((a, stage))
        if found is None:
            there = self.problem.delays[a]
            d = self.problem.delays
            c = self.problem.compute
            found = tuple(heapq.nsmallest(NEAR, peers, key=lambda n: there[n] + d[n][a] + 2 * c[n]))
            self.known[a, stage] = found
        self.turn += 1
        return (*found, *(peers[(self.turn * SPREAD + x) % len(peers)] for x in range(SPREAD)))


def _route(
    tables: Tables, near: _Near, o: int, t: float, stages: StageSet, width: int
) -> tuple[float, Route]:
    """The path through ``stages`` that is home first, launched at t, and about when."""
    p = tables.problem
    delays = p.delays
    compute = p.compute
    back = p.backward
    t = tables.start(o, t, compute[o]) + compute[o]
    launched = t
    beam: list[tuple[float, float, float, Route]] = [(0.0, t, 0.0, (o,))]
    for s in stages:
        grown: list[tuple[float, float, float, Route]] = []
        for _, t, home, route in beam:
            a = route[-1]
            way = delays[a]
            for n in near(a, s):
                work = compute[n]
                end = tables.start(n, tables.slot(n, t + way[n]), work) + work
                back_home = home + delays[n][a] + back * work
                grown.append(
                    (end + back_home + delays[n][o] + delays[o][n], end, back_home, (*route, n))
                )
        grown.sort()
        beam = grown[:width]
    ends = [
        (
            _home(tables, route, t, {} if tables.in_order else _arrivals(tables, route, launched)),
            route,
        )
        for _, t, _, route in beam[:FINAL]
    ]
    return min(ends, key=lambda end: end[0])


def _arrivals(tables: Tables, route: Route, t: float) -> dict[int, float]:
    """Times at which the forward of a path has a slot at each of its peers; at the first one its
    work ended at t."""
    p = tables.problem
    came = {route[0]: t}
    for a, n in zip(route, route[1:], strict=False):
        came[n] = tables.slot(n, t + p.delays[a][n])
        t = tables.start(n, came[n], p.compute[n]) + p.compute[n]
    return came


def _home(tables: Tables, route: Route, t: float, came: dict[int, float]) -> float:
    """The time at which a micro-batch is home if its last forward ended at t, with the seconds
    added by which it overfills peers' slots."""
    p = tables.problem
    o = route[0]
    before = route[-1]
    work = p.loss * p.compute[o]
    t = tables.start(o, t + p.delays[before][o], work) + work
    before = o
    late = 0.0
    for n in reversed(route):
        work = p.backward * p.compute[n]
        t = tables.start(n, t + p.delays[before][n], work) + work
        if not tables.in_order and n != o:
            late += tables.crowd(n, came[n], t)
        before = n
    return t + late


def _book(tables: Tables, route: Route, t: float) -> float:
    """Reserve the tasks and slots of a path. Returns the time at which it is home."""
    p = tables.problem
    o = route[0]
    before = -1
    came: dict[int, float] = {}
    for n in route:
        if before >= 0:
            t = tables.slot(n, t + p.delays[before][n])
        came[n] = t
        t = tables.book(n, tables.start(n, t, p.compute[n]), p.compute[n])
        before = n
    work = p.loss * p.compute[o]
    t = tables.book(o, tables.start(o, t + p.delays[before][o], work), work)
    before = o
    for n in reversed(route):
        work = p.backward * p.compute[n]
        t = tables.book(n, tables.start(n, t + p.delays[before][n], work), work)
        if n != o:
            insort(tables.leave[n], t)
            if not tables.in_order:
                tables.stays[n].append((came[n], t))
        before = n
    return t
