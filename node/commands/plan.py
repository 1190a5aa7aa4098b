"""Plans that are made without a swarm: ``partition`` and ``schedule``."""

from pathlib import Path

import click

from node.commands.line import options, shared
from node.commands.line.usage import FileArgument, argument, command, flag, option
from node.core.errors import ExitCode


@command()
@argument(
    "file",
    metavar="MATRICES.json",
    type=FileArgument(),
    help="Matrices, ranks, speeds, previous owners; - for stdin.",
)
@options.as_json
def partition(file: str, as_json: bool) -> int:
    """Plan which rank steps which matrix: owners, time over the ideal and over the floor, bytes
    moved, hash."""
    from node.tools import partition as tool

    asked = tool.read(file)
    plan = tool.planned(asked)
    for field in tool.unknown(asked):
        shared.say(f"unknown field {field!r} is ignored")
    if as_json:
        shared.print_json(tool.document(plan))
    else:
        print("\n".join(tool.picture(plan, asked)))
    return ExitCode.OK


@command()
@argument(
    "file",
    metavar="PROBLEM.json",
    type=FileArgument(),
    help="Peers, delays, stages, rules; - for stdin.",
)
@option("--gantt", type=options.FILE, metavar="FILE", help="Draw a Gantt chart: .svg, or .png.")
@option(
    "--limit",
    default=0.0,
    type=click.FloatRange(min=0),
    help="Seconds of one core to plan in; 0: 4, more for many paths.",
)
@option(
    "--moves",
    default=0,
    type=click.IntRange(min=0),
    help="Plans to try instead: the same result on every machine.",
)
@option(
    "--slots-ends",
    default=0,
    type=click.IntRange(min=0),
    help="In flight at an ends peer; 0: as in the problem.",
)
@option("--seed", default=0, type=click.IntRange(min=0), help="Of the search.")
@flag("--assign", help="First look for better places of the peers, stages of the same sizes.")
@options.as_json
def schedule(
    *,
    file: str,
    gantt: Path | None,
    limit: float,
    moves: int,
    slots_ends: int,
    seed: int,
    assign: bool,
    as_json: bool,
) -> int:
    """Plan which peers every micro-batch of an epoch visits: paths in launch order, makespan, lower
    bound.

    PROBLEM.json: {"delays_s": [[...]], "compute_s": [...], "stages": [[ends peers], [stage 1],
    ...], "path_length": stages of a path with stage 0, "microbatches_per_end": n or [...]} and, if
    wanted, slots_ends, slots_stage, backward_ratio, loss_ratio, gap_s, max_swaps,
    max_swap_distance, max_jump, equal_visits, owed ({"ends peer": [stages it must train]} or
    "all"); for --assign: may_host ({"peer": [stages it can host]}), sync_ratio (weight of the worst
    link inside a stage).
    """
    from node.tools import schedule as tool

    return tool.run_command(
        file,
        as_json=as_json,
        chart=gantt,
        limit=limit,
        moves=moves,
        slots_ends=slots_ends,
        seed=seed,
        assign=assign,
    )
