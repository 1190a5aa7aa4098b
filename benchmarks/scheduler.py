"""The planner of paths beside SkipPipe's published plans and simple planners; how it grows;
planning again while peers die.

    python -m benchmarks.scheduler [--json -] [--quick] [--only 1,3]

  1  two published settings: makespan by exact replay, time of the first plan, distance to the lower
     bound; six slots at the ends; peers assigned to stages anew; made-up swarms beside round robin,
     greedy and insertion
  2  20 to 1,000 peers: seconds of one core
  3  a tenth of the peers dies at random during an epoch: time to plan again, makespan over a plan
     that knew; costs drift by 10%; one peer dies or becomes slow: members by themselves beside a
     leader that plans again a second later (benchmarks/rerouting.py)
  4  eight daemons on shaped links: epochs with planned paths beside round robin
     (benchmarks/live_paths.py; needs root)
  5  thirty-two hours of preemptions: share of the best possible throughput with and without
     rebalancing (benchmarks/trace.py)
  6  a model trained with stages left out, and its loss with stages missing (benchmarks/skipping.py)

All seconds of planning are seconds of one core (``time.process_time``). The published search needed
502 s for A and 90 s for B, as its authors' program was measured elsewhere, on another machine; its
plans' makespans are exact replays.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from benchmarks.report import Report, chosen
from benchmarks.rerouting import an_event, by_leader, by_members
from benchmarks.trace import rebalancing
from node.pipeline.settings import PipelineLimits
from node.scheduler.planning.dealing import deal
from node.scheduler.planning.first import insertion, origins_in_turns, round_robin
from node.scheduler.planning.planner import PathPlan, make_plan
from node.scheduler.planning.problem import PathProblem, Route, parse
from node.scheduler.planning.replay import replay
from node.scheduler.planning.rules import broken
from node.tools.assignment import assign, worst_link
from node.tools.replan import ReplanEvent, play

DATA = Path(__file__).resolve().parent.parent / "tests" / "data" / "paths"
PUBLISHED = {"A": (33.354, 502.0), "B": (17.753, 90.0)}
"""Makespan of the published plan, replayed; seconds its search took."""
SIX = {"A": 26.0, "B": 15.5}
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
LIMIT = 4.5


def main() -> int:
    """Print all; exit 0 when every target holds."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - for stdout")
    parser.add_argument(
        "--quick", action="store_true", help="one seed, no 1,000 peers, short training"
    )
    parser.add_argument(
        "--only", metavar="N,N", default=",".join(ITEMS), help=f"some of {', '.join(ITEMS)}"
    )
    args = parser.parse_args()
    report = Report()
    for item in chosen(parser, args.only, ITEMS):
        ITEMS[item](report, args.quick)
    return report.end(args.json)


def item_1(report: Report, quick: bool) -> None:
    published(report, 1 if quick else 3)
    assignments(report, 1 if quick else 3)
    made_up_swarms(report, 1.0 if quick else 3.0)


def item_2(report: Report, quick: bool) -> None:
    growth(report, (20, 50, 100) if quick else (20, 50, 100, 200, 500, 1000))


def item_3(report: Report, quick: bool) -> None:
    deaths(report, 4 if quick else 20)
    drift(report, 2 if quick else 8)
    rerouting(report, 4 if quick else 20)


def item_4(report: Report, quick: bool) -> None:
    from benchmarks import live_paths

    live_paths.rows(report, 10 if quick else live_paths.EPOCHS)


def item_5(report: Report, quick: bool) -> None:
    rebalancing(report, 1 if quick else 3, 8.0 if quick else 32.0)


def item_6(report: Report, quick: bool) -> None:
    from benchmarks import skipping

    skipping.rows(report, 60 if quick else skipping.EPOCHS)


ITEMS: dict[str, Callable[[Report, bool], None]] = {
    "1": item_1,
    "2": item_2,
    "3": item_3,
    "4": item_4,
    "5": item_5,
    "6": item_6,
}


def load(name: str) -> PathProblem:
    """A published setting."""
    return parse(json.loads((DATA / f"skippipe_{name}.json").read_text()))


def timed(problem: PathProblem, limit: float, seed: int = 0) -> PathPlan:
    """A plan, checked by every rule and its replay."""
    plan = make_plan(problem, clock=time.process_time, limit_s=limit, seed=seed)
    played = replay(problem, plan.routes)
    why = broken(problem, plan.routes)
    if why or abs(played.makespan - plan.makespan) > 1e-9:
        raise AssertionError(why or "the makespan is not the replay's")
    return plan


def published(report: Report, seeds: int) -> None:
    """The rows of item 1 on SkipPipe's settings."""
    for name, (peer, took) in PUBLISHED.items():
        plans = [timed(load(name), LIMIT, seed) for seed in range(seeds)]
        worst = max(plans, key=lambda p: p.makespan)
        spread = (
            f"{min(p.makespan for p in plans):.3f} to {worst.makespan:.3f} in {seeds} seeds; "
            f"published {peer} s"
        )
        report.add(
            f"1 setting {name}, makespan",
            worst.makespan,
            "s",
            spread,
            f"at most {peer}",
            worst.makespan <= peer,
        )
        report.add(
            f"1 setting {name}, over the lower bound",
            worst.makespan / worst.bound,
            "ratio",
            f"bound {worst.bound:.3f} s",
            "",
        )
        seconds = max(p.planning_s for p in plans)
        report.add(
            f"1 setting {name}, planning",
            seconds,
            "s of one core",
            f"published search {took:.0f} s",
            "5",
            seconds <= 5,
        )
        first = max(p.first_s for p in plans)
        at = f"makespan {worst.first_makespan:.3f} s"
        report.add(f"1 setting {name}, first plan", first, "s of one core", at, "0.2", first <= 0.2)
        until = median(until_as_good(load(name), peer, seed) for seed in range(seeds))
        report.add(
            f"1 setting {name}, as good as published after",
            until,
            "s of one core",
            f"{took / until:.0f} times faster",
            "",
            None,
        )
        six = [timed(load(name).with_slots(6), LIMIT, seed) for seed in range(seeds)]
        worst = max(six, key=lambda p: p.makespan)
        spread = (
            f"{min(p.makespan for p in six):.3f} to {worst.makespan:.3f} in {seeds} seeds, "
            f"bound {worst.bound:.3f}"
        )
        target = SIX[name]
        report.add(
            f"1 setting {name}, 6 slots at the ends",
            worst.makespan,
            "s",
            spread,
            f"{target}",
            worst.makespan <= target,
        )


def assignments(report: Report, seeds: int) -> None:
    """Peers to stages: ours beside the assignment in the published settings, which their genetic
    search (DT-FM's, by links) found; both planned by the same planner for as long."""
    for name in PUBLISHED:
        given = load(name)
        theirs = timed(given, LIMIT)
        found = [
            assign(given, clock=time.process_time, limit_s=LIMIT, seed=seed)
            for seed in range(seeds)
        ]
        plans = [timed(f.problem, LIMIT, seed) for seed, f in enumerate(found)]
        over = [plan.makespan / theirs.makespan for plan in plans]
        links = ", ".join(f"{worst_link(f.problem):.2f}" for f in found)
        text = (
            f"{min(p.makespan for p in plans):.2f} to {max(p.makespan for p in plans):.2f} s in "
            f"{seeds} seeds, published assignment "
        )
        text += (
            f"{theirs.makespan:.2f} s; worst link inside a stage {links} s, theirs "
            f"{worst_link(given):.2f} s; {found[0].tried} tried"
        )
        report.add(
            f"1 setting {name}, assigned anew, over the genetic one",
            max(over),
            "ratio",
            text,
            "at most 1",
            max(over) <= 1 + 1e-9,
        )


def until_as_good(problem: PathProblem, wanted: float, seed: int) -> float:
    """Seconds until a plan is not longer than ``wanted``, by doubling the limit."""
    limit = 0.05
    while True:
        plan = make_plan(problem, clock=time.process_time, limit_s=limit, seed=seed)
        if plan.makespan <= wanted + 5e-4 or limit > 20:
            return plan.planning_s
        limit *= 1.5


def greedy(problem: PathProblem) -> list[Route]:
    """Every micro-batch by its next nearest replica, counting the work there: what a peer does that
    looks one hop ahead."""
    sets, load = deal(problem), [0.0] * len(problem.compute)
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
    each = {"one replica": 1, "many replicas": 9}.get(kind, dice.randint(2, 4))
    ends = 1 if kind == "one end" else dice.randint(2, 5)
    blocks = stages - 1
    hops = (
        blocks
        if kind == "no skipping"
        else (blocks + 1) // 2
        if kind == "half skipped"
        else blocks - 1
    )
    count = blocks if ends * 6 * hops % blocks else 6
    slots = 1 if kind == "tight memory" else 3
    return swarm(kind, dice, stages, ends, each, hops + 1, count, slots)


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
    """By exact replay; infinite for a deadlock."""
    played = replay(problem, routes)
    return played.makespan if len(played.done) == len(routes) else float("inf")


def made_up_swarms(report: Report, limit: float) -> None:
    """The rows of item 1 on swarms of all kinds."""
    for kind in KINDS:
        over, beside, bound = [], [], []
        for seed in range(2):
            problem = made_up(kind, seed)
            plan = timed(problem, limit, seed)
            sets = deal(problem)
            others = [round_robin(problem, sets), greedy(problem), insertion(problem, sets) or ()]
            best = min(makespan(problem, routes) for routes in others)
            over.append(plan.makespan / best)
            bound.append(plan.makespan / plan.bound)
            beside.append(f"{plan.makespan:.2f} of {best:.2f} s")
        text = f"{', '.join(beside)}; over the bound {max(bound):.3f}"
        report.add(
            f"1 {kind}, over the best simple plan",
            max(over),
            "ratio",
            text,
            "1",
            max(over) <= 1 + 1e-9,
        )


def growth(report: Report, sizes: Sequence[int]) -> None:
    """The rows of item 2: 16 stages and four micro-batches for each peer from 200 peers on, fewer
    stages below."""
    for size in sizes:
        stages = 16 if size >= 200 else 6
        blocks = stages - 1
        each = size * 92 // 100 // blocks
        ends = size - each * blocks
        hops = blocks * 4 // 5
        count = next(c for c in range(4 * size // ends, 8 * size) if ends * c * hops % blocks == 0)
        problem = swarm("wan", random.Random(size), stages, ends, each, hops + 1, count, 3)
        began = time.process_time()
        plan = timed(problem, 30.0 if size >= 200 else LIMIT)
        took = time.process_time() - began
        simple = min(
            makespan(problem, routes)
            for routes in (round_robin(problem, deal(problem)), greedy(problem))
        )
        text = (
            f"{stages} stages, {problem.total} micro-batches; first plan {plan.first_s:.2f} s; "
            f"makespan {plan.makespan:.1f} s, "
        )
        text += f"simple {simple:.1f} s, bound {plan.bound:.1f} s"
        report.add(
            f"2 {size} peers, planned in",
            took,
            "s of one core",
            text,
            "60",
            took < 60 and plan.makespan <= simple,
        )


def without(problem: PathProblem, dead: set[int]) -> PathProblem:
    """What a planner knows who knew beforehand: these peers are not there, their micro-batches are
    the others'."""
    ends = [o for o in problem.stages[0] if o not in dead]
    counts = {
        o: problem.total // len(ends) + (k < problem.total % len(ends)) for k, o in enumerate(ends)
    }
    return replace(
        problem,
        stages=tuple(tuple(n for n in s if n not in dead) for s in problem.stages),
        counts=counts,
    )


def deaths(report: Report, draws: int) -> None:
    """The first rows of item 3: the plan that knew has the dead from the beginning not, ours loses
    them on the way."""
    took: list[float] = []
    later: list[float] = []
    for name in PUBLISHED:
        problem, over = load(name), []
        plan = timed(problem, 2.0)
        for draw in range(draws):
            dice = random.Random(draw)
            dead = set(dice.sample(range(20), 2))
            while not all(set(stage) - dead for stage in problem.stages):
                dead = set(dice.sample(range(20), 2))
            events = [ReplanEvent(dice.random() * plan.makespan, "death", n) for n in sorted(dead)]
            running, strikes = play(problem, plan.routes, events, time.process_time, draw)
            if len(running.done) != problem.total:
                raise AssertionError("a micro-batch was lost")
            took += [s.took for s in strikes]
            later += [s.later for s in strikes]
            knew = make_plan(without(problem, dead), clock=time.process_time, limit_s=1.0)
            over.append(running.makespan / knew.makespan)
        spread = f"median {median(over):.3f}, {draws} draws of 2 of 20 peers, ends peers too"
        holds = median(over) <= 1.25
        report.add(
            f"3 setting {name}, deaths: over a plan that knew, worst",
            max(over),
            "ratio",
            spread,
            "median 1.25",
            holds,
        )
    report.add(
        "3 a death, planned again in",
        median(took) * 1000,
        "ms",
        f"worst {max(took) * 1000:.1f} ms",
        "10",
        median(took) < 0.01,
    )


def drift(report: Report, draws: int) -> None:
    """The last rows of item 3: every cost is another by up to 10%, the plan is kept and improved
    for a moment, or made afresh."""
    for name in PUBLISHED:
        problem, kept, mended, took = load(name), [], [], []
        plan = timed(problem, 2.0)
        for draw in range(draws):
            now = drifted_by(problem, random.Random(draw))
            fresh = timed(now, 2.0, draw).makespan
            event = ReplanEvent(0.0, "drift", problem=lambda _, now=now: now)
            running, strikes = play(problem, plan.routes, [event], time.process_time, draw)
            kept.append(makespan(now, plan.routes) / fresh)
            mended.append(running.makespan / fresh)
            took += [s.took for s in strikes]
        text = (
            f"worst {max(mended):.3f}; kept as it was {median(kept):.3f}; planned again in "
            f"{median(took) * 1000:.1f} ms"
        )
        value = median(mended)
        report.add(
            f"3 setting {name}, drift of 10%: over a fresh plan",
            value,
            "ratio",
            text,
            "1.05",
            value <= 1.05,
        )


def rerouting(report: Report, draws: int) -> None:
    """More rows of item 3: why no leader plans again while an epoch runs. ``8``: with as many
    micro-batches at every peer as a daemon's ends peer launches at once."""
    for name in PUBLISHED:
        published = load(name)
        for slots in (0, PipelineLimits().in_flight):
            problem = (
                replace(published, slots=(slots,) * len(published.slots)) if slots else published
            )
            plan = timed(problem, 2.0)
            for what in ("death", "slow"):
                cost, gain = [], []
                for draw in range(draws):
                    event = an_event(problem, what, plan.makespan, draw)
                    members = by_members(problem, plan.routes, event)
                    cost.append(members / plan.makespan)
                    gain.append(by_leader(problem, plan.routes, event, 1.0, draw) / members)
                report.add(
                    f"3 setting {name}, {slots or 'published'} slots, {what}: leader over members",
                    median(gain),
                    "ratio",
                    f"{min(gain):.3f} to {max(gain):.3f}, {draws} draws; members over the plan "
                    f"without it {median(cost):.3f}",
                )


def drifted_by(problem: PathProblem, dice: random.Random) -> PathProblem:
    """Every delay and every compute time times 0.9 to 1.1."""
    return replace(
        problem,
        delays=tuple(tuple(x * dice.uniform(0.9, 1.1) for x in row) for row in problem.delays),
        compute=tuple(x * dice.uniform(0.9, 1.1) for x in problem.compute),
    )


if __name__ == "__main__":
    sys.exit(main())
