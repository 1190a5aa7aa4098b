"""Plan again while an epoch runs: only what a death, a stall, a drift or a newcomer touches, in
milliseconds. Pure.

Enters: ReplayedRun and an Event. Leaves: the same run with other paths, and what it came to. First
what must change is changed, to the replica that costs least by way and by load; then a few more
changes are tried, each played to its end on a copy.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from node.core.errors import refuse
from node.scheduler.planning.problem import MOST_PEERS, PathProblem, Route, seconds, whole
from node.scheduler.planning.replay import ReplayedRun
from node.scheduler.planning.rules import bounded_jumps, bounded_swaps

TRIALS = {"death": 8, "busy": 6, "join": 12, "drift": 16}
AFTERTHOUGHTS, PAUSE = 8, 0.25
"""After an event, while the epoch runs on: as many tries again, so many times, so many (virtual)
seconds apart."""
MOST_EVENTS = 10_000
MOST_TRIED = 100
"""Micro-batches up to which changes are tried beyond those that must be: a copy of more takes too
long to play."""
What = Literal["death", "busy", "drift", "join"]


@dataclass(frozen=True)
class ReplanEvent:
    """``peer``: who dies or stalls, for ``seconds``; a newcomer's number is given. ``problem``: how
    things are afterwards, for a drift and a newcomer, given the problem before."""

    at: float
    what: What
    peer: int = -1
    seconds: float = 0.0
    problem: Callable[[PathProblem], PathProblem] = lambda before: before


@dataclass(frozen=True)
class Replanned:
    """``affected``: micro-batches whose path was changed. ``took``: seconds of the clock until all
    can go on; ``later``: those of the afterthoughts, while the epoch ran on. ``makespan``: forecast
    afterwards."""

    event: ReplanEvent
    affected: int
    took: float
    later: float
    makespan: float


def play(
    problem: PathProblem,
    routes: Sequence[Route],
    events: Sequence[ReplanEvent],
    clock: Callable[[], float] = lambda: 0.0,
    seed: int = 0,
) -> tuple[ReplayedRun, list[Replanned]]:
    """An epoch with these events, planned again at each. The run is over; dropped micro-batches
    have no end."""
    running = ReplayedRun(problem, routes)
    dice = random.Random(seed)
    out = []
    queue = sorted(events, key=lambda e: e.at)
    for event, following in zip(queue, [*queue[1:], None], strict=True):
        running.until(event.at)
        began = clock()
        affected = strike(running, event, dice)
        took, later = clock() - began, 0.0
        for k in range(1, AFTERTHOUGHTS + 1):
            at = event.at + k * PAUSE
            if len(routes) > MOST_TRIED or (following is not None and at >= following.at):
                break
            running.until(at)
            began = clock()
            improve(running, event, dice, set())
            later += clock() - began
        out.append(Replanned(event, affected, took, later, running.copy().finish()))
    running.finish()
    return running, out


def strike(running: ReplayedRun, event: ReplanEvent, dice: random.Random) -> int:
    """Let the event happen and plan again; how many paths were changed."""
    changed: set[int] = set()
    if event.what == "death":
        changed |= _without(running, event.peer)
    elif event.what == "busy":
        running.stall(event.peer, event.seconds)
    else:
        running.change(event.problem(running.problem))
    if len(running.routes) <= MOST_TRIED:
        improve(running, event, dice, changed)
    return len(changed)


def _without(running: ReplayedRun, dead: int) -> set[int]:
    problem = running.problem
    affected = running.die(dead)
    stage = problem.stage_of.get(dead)
    alive = [n for n in problem.stages[stage] if n not in running.dead] if stage is not None else []
    load = _load(running)
    for i in sorted(affected, key=lambda i: (-running.step[i], i)):
        route = running.routes[i]
        h = route.index(dead)
        if stage == 0:
            if alive:
                # Its slots are given back first: a path from elsewhere may go elsewhere.
                o = min(
                    alive,
                    key=lambda o: (
                        len(running.waiting[o]) + running.held[o],
                        problem.delays[o][route[-1]],
                        o,
                    ),
                )
                running.restart(i, o, _anew(running, o, route[1:], load))
            else:
                running.drop(i)
        elif alive:
            n = min(alive, key=lambda n: (_price(running, route, h, n, load), n))
            load[n] += 1
            running.bend(i, h, n)
        elif (n := _elsewhere(running, i, h)) is not None:
            running.bend(i, h, n)
        else:
            running.drop(i)
    return set(affected)


def _load(running: ReplayedRun) -> Counter[int]:
    """Micro-batches by peer that are still to be done there, in part or whole."""
    return Counter(
        n
        for i, route in enumerate(running.routes)
        for h, n in enumerate(route)
        if running.needs(i, h)
    )


def _price(running: ReplayedRun, route: Sequence[int], h: int, n: int, load: Counter[int]) -> float:
    """Seconds that peer n at hop h costs this path, and its share of the queue there."""
    p, d = running.problem, running.problem.delays
    before, behind = route[h - 1], route[h + 1] if h + 1 < len(route) else route[0]
    way = d[before][n] + d[n][before] + d[n][behind] + d[behind][n]
    cycle = (1 + p.backward) * p.compute[n] + 2 * p.gap
    full = max(0, load[n] + 1 - p.slots[n]) / p.slots[n]
    return way + cycle * (1 + load[n] / 2) + full * way / 2


def _anew(running: ReplayedRun, o: int, hops: Sequence[int], load: Counter[int]) -> list[int]:
    """A path through the same stages from another origin: least way and queues."""
    p, d = running.problem, running.problem.delays
    best: dict[int, tuple[float, list[int]]] = {o: (0.0, [])}
    for stage in (p.stage_of[n] for n in hops):
        alive = [n for n in p.stages[stage] if n not in running.dead]
        if not alive:
            return list(hops)
        grown: dict[int, tuple[float, list[int]]] = {}
        for n in alive:
            cycle = (1 + p.backward) * p.compute[n] + 2 * p.gap
            a = min(best, key=lambda a: (best[a][0] + d[a][n] + d[n][a], a))
            grown[n] = best[a][0] + d[a][n] + d[n][a] + cycle * (1 + load[n] / 2), [*best[a][1], n]
        best = grown
    n = min(best, key=lambda n: (best[n][0] + d[n][o] + d[o][n], n))
    load.update(best[n][1])
    return best[n][1]


def _elsewhere(running: ReplayedRun, i: int, h: int) -> int | None:
    """A peer of a stage that is not on the path, for a hop that was not begun."""
    p, route = running.problem, running.routes[i]
    if h < running.open_from(i) and running.step[i] != h:
        return None
    visited = {p.stage_of[n] for k, n in enumerate(route) if k != h}
    load = _load(running)
    options = [n for n, s in p.stage_of.items() if s and s not in visited and n not in running.dead]
    for n in sorted(options, key=lambda n: (_price(running, route, h, n, load), n)):
        bent = (*route[:h], n, *route[h + 1 :])
        if bounded_jumps(p, [bent]) is None and bounded_swaps(p, [bent]) is None:
            return n
    return None


def improve(
    running: ReplayedRun, event: ReplanEvent, dice: random.Random, changed: set[int]
) -> None:
    """Other peers for hops that were not begun, where it makes the epoch shorter; on a copy first,
    the last to end first."""
    forecast = running.copy()
    best = forecast.finish()
    for _ in range(TRIALS[event.what]):
        open_ = [
            i for i in range(len(running.routes)) if running.open_from(i) < len(running.routes[i])
        ]
        if not open_:
            return
        open_.sort(key=lambda i: (-forecast.done.get(i, 0.0), i))
        i = open_[int(len(open_) * dice.random() ** 2)]
        bends = _idea(running, event, dice, i)
        if not bends:
            continue
        trial = running.copy()
        for j, h, n in bends:
            trial.bend(j, h, n)
        length = trial.finish()
        if length < best - 1e-9:
            best, forecast = length, trial
            for j, h, n in bends:
                running.bend(j, h, n)
                changed.add(j)


def _idea(
    running: ReplayedRun, event: ReplanEvent, dice: random.Random, i: int
) -> list[tuple[int, int, int]]:
    """(micro-batch, hop, peer) to try for micro-batch i: the newcomer, not the one that stalls,
    another replica, all anew by load, or the stages of another that is not on its way either, so
    that stages stay visited equally often."""
    p, route, first = running.problem, running.routes[i], running.open_from(i)
    if event.what == "join":
        stage = p.stage_of[event.peer]
        return [
            (i, h, event.peer) for h in range(first, len(route)) if p.stage_of[route[h]] == stage
        ]
    chance = dice.random()
    if first == 1 and chance < 0.8:
        load = _load(running)
        j = (
            i
            if chance < 0.3
            else dice.choice([j for j in range(len(running.routes)) if running.open_from(j) == 1])
        )
        other = running.routes[j]
        load.subtract([*route[1:], *(other[1:] if j != i else ())])
        new = {i: _anew(running, route[0], other[1:], load)}
        if j != i:
            new[j] = _anew(running, other[0], route[1:], load)
        return [(k, h, n) for k, hops in new.items() for h, n in enumerate(hops, 1)]
    stalls = event.what == "busy" and event.peer in route[first:]
    h = route.index(event.peer, first) if stalls else dice.randrange(first, len(route))
    others = [n for n in p.stages[p.stage_of[route[h]]] if n not in running.dead and n != route[h]]
    return [(i, h, dice.choice(others))] if others else []


# ------------------------------------------------------------ events from a document


def parse_events(document: Any, problem: PathProblem) -> tuple[ReplanEvent, ...]:
    """The events of a document, checked. Raises UsageFault."""
    rows: Any = document.get("events") if isinstance(document, dict) else None
    refuse(
        (
            not isinstance(rows, list) or len(rows) > MOST_EVENTS,
            "there is no list of events, or it is too long",
            'give {"events": [{"at_s": 3.0, "what": "death", "peer": 7}]}',
        )
    )
    out: list[ReplanEvent] = []
    size = len(problem.compute)
    times = [
        seconds(row.get("at_s") if isinstance(row, dict) else None, f"at_s of event {k}")
        for k, row in enumerate(rows)
    ]
    for k, at in sorted(enumerate(times), key=lambda event: event[1]):
        row = rows[k]
        what = row.get("what")
        refuse(
            (
                not isinstance(what, str) or what not in TRIALS,
                f"event {k} is {str(what)[:40]!r}",
                f"choose one of {', '.join(TRIALS)}",
            )
        )
        if what == "drift":
            out.append(ReplanEvent(at, what, problem=_drift(row, size, k)))
        elif what == "join":
            out.append(ReplanEvent(at, what, size, problem=_join(row, size, problem, k)))
            size += 1
        else:
            peer = whole(row.get("peer"), f"peer of event {k}", 0, size - 1)
            lasts = seconds(row.get("for_s"), f"for_s of event {k}") if what == "busy" else 0.0
            out.append(ReplanEvent(at, cast("What", what), peer, lasts))
    return tuple(out)


def _drift(row: dict[str, Any], size: int, k: int) -> Callable[[PathProblem], PathProblem]:
    times = [
        seconds(row.get(key, 1.0), f"{key} of event {k}")
        for key in ("compute_factor", "delays_factor")
    ]
    who = None if "peer" not in row else whole(row["peer"], f"peer of event {k}", 0, size - 1)
    return lambda before: drifted(before, times[0], times[1], who)


def drifted(
    before: PathProblem, compute: float, delays: float, who: int | None = None
) -> PathProblem:
    """All times, or those of one peer and its links, by a factor."""
    return replace(
        before,
        compute=tuple(x * compute if who in (None, n) else x for n, x in enumerate(before.compute)),
        delays=tuple(
            tuple(x * delays if who is None or who in (a, b) else x for b, x in enumerate(row))
            for a, row in enumerate(before.delays)
        ),
    )


def _join(
    row: dict[str, Any], peer: int, problem: PathProblem, k: int
) -> Callable[[PathProblem], PathProblem]:
    refuse((peer >= MOST_PEERS, f"event {k} makes more than {MOST_PEERS} peers", "let fewer join"))
    stage = whole(row.get("stage"), f"stage of event {k}", 1, len(problem.stages) - 1)
    work = seconds(row.get("compute_s"), f"compute_s of event {k}")
    slots = whole(row.get("slots", 3), f"slots of event {k}", 1, 1 << 20)
    given: Any = row.get("delays_s")
    refuse(
        (
            not isinstance(given, list) or len(given) != peer,
            f"delays_s of event {k} does not name {peer} delays",
            "give the delay to every peer there is by then",
        )
    )
    ways = [seconds(x, f"delays_s of event {k}") for x in given]
    return lambda before: joined_by(before, stage, work, ways, slots)


def joined_by(
    before: PathProblem, stage: int, work: float, ways: Sequence[float], slots: int
) -> PathProblem:
    """With one more peer of a block stage, as far to as from everybody."""
    peer = len(before.compute)
    return replace(
        before,
        compute=(*before.compute, work),
        delays=(*((*row, way) for row, way in zip(before.delays, ways, strict=True)), (*ways, 0.0)),
        stages=tuple(
            (*peers, peer) if s == stage else peers for s, peers in enumerate(before.stages)
        ),
        slots=(*before.slots, slots),
        labels=(*before.labels, "newcomer") if before.labels else (),
    )
