"""``tutti schedule``: a path problem from a JSON file, a plan for programs, or a table and a
picture for people.

Raises UsageFault for what is wrong in a document, with the next step. Reads the clock: the planner
below it does not.
"""

import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from node.core.errors import UsageFault
from node.scheduler.planning.estimate import Estimator
from node.scheduler.planning.planner import PathPlan, make_plan
from node.scheduler.planning.problem import PathProblem, Route, parse
from node.scheduler.planning.replay import replay
from node.scheduler.planning.rules import broken, safe
from node.telemetry import pictures
from node.tools import assignment, gantt, replan
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
    events: Path | None,
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
    limit_s = None if moves else limit or min(20.0, max(4.0, 0.005 * problem.total))
    found = None
    if assign:
        # As many seconds as planning gets, or half as many moves.
        half = max(1, moves // 2) if moves else None
        found = assignment.assign(problem, clock=_clock(), limit_s=limit_s, moves=half, seed=seed)
        problem = found.problem
    given = read(str(events)) if events else {"events": []}
    strikes = replan.parse_events(given, problem)
    routes, plan = _given(given, problem), None
    if routes is None:
        plan = make_plan(problem, clock=_clock(), limit_s=limit_s, moves=moves or None, seed=seed)
        routes = plan.routes
    tasks = replay(problem, routes)
    said = (
        document(plan)
        if plan
        else {"paths": _paths(routes), "makespan_s": round(tasks.makespan, 6)}
    )
    lines = picture(plan) if plan else []
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
    if events is not None:
        more, text = again(problem, routes, strikes, seed)
        said, lines = said | more, lines + text
    if chart is not None:
        bound = f", lower bound {plan.bound:.3f} s" if plan else ""
        title = f"{problem.name}: {tasks.makespan:.3f} s{bound}"
        pictures.write(
            chart,
            lambda: gantt.svg(problem, tasks.tasks, title),
            lambda: gantt.figure(problem, tasks.tasks, title),
        )
    if as_json:
        print(json.dumps(said))
    else:
        if events is None:
            lines += ["", *gantt.terminal(problem, tasks.tasks, sys.stdout.isatty())]
        print("\n".join(lines))
    return 0


def read(path: str) -> Any:
    """The document in a file, or on stdin for ``-``. Raises UsageFault."""
    return read_document(
        path, MOST_BYTES, "describe fewer peers", "see  tutti schedule --help  for the format"
    )


def _clock() -> Callable[[], float]:
    cpu, wall = time.process_time(), time.monotonic()
    return lambda: max(time.process_time() - cpu, (time.monotonic() - wall) / WALL)


def _given(document: dict[str, Any], problem: PathProblem) -> tuple[Route, ...] | None:
    """The plan in a document of events, checked; None: there is none, so one is made."""
    if "paths" not in document:
        return None
    rows = document["paths"]
    routes: list[Route] = []
    for k, row in enumerate(rows if isinstance(rows, list) else [rows]):
        hops: list[Any] = [None]
        if isinstance(row, dict) and isinstance(row.get("hops"), list):
            hops = [row.get("origin"), *row["hops"]]
        if not all(
            isinstance(n, int) and not isinstance(n, bool) and n in problem.stage_of for n in hops
        ):
            raise UsageFault(
                f"path {k} is not a path",
                'give {"origin": 0, "hops": [5, 9, 13]}, as `tutti schedule --json` does',
            )
        routes.append(tuple(hops))
    if why := broken(problem, routes):
        raise UsageFault(
            f"the plan breaks a rule: {why}", "plan again:  tutti schedule PROBLEM.json --json"
        )
    return tuple(routes)


def _paths(routes: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    return [{"origin": route[0], "hops": list(route[1:])} for route in routes]


def document(plan: PathPlan) -> dict[str, Any]:
    """For programs."""
    return {
        "paths": _paths(plan.routes),
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
    """For people: a line for each ends peer and the figures."""
    p = plan.problem
    done, estimator = replay(p, plan.routes).done, Estimator(p)
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
        name = f"{o} {p.labels[o] if p.labels else ''}"
        last = max(done[i] for i in mine)
        lines.append(
            f"{name:<20} {len(mine):>9} {last:>8.3f} s {min(alone):>7.3f} s {max(alone):>10.3f} s  "
            f"{trained}"
        )
    if len(p.stages[0]) > 40:
        lines.append(f"  and {len(p.stages[0]) - 40} more")
    saved = 1 - plan.bound / plan.makespan if plan.makespan else 0.0
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


def again(
    problem: PathProblem,
    routes: tuple[Route, ...],
    events: tuple[replan.ReplanEvent, ...],
    seed: int,
) -> tuple[dict[str, Any], list[str]]:
    """An epoch of the plan with these events: for programs, and for people."""
    running, strikes = replan.play(problem, routes, events, time.process_time, seed)
    rows = [
        {
            "at_s": s.event.at,
            "what": s.event.what,
            "peer": s.event.peer,
            "affected": s.affected,
            "replan_s": round(s.took, 5),
            "afterthought_s": round(s.later, 5),
            "makespan_s": round(s.makespan, 3) if s.makespan < math.inf else None,
        }
        for s in strikes
    ]
    dropped = [i for i in range(len(routes)) if i not in running.done]
    lines = [
        "",
        f"{'at':>9}  {'what':<6} {'peer':>5} {'paths changed':>13} {'planned in':>11} "
        f"{'makespan then':>14}",
    ]
    lines += [
        f"{r['at_s']:>7.2f} s  {r['what']:<6} {r['peer'] if r['peer'] >= 0 else 'all':>5} "
        f"{r['affected']:>13} "
        f"{r['replan_s'] * 1000:>8.1f} ms "
        f"{r['makespan_s'] if r['makespan_s'] is not None else 'never':>12} s"
        for r in rows
    ]
    lines.append(
        f"makespan with events {running.makespan:.3f} s; {running.again} started again, "
        f"{len(dropped)} dropped"
    )
    return {
        "replanned": {
            "paths": _paths(running.routes),
            "makespan_s": round(running.makespan, 6),
            "dropped": dropped,
            "started_again": running.again,
            "events": rows,
        }
    }, lines
