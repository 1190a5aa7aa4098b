"""Plan the paths of an epoch: the best plan that a budget allows, with lower bounds beside it.
Pure: the clock is handed in.

Enters: Problem, a clock or a number of moves. Leaves: Plan. Never: a plan that breaks a rule or
deadlocks, a plan longer than round robin; every makespan is the exact replay's.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from statistics import median_low

from node.core.errors import UsageFault, refuse
from node.scheduler.planning.bounds import lower_bounds
from node.scheduler.planning.dealing import StageSet, deal
from node.scheduler.planning.estimate import INFINITE, Estimator
from node.scheduler.planning.first import FEW, cheap, insertion, origins_in_turns, round_robin
from node.scheduler.planning.prices import priced
from node.scheduler.planning.problem import PathProblem, Route
from node.scheduler.planning.replay import replay
from node.scheduler.planning.rules import broken, joined
from node.scheduler.planning.search import PathSearch

Clock = Callable[[], float]
FIRST = 0.85
"""Share of the budget for the first insertion, which hurries if that is not enough."""
LEAST_KEPT = 0.01
"""Share of the limit that is set aside for the end at least."""
STARTS = 0.1
"""Share of the budget for plans from scratch; the search goes on from the best of them."""
PHASES = ((0.25, 0.05), (0.5, 0.003), (0.8, 0.01), (1.0, 0.002))
"""Phases of the search: the share of the budget left at its beginning at which a phase ends, and
the most a worse plan may cost, as a share of the makespan. The first phase moves all micro-batches
of an origin together."""
SEARCHED = 1000
"""Micro-batches up to which moves are tried: with more, one evaluation takes too long for any to
help."""
ENOUGH = 1 + 1e-9
"""A plan so close to the bound is not improved further."""


@dataclass(frozen=True)
class PathPlan:
    """``routes`` in launch order. ``bounds``: lower bounds by name. ``first_s``, ``planning_s``: by
    the clock handed in. ``moves``: plans that were tried. ``owed``: stages by ends peer that no
    path of this plan joins."""

    problem: PathProblem
    routes: tuple[Route, ...]
    makespan: float
    bounds: dict[str, float]
    first_s: float
    first_makespan: float
    planning_s: float
    moves: int

    @property
    def bound(self) -> float:
        """The highest lower bound."""
        return max(self.bounds.values())

    @property
    def owed(self) -> dict[int, list[int]]:
        """Stages that the micro-batches of each ends peer did not train: a later epoch owes them to
        it."""
        seen = joined(self.problem, self.routes)
        rest = {
            o: [s for s in range(1, len(self.problem.stages)) if (o, s) not in seen]
            for o, count in self.problem.counts.items()
            if count
        }
        return {o: stages for o, stages in rest.items() if stages}


class _Budget:
    """Time or moves, whichever is over first."""

    def __init__(self, clock: Clock, limit_s: float | None, moves: int | None) -> None:
        self.clock = clock
        self.limit_s = limit_s
        self.moves = moves or INFINITE
        self.began = clock()
        self._last = self._longest = 0.0

    def keep(self, seconds: float) -> None:
        """Reserve ``seconds`` of the limit for the end of planning, half of the limit at most."""
        if self.limit_s is not None:
            self.limit_s -= min(seconds, self.limit_s / 2)

    def share(self, seconds: float) -> float:
        """``seconds`` as a share of the limit; 0 without a limit."""
        if not self.limit_s:
            return 0.0
        return seconds / self.limit_s

    def used(self, moves: int) -> float:
        """Share that is used: 0..1 and more."""
        if self.limit_s == 0:
            return 1.0
        return max(self.share(self.clock() - self.began), moves / self.moves)

    def begin(self) -> None:
        """Steps follow."""
        self._last = self.clock()

    def step(self, moves: int) -> float:
        """Used share as in :meth:`used`, but 1 if the limit leaves no time for another step of the
        longest duration seen."""
        now = self.clock()
        self._longest = max(self._longest, now - self._last)
        self._last = now
        return max(
            self.used(moves), 1.0 if self.share(now - self.began + self._longest) >= 1 else 0.0
        )


@dataclass
class _Best:
    """The best plan that the exact replay confirmed."""

    problem: PathProblem
    routes: tuple[Route, ...] = ()
    makespan: float = INFINITE
    debt: int = 1 << 60

    def offer(self, routes: Sequence[Route], seems: float | None = None) -> bool:
        """Take it if it keeps every rule, completes and is shorter; debts to ends peers count
        first."""
        debt = 0
        if self.problem.owed:
            debt = len(self.problem.owed - joined(self.problem, routes))
        if debt > self.debt:
            return False
        played = replay(self.problem, routes)
        better = (debt, played.makespan) < (self.debt, self.makespan) and len(played.done) == len(
            routes
        )
        if better:
            self.routes = tuple(routes)
            self.makespan = played.makespan
            self.debt = debt
        return better and (seems is None or played.makespan <= seems + 1e-9)


def make_plan(
    problem: PathProblem,
    *,
    clock: Clock = lambda: 0.0,
    limit_s: float | None = None,
    moves: int | None = None,
    seed: int = 0,
    known: Sequence[Sequence[Route]] = (),
) -> PathPlan:
    """The best plan found within ``limit_s`` of ``clock`` or ``moves`` tried plans, whichever ends
    first; at least one plan is made. If only ``moves`` is given, the result depends on the
    arguments alone. ``known``: plans to begin with.

    Raises UsageFault when no plan can keep the rules, with the nearest problem that has one.
    """
    if limit_s is None and moves is None:
        raise ValueError("give a limit in seconds or in moves")
    budget = _Budget(clock, limit_s, moves)
    sets = deal(problem)
    _payable(problem)
    best = _Best(problem)
    _first(problem, sets, best, budget, known)
    first_s = clock() - budget.began
    first_makespan = best.makespan
    bounds = lower_bounds(problem)
    bound = max(bounds.values())
    tried = 0
    if problem.total <= SEARCHED:
        tried = _starts(problem, sets, best, budget, bound, seed)
        if best.makespan > bound * ENOUGH and budget.used(tried) < 1.0:
            tried = _improve(problem, best, budget, bound, seed, tried)
    if best.debt:
        o, s = min(problem.owed - joined(problem, best.routes))
        raise UsageFault(
            f"no plan was found in which ends peer {o} trains stage {s}, which is owed to it",
            "give a longer --limit, or more micro-batches, or owe less",
        )
    if (why := broken(problem, best.routes)) is not None:
        raise RuntimeError(f"the planner broke a rule: {why}")
    return PathPlan(
        problem,
        best.routes,
        best.makespan,
        bounds,
        first_s,
        first_makespan,
        clock() - budget.began,
        tried,
    )


def _first(
    problem: PathProblem,
    sets: list[StageSet],
    best: _Best,
    budget: _Budget,
    known: Sequence[Sequence[Route]],
) -> None:
    """Try round robin whatever it takes; then, while there is time, the known plans, for many
    micro-batches routes by prices, else and without time for these the cheap rule and an
    insertion."""
    began = budget.clock()
    best.offer(round_robin(problem, sets))
    judging = budget.clock() - began
    simple = best.makespan
    # Judging a last plan and asking all rules at the end takes about as long as this did.
    budget.keep(max(2 * judging, LEAST_KEPT * (budget.limit_s or 0.0)))
    for routes in known:
        if budget.used(0) < FIRST and broken(problem, routes, debts=False) is None:
            best.offer(routes)
    if problem.total > FEW:
        until = FIRST - budget.share(judging)
        made = priced(problem, sets, lambda: budget.used(0) < until)
        if made is not None:
            best.offer(made)
        if problem.total > SEARCHED and best.makespan < simple:
            return
    began = budget.clock()
    for slots in (True, False):
        if budget.used(0) < FIRST / 2:
            began = budget.clock()
            best.offer(cheap(problem, sets, slots))
    here = budget.used(0)
    until = FIRST - budget.share(budget.clock() - began)
    if here < until:
        quick = insertion(problem, sets, spent=lambda: (budget.used(0) - here) / (until - here))
        if quick is not None:
            best.offer(quick)


def _payable(problem: PathProblem) -> None:
    """Check that the debts can be paid. Raises UsageFault if an ends peer is owed more stages than
    its paths have, or a stage that no path reaches."""
    hops = problem.hops
    owed = Counter(o for o, _ in problem.owed)
    refuse(
        *(
            (
                owed[o] > count * hops,
                f"ends peer {o} is owed {owed[o]} stages, its {count} paths visit {count * hops}",
                "owe less, or give more micro-batches or longer paths",
            )
            for o, count in problem.counts.items()
        ),
        *(
            (
                s > hops * problem.max_jump or not hops,
                f"stage {s}, owed to ends peer {o}, is out of reach of any path",
                f"give max_jump {s}, or owe less",
            )
            for o, s in sorted(problem.owed)
        ),
    )


def _starts(
    problem: PathProblem,
    sets: list[StageSet],
    best: _Best,
    budget: _Budget,
    bound: float,
    seed: int,
) -> int:
    """Insert again and again, the first times as described, then with noise. Returns the plans
    tried, an insertion counting as eight."""
    turns = 0
    while budget.used(turns * 8) < STARTS and best.makespan > bound * ENOUGH:
        dice = 0
        if turns:
            dice = seed * 1_000_003 + turns
        routes = insertion(problem, sets, dice, turns % 4 != 3, lambda: budget.used(0) < STARTS)
        if routes is None:
            break
        best.offer(routes)
        turns += 1
    return turns * 8


def _improve(
    problem: PathProblem, best: _Best, budget: _Budget, bound: float, seed: int, tried: int
) -> int:
    """Search in phases: few paths for each origin, all its micro-batches together, then each
    micro-batch for itself."""
    search = PathSearch(Estimator(problem), best.routes, seed)
    search.moves = tried
    begin = budget.used(tried)
    lanes = _lanes(problem, seed, lambda: budget.used(tried) < 0.5)
    for until, heat in PHASES:
        coarse = heat == PHASES[0][1]
        if coarse and lanes is None:
            continue
        here = budget.used(search.moves)
        there = begin + (1 - begin) * until
        if here >= there:
            continue

        def progress(moves: int, here: float = here, there: float = there) -> float:
            if best.makespan <= bound * ENOUGH:
                return 1.0
            return (budget.step(moves) - here) / (there - here)

        search.lanes = 0
        routes = best.routes
        if coarse and lanes:
            search.lanes, routes = lanes
        search.begin(routes)
        budget.begin()
        cutoff = best.makespan
        if best.debt:
            cutoff = INFINITE
        search.run(progress, cutoff, best.offer, heat)
    return search.moves


def _lanes(
    problem: PathProblem, seed: int, go_on: Callable[[], bool]
) -> tuple[int, list[Route]] | None:
    """A number of paths for each origin that visits all stages equally often, and a plan that
    repeats them. Returns None if no such paths repeat, or ``go_on`` ended the search for them.

    It is the smallest number with which an origin's micro-batches in flight fit into the slots of
    their peers, else the smallest.
    """
    counts = set(problem.counts.values())
    if len(counts) != 1:
        return None
    (count,) = counts
    block = [problem.slots[n] for stage in problem.stages[1:] for n in stage]
    fit = max(problem.slots[o] for o in problem.counts) / median_low(block or [1])
    divisors = (each for each in range(1, count // 2 + 1) if count % each == 0)
    for each in sorted(divisors, key=lambda each: (each < fit, each)):
        if not go_on():
            return None
        few = replace(problem, counts=dict.fromkeys(problem.counts, each), owed=frozenset())
        try:
            routes = insertion(few, deal(few), seed, True, go_on)
        except UsageFault:
            continue
        if routes is None:
            continue
        turn = {o: cycle([r for r in routes if r[0] == o]) for o in few.counts}
        return each, [next(turn[o]) for o in origins_in_turns(problem)]
    return None
