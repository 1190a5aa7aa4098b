"""Plans of paths at scale and at their bound.

All seconds of planning are seconds of one core. A makespan is the exact replay's; a bound is the
highest of those that ``node.scheduler.planning.bounds`` and ``relaxation`` prove.
"""

import hashlib
import os
import random
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.report import ROOT, Report
from node.scheduler.planning.planner import PathPlan, make_plan
from node.scheduler.planning.problem import PathProblem
from node.scheduler.planning.relaxation import balance_bound
from node.scheduler.planning.replay import replay
from node.scheduler.planning.rules import broken
from testbed.planning.path_problems import KINDS, MORE_KINDS, load, made_up, swarm

LIMIT_S = 4.5
"""Seconds for a plan of few micro-batches."""
LARGE_S = 5.0
"""Seconds asked for a plan of 1,000 peers."""
BEFORE = 603.327
"""Makespan in seconds for 1,000 peers of the plan by insertion, which took 8.9 to 15.7 s."""
CLOSE = 1.10
"""Makespan over the bound asked for."""
SIX_S = 22.0
"""Makespan asked for setting A with six slots at the ends."""
DIGEST = "from benchmarks.proof import plans; print(plans.digest(plans.large(200)))"


def rows(report: Report, root: Path, quick: bool = False) -> None:
    """The rows of part 10."""
    at_scale(report)
    alike(report)
    for kind in (*KINDS, *MORE_KINDS):
        beside_the_bound(report, kind, 1 if quick else 2, 1.0 if quick else LIMIT_S)
    six_slots(report, 1 if quick else 3)


def large(size: int) -> PathProblem:
    """A swarm of ``size`` peers with 16 stages, and four micro-batches for each peer."""
    each = size * 92 // 100 // 15
    ends = size - 15 * each
    count = next(c for c in range(4 * size // ends, 8 * size) if ends * c * 12 % 15 == 0)
    return swarm("wan", random.Random(size), 16, ends, each, 13, count, 3)


def checked(problem: PathProblem, limit_s: float, seed: int = 0) -> PathPlan:
    """Make a plan and check it against the rules and the replay. Raises RuntimeError if it breaks a
    rule, or if the replay has another makespan."""
    plan = make_plan(problem, clock=time.process_time, limit_s=limit_s, seed=seed)
    why = broken(problem, plan.routes)
    if why or abs(replay(problem, plan.routes).makespan - plan.makespan) > 1e-9:
        raise RuntimeError(why or "the makespan is not the replay's")
    return plan


def at_scale(report: Report) -> None:
    """Plan 1,000 peers anew, and once more from that plan."""
    problem = large(1000)
    plan = checked(problem, LARGE_S)
    report.add(
        "10 1,000 peers, 16 stages, planned in",
        plan.planning_s,
        "s of one core",
        f"{problem.total} micro-batches; first plan {plan.first_s:.2f} s; before 8.9 to 15.7 s",
        f"at most {LARGE_S:g}",
        plan.planning_s <= LARGE_S,
    )
    report.add(
        "10 1,000 peers, makespan over that of insertion",
        plan.makespan / BEFORE,
        "ratio",
        f"{plan.makespan:.1f} s; bound {plan.bound:.1f} s",
        "at most 1",
        plan.makespan <= BEFORE,
    )
    again = make_plan(problem, clock=time.process_time, limit_s=LARGE_S, known=[plan.routes])
    report.add(
        "10 1,000 peers, planned again from the plan before",
        again.planning_s,
        "s of one core",
        f"makespan {again.makespan:.1f} s",
        f"at most {LARGE_S:g} and no longer a plan",
        again.planning_s <= LARGE_S and again.makespan <= plan.makespan,
    )


def digest(problem: PathProblem) -> str:
    """SHA-256 of a plan that depends on its problem alone."""
    return hashlib.sha256(repr(make_plan(problem, moves=20).routes).encode()).hexdigest()


def alike(report: Report) -> None:
    """Plan one problem in two processes with different hash seeds and vector instructions of
    numpy."""
    found = set[str]()
    for seed, off in (("1", ""), ("2", "AVX2 FMA3 AVX512F AVX512_SKX X86_V3 X86_V4")):
        done = subprocess.run(
            [sys.executable, "-c", DIGEST],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": seed, "NPY_DISABLE_CPU_FEATURES": off},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(done.stderr[-300:])
        found.add(done.stdout)
    report.add(
        "10 different plans of two processes for one problem",
        len(found) - 1,
        "plans",
        "200 peers; other hash seeds, with numpy's vector instructions and without",
        "0",
        len(found) == 1,
    )


def beside_the_bound(report: Report, kind: str, seeds: int, limit_s: float) -> None:
    """The makespan of swarms of a kind over their highest lower bound."""
    over: list[float] = []
    said: list[str] = []
    for seed in range(seeds):
        problem = made_up(kind, seed)
        plan = checked(problem, limit_s, seed)
        bounds = {**plan.bounds, "balance": balance_bound(problem)}
        name = max(bounds, key=bounds.__getitem__)
        over.append(plan.makespan / bounds[name])
        said.append(f"{plan.makespan:.2f} s, {name} {bounds[name]:.2f} s")
    report.add(
        f"10 {kind}, over the proven bound",
        max(over),
        "ratio",
        "; ".join(said),
        f"at most {CLOSE:.2f}",
        max(over) <= CLOSE + 1e-9,
    )


def six_slots(report: Report, seeds: int) -> None:
    """The published setting A with twice the memory at its ends."""
    problem = load("A").with_slots(6)
    bound = balance_bound(problem)
    spans = [checked(problem, LIMIT_S, seed).makespan for seed in range(seeds)]
    report.add(
        "10 setting A, 6 slots at the ends",
        max(spans),
        "s",
        f"{min(spans):.2f} to {max(spans):.2f} in {seeds} seeds; bound {bound:.2f} s",
        f"at most {SIX_S:g}",
        max(spans) <= SIX_S,
    )
