"""The planner of paths beside SkipPipe's published plans and simple planners, and how it grows.

    python -m benchmarks.scheduler [--json -] [--quick] [--only 1,2]

  1  two published settings: makespan by exact replay, time of the first plan, distance to the lower
     bound; six slots at the ends; peers assigned to stages anew; made-up swarms beside round robin,
     greedy and insertion
  2  20 to 1,000 peers: seconds of one core

Live swarms on its paths are measured by ``benchmarks.live_paths``, preemptions by
``benchmarks.trace``, models with stages left out by ``benchmarks.skipping``.

All seconds of planning are seconds of one core (``time.process_time``). The published search needed
502 s for A and 90 s for B, as its authors' program was measured elsewhere, on another machine; its
plans' makespans are exact replays.
"""

import random
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median

from benchmarks.report import Report, chosen, command_line
from node.scheduler.planning.dealing import deal
from node.scheduler.planning.first import insertion, round_robin
from node.scheduler.planning.planner import PathPlan, make_plan
from node.scheduler.planning.problem import PathProblem
from node.scheduler.planning.replay import replay
from node.scheduler.planning.rules import broken
from node.tools.assignment import assign, worst_link
from testbed.planning.path_problems import KINDS, greedy, load, made_up, makespan, swarm

PUBLISHED = {"A": (33.354, 502.0), "B": (17.753, 90.0)}
"""Makespan of the published plan, replayed; seconds its search took."""
SIX = {"A": 26.0, "B": 15.5}
LIMIT = 4.5


def main() -> int:
    """Print all; exit 0 when every target holds."""
    parser = command_line(__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, at most 100 peers")
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


ITEMS: dict[str, Callable[[Report, bool], None]] = {
    "1": item_1,
    "2": item_2,
}


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


def made_up_swarms(report: Report, limit: float) -> None:
    """The rows of item 1 on swarms of all kinds."""
    for kind in KINDS:
        over = []
        beside = []
        bound = []
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


if __name__ == "__main__":
    sys.exit(main())
