"""A whole swarm of real daemons on this machine: ``demo``."""

from pathlib import Path
from shlex import quote
from typing import Any

import click

from node.commands.line import options, shared
from node.commands.line.usage import OneOf, command, flag, option
from node.core.errors import UsageFault

MANY = click.IntRange(1, 16)


@command()
@option("--ends", default=1, type=MANY, help="Peers that hold the ends.")
@option("--stages", default=3, type=MANY, help="Block stages.")
@option("--replicas", default=2, type=MANY, help="Peers a block stage.")
@option(
    "--manifest",
    type=options.FILE,
    help="Train this one, with as many block stages as it has.",
)
@option(
    "--peers",
    default=0,
    type=click.IntRange(0, 64),
    help="Peers in all, spread over the stages; 0: as --replicas says.",
)
@flag("--kill", help="Kill peers in the middle and watch the swarm go on.")
@option(
    "--epochs",
    default=0,
    type=click.IntRange(min=0),
    help="Stop after so many epochs; 0: the default.",
)
@option(
    "--seconds",
    default=0.0,
    type=click.FloatRange(min=0),
    help="Stop after so many seconds, with --kill when the new daemon works; 0: no limit.",
)
@flag("--keep", help="Keep the peers' directories.")
@flag("--rendezvous", help="Meet at a peer of its own, as in docker-compose.yml.")
@option(
    "--page",
    default="auto",
    type=OneOf(("auto", "always", "never")),
    metavar="WHEN",
    help="Show it in a browser: auto (where there is one), always (serve it), never.",
)
@options.as_json
def demo(
    *,
    ends: int,
    stages: int,
    replicas: int,
    peers: int,
    manifest: Path | None,
    as_json: bool,
    **how: Any,
) -> int:
    """A whole swarm on this machine, real daemons and real sockets, training in front of your
    eyes."""
    from node.manifest import read_manifest

    chosen = None
    if manifest:
        chosen = read_manifest(manifest)
    from node.app import joining
    from node.app.demo.daemons import DemoOptions, spread
    from node.app.demo.play import run

    if chosen:
        joining.check_demo(shared.config({}), chosen)
    if chosen and chosen.model.weights:
        raise UsageFault(
            f"{manifest} begins from a model, which the homes of the demo do not have",
            f"host every stage on this machine:  tutti start {quote(str(manifest))}",
        )
    if chosen:
        stages = chosen.pipeline.stages
    nodes = spread(ends, stages, replicas, peers)
    home = None
    if "home" in shared.HOME:
        home = Path(shared.HOME["home"])
    return run(DemoOptions(nodes, json=as_json, home=home, manifest=chosen, **how))
