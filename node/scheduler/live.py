"""An epoch of the live swarm as a path problem, and its solution as paths: names to numbers and
back. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from node.core.ids import ENDS, PeerId
from node.core.journey import Hop, Path
from node.scheduler.costs import Costs
from node.scheduler.planning.problem import MOST_COUNT, PathProblem, Route
from node.scheduler.quotas import NOMINAL

Stages = Mapping[int, Sequence[tuple[PeerId, float]]]
"""Replicas of every block stage with their speeds, micro-batches per second, 0 for unknown."""
ROOMY = 1 << 16
"""Slots of a peer that did not say how many it has."""


@dataclass(frozen=True)
class PathTask:
    """The input of path planning: micro-batches of each ends peer, replicas of the block stages
    that have any, and the rules. ``owed``: (origin, stage) and for how many epochs; ``visits``: how
    many micro-batches visit each stage; empty: equally many."""

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
        """Plans of tasks of one shape can stand in for each other, but for debts."""
        return (self.counts, self.stages, self.hops, self.max_swaps, self.max_jump, self.visits)


def problem_of(task: PathTask, costs: Costs, speeds: Mapping[PeerId, float]) -> PathProblem:
    """The problem in numbers. A peer without a measured cost has the speed in ``speeds``, else its
    stage's median, else that of all peers.

    Stages keep their order; those without a peer are not there, so the bound on jumps counts the
    stages that are.
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
    everywhere = median(found.values()) if found else 1 / NOMINAL
    for stage, peers in ((ENDS, tuple(o for o, _ in task.counts)), *task.stages):
        # The ends do other work than a stage: unless they report a cost, it is taken to be small.
        usual = (
            median(here)
            if (here := [found[p] for p in peers if p in found])
            else everywhere / (10 if stage == ENDS else 1)
        )
        found.update({p: usual for p in peers if p not in found})
    return found
