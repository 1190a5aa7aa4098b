"""A swarm in virtual time: ``simulate``."""

import os
from pathlib import Path
from typing import Any

import click

from node.commands.line import options
from node.commands.line.usage import OneOf, argument, command, flag, option, repeatable
from node.core.errors import UsageFault
from node.sim.names import AVERAGING, SCENARIOS

SIZES = ("peers", "ends", "stages", "epochs", "small")
"""Parameters that say how large the simulated run is."""


@command(epilog="Scenarios. " + "; ".join(f"{name}: {says}" for name, says in SCENARIOS.items()))
@argument(
    "swarm",
    metavar="[SWARM.toml]",
    default=None,
    type=options.FILE,
    help="Default: the manifest of the demo.",
)
@option("--peers", default=12, type=click.IntRange(2, 10_000), help="Peers in all.")
@option(
    "--ends", default=0, type=click.IntRange(0, 1000), help="Of them at the ends; 0: one in twelve."
)
@option("--stages", default=0, type=click.IntRange(0, 512), help="Block stages; 0: the manifest's.")
@option(
    "--epochs", default=0, type=click.IntRange(min=0), help="Epochs of the run; 0: the manifest's."
)
@repeatable(
    "--scenario", type=OneOf(SCENARIOS), metavar="NAME", help="Faults to simulate; may be repeated."
)
@option("--seed", default=0, type=click.IntRange(min=0), help="Seed of all random choices.")
@option("--replay", type=options.FILE, metavar="FILE", help="Replay the faults in this file.")
@option("--save", type=options.FILE, metavar="FILE", help="Write the faults to this file.")
@option(
    "--svg",
    "--png",
    "picture",
    type=options.FILE,
    metavar="FILE",
    help="Draw the time line: .svg, or .png.",
)
@flag("--small", help="The small swarm of the tests; of sizes only --epochs counts.")
@option(
    "--averaging",
    type=OneOf((*AVERAGING, "all")),
    metavar="NAME|all",
    help="Simulate averaging alone, by this strategy.",
)
@option("--grid", default="", metavar="M,M[,M]", help="With --averaging: axes of the Moshpit grid.")
@option(
    "--failure",
    default=0.0,
    type=click.FloatRange(0, 0.99),
    help="With --averaging: chance to miss a round.",
)
@option(
    "--seeds",
    default=20,
    type=click.IntRange(1, 10_000),
    help="With --averaging: runs to take the mean of.",
)
@options.as_json
def simulate(
    *,
    swarm: Path | None,
    averaging: str | None,
    scenario: list[str] | None,
    seed: int,
    replay: Path | None,
    picture: Path | None,
    as_json: bool,
    **more: Any,
) -> int:
    """A swarm of any size in virtual time: the daemon's own decisions, simulated lines and faults,
    every invariant checked."""
    from node.manifest import read_manifest
    from node.telemetry.pictures import check

    if picture:
        check(picture)
    if swarm and not more["small"]:
        read_manifest(swarm)  # wrong ones are refused before the simulator is loaded
    if replay and not os.path.exists(replay):
        raise UsageFault(f"there is no {replay}", "name a file that --save has written")
    from node.sim.command import run_averaging, run_command, setup_of

    if averaging:
        return run_averaging(
            averaging,
            more["peers"],
            more["grid"],
            more["failure"],
            more["seeds"],
            seed,
            as_json=as_json,
        )
    setup = setup_of(swarm, **{name: more[name] for name in SIZES})
    return run_command(
        setup,
        scenario or ("quiet",),
        seed,
        replay=replay,
        save=more["save"],
        picture=picture,
        as_json=as_json,
    )
