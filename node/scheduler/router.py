"""Lays the paths of one epoch after another, from the plans it knows or at once, and says which
plan is worth improving. Pure.

Enters: ends peers, replicas, believed costs. Leaves: paths, the seconds they should take, the rule
they come from. Never: a search that blocks the caller: the size of the problem bounds the work done
at once; the rest is a :class:`SearchJob` for a thread (at once in a simulation). Its result serves
the next epoch.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from statistics import median

from node.core.errors import UsageFault
from node.core.ids import ENDS, PeerId
from node.core.journey import Hop, Path
from node.scheduler.costs import Costs
from node.scheduler.evening import evened
from node.scheduler.planning.dealing import StageSet, deal
from node.scheduler.planning.estimate import INFINITE, Estimator
from node.scheduler.planning.first import insertion
from node.scheduler.planning.planner import make_plan
from node.scheduler.planning.problem import MOST_COUNT, PathProblem, Route
from node.scheduler.planning.rules import broken, joined
from node.scheduler.quotas import NOMINAL, quotas, turns
from node.scheduler.settings import SchedulerSettings

Routes = tuple[Route, ...]
Stages = Mapping[int, Sequence[tuple[PeerId, float]]]
"""Replicas of every block stage with their speeds, micro-batches per second, 0 for unknown."""
Debt = tuple[PeerId, int]
"""(origin, block stage) that have not met lately."""

AT_ONCE = 40_000
"""Partial paths an insertion may look at while somebody waits for the plan: about 15 ms."""
COMPARED = 20_000
"""Visits of all micro-batches up to which plans are compared while somebody waits: a few
milliseconds each."""
KEPT = 8
"""Plans kept for a shape of problem."""
SHAPES = 16
"""Shapes of problem for which plans are kept."""
FORGOTTEN = 64
"""Epochs without a micro-batch of an ends peer after which nothing is owed to it."""
DEBT = 0.02
"""Price of leaving a debt of one epoch unpaid, as a share of the makespan; a debt of two epochs
costs twice the price."""
MOVED = 0.05
"""Share of the searched makespan by which a run must be longer to be worth a new search."""
SEARCHES = 4
"""Most searches for one shape of problem at steady costs; a search that finds nothing better is the
last one in any case."""
ROOMY = 1 << 16
"""Slots of a peer that did not say how many it has."""


@dataclass(frozen=True)
class PathTask:
    """The input of path planning: micro-batches of each ends peer, replicas of the block stages
    that have any, and the rules. ``owed``: (origin, stage) and the number of epochs for which it is
    owed; ``visits``: number of micro-batches that visit each stage; empty: equally many."""

    counts: tuple[tuple[PeerId, int], ...]
    stages: tuple[tuple[int, tuple[PeerId, ...]], ...]
    hops: int
    max_swaps: int
    max_jump: int
    owed: tuple[tuple[tuple[PeerId, int], int], ...] = ()
    visits: tuple[int, ...] = ()

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """The problem's peers in order of their numbers."""
        return (*(o for o, _ in self.counts), *(p for _, replicas in self.stages for p in replicas))

    @property
    def shape(self) -> tuple[object, ...]:
        """Shape of the task: plans of tasks of one shape can stand in for each other, except for
        debts."""
        return (self.counts, self.stages, self.hops, self.max_swaps, self.max_jump, self.visits)


@dataclass(frozen=True)
class Laid:
    """An epoch's paths. ``run_s``: the seconds that they should take, 0 when that was not computed;
    ``how``: turns, insertion, or search."""

    paths: tuple[Path, ...]
    run_s: float
    how: str
    task: PathTask | None = None
    owed: tuple[tuple[PeerId, int], ...] = ()
    """Debts that these paths do not pay."""


@dataclass(frozen=True)
class SearchJob:
    """A problem worth a search, and the plans it starts from."""

    task: PathTask
    problem: PathProblem
    known: tuple[Routes, ...]


class Rotation:
    """Rotation of the stages that are left out: every ends peer trains every block stage, and all
    stages equally often, over the epochs.

    Remembers when each origin last trained each stage, in epochs counted here, and how often each
    stage was visited. A leader that takes over learns it from the plan before. Origins without work
    for :data:`FORGOTTEN` epochs are forgotten.
    """

    def __init__(self) -> None:
        self._turn = 0
        self._last: dict[Debt, int] = {}
        self._since: dict[PeerId, int] = {}
        self._newest: dict[PeerId, int] = {}
        """The last epoch with a micro-batch of each origin."""
        self._visits: Counter[int] = Counter()

    def counted(self, paths: Iterable[Path]) -> None:
        """An epoch was committed with these paths."""
        self._turn += 1
        for path in paths:
            self._since.setdefault(path.origin, self._turn)
            self._newest[path.origin] = self._turn
            for hop in path.hops:
                self._last[path.origin, hop.stage] = self._turn
                self._visits[hop.stage] += 1
        gone = {o for o, epoch in self._newest.items() if self._turn - epoch >= FORGOTTEN}
        if gone:
            self._last = {debt: epoch for debt, epoch in self._last.items() if debt[0] not in gone}
            for origin in gone:
                del self._since[origin]
                del self._newest[origin]

    def after(self, paths: Iterable[Path]) -> "Rotation":
        """The rotation after an epoch with these paths; this one does not change."""
        ahead = deepcopy(self)
        ahead.counted(paths)
        return ahead

    def owed(
        self, counts: Mapping[PeerId, int], stages: Collection[int], hops: int
    ) -> dict[Debt, int]:
        """By ends peer and stage, the epochs since they met, where that was not the last one; the
        oldest debts of a peer come first, and no more than its paths can pay."""
        if hops >= len(stages):
            return {}
        found: dict[Debt, int] = {}
        for origin, count in sorted(counts.items()):
            since = self._since.get(origin)
            if since is None or not count:
                continue
            ages = {s: self._turn - self._last.get((origin, s), since - 1) for s in stages}
            oldest = sorted((s for s in stages if ages[s] > 0), key=lambda s: (-ages[s], s))
            found.update({(origin, s): ages[s] for s in oldest[: count * hops]})
        return found

    def visits(self, stages: Collection[int], total: int) -> dict[int, int]:
        """Visits of each stage, ``total`` in all; if they do not divide evenly, the stages with the
        fewest visits up to now get one more."""
        each, more = divmod(total, len(stages))
        fewest = sorted(stages, key=lambda s: (self._visits[s], s))[:more]
        return {s: each + (s in fewest) for s in stages}


class Router:
    """Makes the paths of every epoch of a run with ``stages`` block stages. Not thread safe; a
    :class:`SearchJob` may run on any thread."""

    def __init__(self, settings: SchedulerSettings, stages: int) -> None:
        self.settings = settings
        self.stages = stages
        self.rotation = Rotation()
        self._known: dict[tuple[object, ...], list[tuple[Routes, str]]] = {}
        self._searched: dict[tuple[object, ...], tuple[int, float]] = {}
        self._speeds: Mapping[PeerId, float] = {}

    def task(self, ends: Sequence[tuple[PeerId, float]], stages: Stages, total: int) -> PathTask:
        """The input of path planning, without debts and visits. Raises ValueError when there are
        fewer stages with a peer than a path has hops."""
        live = tuple(
            (s, tuple(sorted(p for p, _ in stages[s]))) for s in sorted(stages) if stages[s]
        )
        hops = self.settings.hops(self.stages)
        if len(live) < hops:
            raise ValueError(f"{len(live)} stages have a peer, a path has {hops} hops")
        counts = tuple(sorted(quotas(total, list(ends)).items()))
        return PathTask(counts, live, hops, self.settings.max_swaps, self.settings.max_jump)

    def _dealt(
        self, task: PathTask, rotation: Rotation, costs: Costs
    ) -> tuple[PathTask, PathProblem, list[StageSet]]:
        """The task with its debts and visits due, the same as a problem, and a set of stages for
        every micro-batch."""
        task = self._due(task, rotation, rotation)
        problem = problem_of(task, costs, self._speeds)
        try:
            return task, problem, deal(problem)
        except UsageFault:
            # With bounded jumps not every stage can have one visit more; the first stages can.
            task = self._due(task, rotation, Rotation())
            problem = replace(problem, visits=task.visits)
            return task, problem, deal(problem)

    def _due(self, task: PathTask, rotation: Rotation, turns: Rotation) -> PathTask:
        """The task with the debts there are then, and with the visits of every stage where they are
        not equal: those that are kept get all, the others share the rest, in these turns."""
        counts = dict(task.counts)
        stages = [s for s, _ in task.stages]
        kept = self.settings.kept(stages, task.hops)
        total = sum(counts.values())
        rest = total * (task.hops - len(kept))
        visits: dict[int, int] = {}
        if kept or rest % len(stages):
            shared = turns.visits(stages[len(kept) :], rest)
            visits = dict.fromkeys(kept, total) | shared
        owed = sorted(rotation.owed(counts, stages, task.hops).items())
        return replace(task, owed=tuple(owed), visits=tuple(visits.values()))

    def lay(
        self,
        ends: Sequence[tuple[PeerId, float]],
        stages: Stages,
        samples: Sequence[tuple[int, ...]],
        costs: Costs,
    ) -> Laid:
        """Paths for micro-batches of these samples. ``ends`` and ``stages`` with speeds; raises
        ValueError as :meth:`task`."""
        if not samples:
            return Laid((), 0.0, "turns")
        task = self.task(ends, stages, len(samples))
        self._speeds = {p: v for row in (ends, *stages.values()) for p, v in row}
        task, problem, sets = self._dealt(task, self.rotation, costs)
        planned = self.settings.paths == "planned"
        # The dealt sets go to the origins in one way; in several where that may pay debts.
        shifts = 1
        if task.owed:
            shifts = min(len(problem.stages), problem.total)
        options: list[tuple[Routes, str]] = [
            (_in_turns(problem, sets, shift), "turns") for shift in range(shifts)
        ]
        if planned:
            options += self._known.get(task.shape, [])
            if not self._known.get(task.shape) and _partial(problem, sets) <= AT_ONCE:
                made = insertion(problem, sets)
                if made is not None:
                    options.append((tuple(made), "insertion"))
        routes, how, run_s = self._best(problem, task, options, planned)
        if planned:
            self._keep(task, routes, how)
        unpaid = tuple(sorted(_unpaid(task, problem, routes)))
        return Laid(paths_of(task, routes, samples), run_s, how, task, unpaid)

    def _best(
        self, problem: PathProblem, task: PathTask, options: list[tuple[Routes, str]], planned: bool
    ) -> tuple[Routes, str, float]:
        """The option with the least price, made of makespan and debts, with even shares. If the
        paths are laid in turns, only debts count, so that measurements do not matter."""
        if problem.total * problem.length > COMPARED:
            routes, how = next(
                (r, how)
                for r, how in reversed(options)
                if how == "turns" or broken(problem, r, debts=False) is None
            )
            return routes, how, 0.0
        estimator = Estimator(problem)
        ages = dict(task.owed)
        priced: list[tuple[float, float, Routes, str]] = []
        for routes, how in options:
            makespan = estimator.play(routes, problem.launches(routes))
            debt = DEBT * sum(ages[d] for d in _unpaid(task, problem, routes))
            priced.append((makespan * (1 + debt) if planned else debt, makespan, routes, how))
        for _, makespan, routes, how in sorted(priced, key=itemgetter(0)):
            if broken(problem, routes, debts=False) is None:
                if makespan == INFINITE:
                    return routes, how, 0.0
                if planned:
                    plays = COMPARED // (problem.total * problem.length)
                    routes, makespan = evened(problem, routes, makespan, plays)
                return routes, how, makespan
        raise RuntimeError("turns break a rule")

    def job(self, laid: Laid, costs: Costs) -> SearchJob | None:
        """The search to make while ``laid`` runs: the same problem at today's costs, with the debts
        that will then be due. None if nothing better is to be expected."""
        if self.settings.paths != "planned" or laid.task is None:
            return None
        due, problem, _ = self._dealt(laid.task, self.rotation.after(laid.paths), costs)
        tries, makespan = self._searched.get(due.shape, (0, INFINITE))
        if tries >= SEARCHES and laid.run_s <= makespan * (1 + MOVED):
            return None
        return SearchJob(due, problem, tuple(r for r, _ in self._known.get(due.shape, ())))

    def improved(self, job: SearchJob, routes: Routes, makespan: float) -> None:
        """A search has ended with this plan."""
        tries, before = self._searched.get(job.task.shape, (0, INFINITE))
        again = 1
        if makespan > before * (1 - MOVED):
            again = tries + 1
        self._searched[job.task.shape] = (again, makespan)
        self._keep(job.task, routes, "search")

    def _keep(self, task: PathTask, routes: Routes, how: str) -> None:
        kept = self._known.pop(task.shape, [])
        self._known[task.shape] = [*(k for k in kept if k[0] != routes), (routes, how)][-KEPT:]
        for old in list(self._known)[:-SHAPES]:
            self._known.pop(old)
            self._searched.pop(old, None)


def search(
    job: SearchJob,
    *,
    clock: Callable[[], float] = lambda: 0.0,
    limit_s: float | None = None,
    moves: int | None = None,
) -> tuple[Routes, float]:
    """The best plan found within the budget, from those known; debts that cannot be paid at once
    stay. Its makespan beside it."""
    planned = partial(make_plan, clock=clock, limit_s=limit_s, moves=moves, known=job.known)
    try:
        plan = planned(job.problem)
    except UsageFault:
        plan = planned(replace(job.problem, owed=frozenset()))
    return plan.routes, plan.makespan


def _in_turns(problem: PathProblem, sets: Sequence[StageSet], shift: int) -> Routes:
    """Origins in proportion to their counts, replicas of every stage in proportion to their speeds;
    ``shift``: number of dealt sets that are passed over at the beginning."""
    origins = turns([(o, float(count)) for o, count in problem.counts.items() if count])
    replicas = {
        s: turns([(n, 1 / c if (c := problem.compute[n]) > 0 else 0.0) for n in peers])
        for s, peers in enumerate(problem.stages)
        if s
    }
    return tuple(
        (next(origins), *(next(replicas[s]) for s in stages))
        for stages in (*sets[shift:], *sets[:shift])
    )


def _partial(problem: PathProblem, sets: Sequence[StageSet]) -> int:
    """Partial paths that an insertion looks at, roughly."""
    widest = max((len(peers) for peers in problem.stages[1:]), default=1)
    return problem.total * problem.hops * min(widest, 9) * 8 * min(12, len(set(sets)))


def _unpaid(task: PathTask, problem: PathProblem, routes: Routes) -> list[tuple[PeerId, int]]:
    if not task.owed:
        return []
    met = joined(problem, routes)
    names = task.peers
    stages = [0, *(s for s, _ in task.stages)]
    return [(names[o], stages[k]) for o, k in problem.owed if (o, k) not in met]


def problem_of(task: PathTask, costs: Costs, speeds: Mapping[PeerId, float]) -> PathProblem:
    """The problem in numbers. A peer without a measured cost has the speed in ``speeds``, else the
    median speed of its stage, else the median of all peers.

    Stages keep their order; stages without a peer are left out, so the bound on jumps counts the
    stages that remain.
    """
    ratio = costs.backward
    whole = _compute(task, costs, speeds)
    compute = tuple(whole[p] / (1 + ratio) for p in task.peers)
    # The loss is the ends peers' own; one ratio has to do for all of them.
    loss = [
        costs.loss[o] * (1 + ratio) / whole[o]
        for o, _ in task.counts
        if o in costs.loss and whole[o] > 0
    ]
    numbers = {p: n for n, p in enumerate(task.peers)}
    stages = (
        tuple(numbers[o] for o, _ in task.counts),
        *(tuple(numbers[p] for p in replicas) for _, replicas in task.stages),
    )
    place = {s: k + 1 for k, (s, _) in enumerate(task.stages)}
    return PathProblem(
        name="epoch",
        delays=tuple(
            tuple(costs.delay(a, b) if a != b else 0.0 for b in task.peers) for a in task.peers
        ),
        compute=compute,
        stages=stages,
        length=task.hops + 1,
        slots=tuple(costs.slots.get(p, ROOMY) for p in task.peers),
        counts={numbers[o]: count for o, count in task.counts},
        backward=ratio,
        loss=median(loss) if loss else 0.25,
        max_swaps=task.max_swaps,
        max_swap_distance=max(1, task.max_swaps),
        max_jump=task.max_jump or MOST_COUNT,
        owed=frozenset((numbers[o], place[s]) for (o, s), _ in task.owed),
        visits=task.visits,
    )


def paths_of(
    task: PathTask, routes: Sequence[Route], samples: Sequence[tuple[int, ...]]
) -> tuple[Path, ...]:
    """Routes as paths: micro-batch i is made of ``samples[i]``."""
    peers = task.peers
    stage = {p: s for s, replicas in task.stages for p in replicas}
    return tuple(
        Path(
            i, peers[route[0]], tuple(ids), tuple(Hop(stage[peers[n]], peers[n]) for n in route[1:])
        )
        for i, (route, ids) in enumerate(zip(routes, samples, strict=True))
    )


def _compute(task: PathTask, costs: Costs, speeds: Mapping[PeerId, float]) -> dict[PeerId, float]:
    """Seconds of a micro-batch at each peer, forward and backward."""
    known = {
        p: costs.compute.get(p) or (1 / speeds[p] if speeds.get(p) else 0.0) for p in task.peers
    }
    found = {p: s for p, s in known.items() if s > 0}
    everywhere = 1 / NOMINAL
    if found:
        everywhere = median(found.values())
    for stage, peers in ((ENDS, tuple(o for o, _ in task.counts)), *task.stages):
        # The ends do other work than a stage: unless they report a cost, it is taken to be small.
        here = [found[p] for p in peers if p in found]
        if here:
            usual = median(here)
        elif stage == ENDS:
            usual = everywhere / 10
        else:
            usual = everywhere
        found.update({p: usual for p in peers if p not in found})
    return found
