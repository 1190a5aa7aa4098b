"""Problems of the path planner: SkipPipe's published settings and made-up swarms, and the greedy
plan that ours is compared with."""

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from node.scheduler.planning.dealing import deal
from node.scheduler.planning.first import origins_in_turns
from node.scheduler.planning.problem import PathProblem, Route, parse
from node.scheduler.planning.replay import replay

DATA = Path(__file__).resolve().parent / "published"

KINDS = (
    "lan",
    "wan",
    "mixed",
    "one replica",
    "many replicas",
    "tight memory",
    "no skipping",
    "one end",
    "half skipped",
)

MORE_KINDS = (
    "two replicas",
    "many ends",
    "two slots",
    "roomy",
    "many micro-batches",
    "in order",
    "slow backward",
    "fast network",
    "slow network",
    "no gaps",
    "lopsided",
)
"""Further kinds, for benchmarks: with :data:`KINDS` twenty."""


def load(name: str) -> PathProblem:
    """A published setting."""
    return parse(json.loads((DATA / f"skippipe_{name}.json").read_text()))


def greedy(problem: PathProblem) -> list[Route]:
    """Every micro-batch by its next nearest replica, counting the work there: what a peer does that
    looks one hop ahead."""
    sets = deal(problem)
    load = [0.0] * len(problem.compute)
    routes: list[Route] = []
    for o, stages in zip(origins_in_turns(problem), sets, strict=True):
        route = [o]
        for s in stages:
            at = route[-1]
            n = min(
                problem.stages[s],
                key=lambda n: (problem.delays[at][n] + load[n] + problem.compute[n], n),
            )
            load[n] += (1 + problem.backward) * problem.compute[n] + 2 * problem.gap
            route.append(n)
        routes.append(tuple(route))
    return routes


def made_up(kind: str, seed: int) -> PathProblem:
    """A swarm of a kind: ``lan``, ``wan``, ``mixed`` and so on, the same for the same seed."""
    dice = random.Random(f"{kind}/{seed}")
    stages = dice.randint(4, 7)
    each = {"one replica": 1, "two replicas": 2, "many replicas": 9}.get(kind, dice.randint(2, 4))
    ends = {"one end": 1, "many ends": 8}.get(kind) or dice.randint(2, 5)
    blocks = stages - 1
    hops = {"no skipping": blocks, "half skipped": (blocks + 1) // 2}.get(kind, blocks - 1)
    count = 6
    if kind == "many micro-batches":
        count = 24
    if ends * count * hops % blocks:
        count = count // 6 * blocks
    slots = {"tight memory": 1, "two slots": 2, "roomy": 8}.get(kind, 3)
    made = swarm(kind, dice, stages, ends, each, hops + 1, count, slots)
    ways = {"fast network": 0.1, "slow network": 4.0}.get(kind, 1.0)
    if kind == "lopsided":
        # The way there takes up to four times as long as the way back.
        delays = [[d * dice.choice((0.5, 1.0, 2.0)) for d in row] for row in made.delays]
    else:
        delays = [[d * ways for d in row] for row in made.delays]
    return replace(
        made,
        delays=tuple(map(tuple, delays)),
        backward=3.0 if kind == "slow backward" else made.backward,
        gap=0.0 if kind == "no gaps" else made.gap,
        max_swaps=0 if kind == "in order" else made.max_swaps,
    )


def swarm(
    kind: str,
    dice: random.Random,
    stages: int,
    ends: int,
    each: int,
    length: int,
    count: int,
    slots: int,
) -> PathProblem:
    """Peers in eight places, or in one for ``lan``; unequal machines for ``mixed``."""
    blocks = stages - 1
    size = ends + blocks * each
    places = [(dice.random(), dice.random()) for _ in range(8)]
    at = [(0.0, 0.0) if kind == "lan" else dice.choice(places) for _ in range(size)]

    def way(a: int, b: int) -> float:
        far = ((at[a][0] - at[b][0]) ** 2 + (at[a][1] - at[b][1]) ** 2) ** 0.5
        return (
            0.0 if a == b else (0.01 if kind == "lan" else 0.3 + 3.0 * far) * wobble[a] * wobble[b]
        )

    wobble = [dice.uniform(0.95, 1.05) for _ in range(size)]
    order = list(range(ends, size))
    dice.shuffle(order)
    pace = [0.3 * (dice.choice((0.5, 1, 1, 2, 4)) if kind == "mixed" else 1.0) for _ in range(size)]
    return PathProblem(
        name=kind,
        delays=tuple(tuple(way(a, b) for b in range(size)) for a in range(size)),
        compute=tuple(pace),
        stages=(
            tuple(range(ends)),
            *(tuple(order[s * each : (s + 1) * each]) for s in range(blocks)),
        ),
        length=length,
        slots=tuple(3 if n < ends else slots for n in range(size)),
        counts=dict.fromkeys(range(ends), count),
        backward=1.5,
        gap=0.05,
        max_swaps=2,
        max_jump=4,
    )


def makespan(problem: PathProblem, routes: Sequence[Route]) -> float:
    """Makespan by exact replay; infinite for a deadlock."""
    played = replay(problem, routes)
    return played.makespan if len(played.done) == len(routes) else float("inf")
