"""``tutti schedule``: a path problem from a JSON file, a plan for programs, or a table and a
picture for people.

Raises UsageFault for a fault in a document, with the next step. Reads the clock: the planner below
it does not.
"""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from node.core.errors import UsageFault
from node.scheduler.planning.estimate import Estimator
from node.scheduler.planning.planner import PathPlan, make_plan
from node.scheduler.planning.problem import parse
from node.scheduler.planning.relaxation import balance_bound
from node.scheduler.planning.replay import replay
from node.scheduler.planning.rules import safe
from node.telemetry import pictures
from node.tools import assignment, gantt
from node.tools.document import read as read_document

MOST_BYTES = 512 << 20
LONGEST_S = 3600.0
LEAST_SAVED = 0.0005
"""Smallest share of the makespan that is shown."""
WALL = 4.0
"""Seconds by the wall for one of processor time that is asked for: on a busy machine planning ends
then."""


def run_command(
    file: str,
    *,
    as_json: bool,
    chart: Path | None,
    limit: float,
    moves: int,
    slots_ends: int,
    seed: int,
    assign: bool,
) -> int:
    """Plan, print, draw. Returns the exit code. ``limit`` counts seconds of one core, so that a
    busy machine does not make plans worse; after :data:`WALL` times as long by the wall planning
    ends all the same. A number of ``moves`` alone gives the same plan on every machine."""
    if chart is not None:
        pictures.check(chart)
    if not 0 <= limit <= LONGEST_S:
        raise UsageFault(f"--limit {limit}", f"give seconds from 0.1 to {LONGEST_S:.0f}")
    problem = parse(read(file))
    if slots_ends:
        problem = problem.with_slots(slots_ends)
    # 4 seconds when nothing is said, for many micro-batches more, up to 20.
    limit_s = None
    if not moves:
        limit_s = limit or min(20.0, max(4.0, 0.005 * problem.total))
    found = None
    if assign:
        # The same number of seconds as planning, or half of the moves.
        half = None
        if moves:
            half = max(1, moves // 2)
        found = assignment.assign(problem, clock=_clock(), limit_s=limit_s, moves=half, seed=seed)
        problem = found.problem
    plan = make_plan(problem, clock=_clock(), limit_s=limit_s, moves=moves or None, seed=seed)
    plan = replace(plan, bounds={**plan.bounds, "balance": balance_bound(problem)})
    tasks = replay(problem, plan.routes).tasks
    said = document(plan)
    lines = picture(plan)
    if found:
        said["stages"] = [list(peers) for peers in problem.stages]
        said["assignment"] = {
            "before_s": round(found.before_s, 6),
            "after_s": round(found.after_s, 6),
            "tried": found.tried,
        }
        lines += [
            f"assignment   {found.after_s:.3f} s predicted with exchange of gradients, "
            f"{found.before_s:.3f} s as given; "
            f"{found.tried} tried",
            "stages       " + json.dumps(said["stages"]),
        ]
    if chart is not None:
        title = f"{problem.name}: {plan.makespan:.3f} s, lower bound {plan.bound:.3f} s"
        pictures.write(
            chart,
            lambda: gantt.svg(problem, tasks, title),
            lambda: gantt.figure(problem, tasks, title),
        )
    if as_json:
        print(json.dumps(said))
    else:
        lines += ["", *gantt.terminal(problem, tasks, sys.stdout.isatty())]
        print("\n".join(lines))
    return 0


def read(path: str) -> Any:
    """The document in a file, or on stdin for ``-``. Raises UsageFault."""
    return read_document(
        path, MOST_BYTES, "describe fewer peers", "see  tutti schedule --help  for the format"
    )


def _clock() -> Callable[[], float]:
    cpu = time.process_time()
    wall = time.monotonic()
    return lambda: max(time.process_time() - cpu, (time.monotonic() - wall) / WALL)


def document(plan: PathPlan) -> dict[str, Any]:
    """Plan for programs."""
    return {
        "paths": [{"origin": route[0], "hops": list(route[1:])} for route in plan.routes],
        "makespan_s": round(plan.makespan, 6),
        "lower_bound_s": round(plan.bound, 6),
        "planning_s": round(plan.planning_s, 3),
        "bounds_s": {name: round(value, 6) for name, value in plan.bounds.items()},
        "first_plan_s": round(plan.first_s, 4),
        "first_makespan_s": round(plan.first_makespan, 6),
        "tried": plan.moves,
        "deadlock_free": safe(plan.problem, plan.routes) is None,
        "owed": {str(o): stages for o, stages in plan.owed.items()},
    }


def picture(plan: PathPlan) -> list[str]:
    """Lines for people: one for each ends peer and the figures."""
    p = plan.problem
    done = replay(p, plan.routes).done
    estimator = Estimator(p)
    lines = [
        f"{'ends peer':<20} {'µ-batches':>9} {'last home':>10} {'shortest':>9} "
        f"{'longest path':>12}  stages trained"
    ]
    for o in p.stages[0][:40]:
        mine = [i for i, route in enumerate(plan.routes) if route[0] == o]
        if not mine:
            continue
        alone = [estimator.solo(plan.routes[i]) for i in mine]
        visits = Counter(p.stage_of[n] for i in mine for n in plan.routes[i][1:])
        trained = " ".join(f"{s}:{visits[s]}" for s in range(1, len(p.stages)))
        place = ""
        if p.labels:
            place = p.labels[o]
        name = f"{o} {place}"
        last = max(done[i] for i in mine)
        lines.append(
            f"{name:<20} {len(mine):>9} {last:>8.3f} s {min(alone):>7.3f} s {max(alone):>10.3f} s  "
            f"{trained}"
        )
    if len(p.stages[0]) > 40:
        lines.append(f"  and {len(p.stages[0]) - 40} more")
    saved = 0.0
    if plan.makespan:
        saved = 1 - plan.bound / plan.makespan
    binding = max(plan.bounds, key=lambda name: plan.bounds[name])
    lines += [
        "",
        f"makespan     {plan.makespan:.3f} s for {p.total} micro-batches, {p.hops} of "
        f"{len(p.stages) - 1} block stages each",
        f"lower bound  {plan.bound:.3f} s ({binding}): {_saving(saved)}",
        "bounds       " + "  ".join(f"{name} {value:.3f} s" for name, value in plan.bounds.items()),
        f"planning     {plan.planning_s:.2f} s, {plan.moves} plans tried; the first, "
        f"{plan.first_makespan:.3f} s, after "
        f"{plan.first_s * 1000:.0f} ms",
        *(
            f"{name:<12} {value:.3f} s, published or measured elsewhere"
            for name, value in list(p.reference.items())[:8]
        ),
    ]
    if plan.owed:
        owed = json.dumps({str(o): s for o, s in list(plan.owed.items())[:8]})
        lines.append(
            f'next epoch   not every ends peer trained every stage: plan it with  "owed": {owed}'
        )
    return lines


def _saving(share: float) -> str:
    """The share of the makespan that a better plan could save, above the least that is shown."""
    if share < LEAST_SAVED:
        return "no other paths can be faster"
    return f"other paths save at most {share:.1%} of the makespan"
