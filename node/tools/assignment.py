"""Assignment of peers to stages in a new swarm: local search on the predicted time of an epoch.
Pure: the clock is handed in.

Enters: Problem with any assignment, its sizes to be kept. Leaves: Assigned, never worse than the
assignment that entered. Never: a stage without a peer, a peer where it may not be. DT-FM (arXiv
2206.01288) and SkipPipe search by the worst links inside and between stages, and never look at a
path; here every assignment is scored by the paths it allows.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from node.core.errors import refuse
from node.scheduler.planning.dealing import deal
from node.scheduler.planning.estimate import Estimator
from node.scheduler.planning.first import insertion, round_robin
from node.scheduler.planning.problem import PathProblem, Route

HOT = 0.03
"""Mean cost, over the time of an epoch, up to which a worse assignment is accepted at the start."""
COLD = 0.001
"""The same at the end of the search."""


@dataclass(frozen=True)
class Assignment:
    """``problem`` with peers where they are best; ``before_s`` and ``after_s``: predicted epoch of
    the first plan and the exchange inside stages, as given and as assigned; ``tried``: assignments
    that were scored."""

    problem: PathProblem
    before_s: float
    after_s: float
    tried: int


def assign(
    problem: PathProblem,
    *,
    clock: Callable[[], float] = lambda: 0.0,
    limit_s: float | None = None,
    moves: int | None = None,
    seed: int = 0,
) -> Assignment:
    """Exchange peers between stages, as simulated annealing does, within ``limit_s`` of ``clock``
    or ``moves`` tried assignments, whichever ends first. Stages keep their sizes, ends peers hand
    over their micro-batches with the place, and every peer keeps its own slots: ``slots_ends`` of
    the problem where it is an ends peer, else ``block_slots``.

    Raises UsageFault when a peer stands, as given, where it may not be, or when no plan can keep
    the rules.
    """
    refuse(
        *(
            (
                not problem.may(n, s),
                f"peer {n} is in stage {s}, which it may not host",
                "put it into a stage of its may_host, or allow it there",
            )
            for n, s in problem.stage_of.items()
        )
    )
    began = clock()
    dice = random.Random(seed)
    sets = deal(problem)
    at = problem
    best = problem
    value = low = first = epoch(problem, sets)
    tried = 1

    def used() -> float:
        share = 0.0
        if limit_s:
            share = (clock() - began) / limit_s
        if moves:
            return max(share, tried / moves)
        return share

    movable = [n for n in problem.stage_of if len(problem.stages) > 1]
    while movable and (share := used()) < 1.0:
        tried += 1
        changed = _exchanged(at, dice)
        if changed is None:
            continue
        new = epoch(changed, sets, lambda: used() < 1.0)
        if new <= value + dice.expovariate(1.0) * first * HOT * (COLD / HOT) ** share:
            at = changed
            value = new
            if new < low:
                best = changed
                low = new
    return Assignment(best, first, low, tried)


def epoch(
    problem: PathProblem, sets: list[tuple[int, ...]], go_on: Callable[[], bool] = lambda: True
) -> float:
    """Predicted seconds: the better of the first plan and, without one, round robin, and
    ``sync_ratio`` times the worst link between two peers of a stage, which exchange gradients;
    infinite when stopped by ``go_on``."""
    routes: list[Route] | None = insertion(problem, sets, go_on=go_on)
    if routes is None:
        if not go_on():
            return math.inf
        routes = round_robin(problem, sets)
    makespan = Estimator(problem).play(routes, problem.launches(routes))
    return makespan + problem.sync_ratio * worst_link(problem)


def worst_link(problem: PathProblem) -> float:
    """The longest delay between two peers of one stage, in seconds."""
    d = problem.delays
    return max(
        (max(d[a][b], d[b][a]) for peers in problem.stages for a in peers for b in peers if a < b),
        default=0.0,
    )


def _exchanged(problem: PathProblem, dice: random.Random) -> PathProblem | None:
    """Two peers of different stages change places, or three in a ring; None: they may not."""
    hosts = problem.stage_of
    count = 3
    if dice.random() < 0.8:
        count = 2
    chosen = dice.sample(sorted(hosts), min(len(hosts), count))
    if len({hosts[n] for n in chosen}) < len(chosen):
        return None
    ring = dict(zip(chosen, [*chosen[1:], chosen[0]], strict=True))
    if not all(problem.may(new, hosts[old]) for old, new in ring.items()):
        return None
    return placed(problem, tuple(tuple(ring.get(n, n) for n in peers) for peers in problem.stages))


def placed(problem: PathProblem, stages: tuple[tuple[int, ...], ...]) -> PathProblem:
    """The problem with these stages of the same sizes: micro-batches go with the places of the ends
    peers, slots with the peers."""
    ends = dict(zip(problem.stages[0], stages[0], strict=True))
    slots = list(problem.block_slots or problem.slots)
    for n in stages[0]:
        slots[n] = problem.slots_ends or slots[n]
    return replace(
        problem,
        stages=stages,
        counts={ends[o]: count for o, count in problem.counts.items()},
        slots=tuple(slots),
        owed=frozenset((ends[o], s) for o, s in problem.owed),
    )
