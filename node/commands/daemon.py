"""The end of the running daemon: ``drain``, ``stop`` and ``restart``."""

import click

from node.commands.line import launching, options, shared
from node.commands.line.usage import command, flag, option
from node.core import interrupts


@command()
@option("--timeout", default=600.0, type=click.FloatRange(min=1), help="Seconds to finish in.")
@options.as_json
def drain(timeout: float, as_json: bool) -> int:
    """Finish what is in flight, hand over, leave the swarm and stop."""
    from node.control import commands

    with shared.client() as client:
        return commands.drain(client, timeout, as_json=as_json)


@command()
@flag("--now", help="Kill it when it takes longer than five seconds.")
def stop(now: bool) -> int:
    """Stop the daemon and wait until its process is gone. A longer wait is explained."""
    from node.control import commands

    with shared.client() as client:
        return commands.stop(client, now=now)


@command()
@click.option(
    "--background/--foreground",
    "-d/-f",
    default=None,
    help="Default: in the background if the daemon has no terminal now.",
)
def restart(background: bool | None) -> int:
    """Stop the daemon, wait until it is gone, and start it with the arguments, the directory and
    the TUTTI_* settings that it was started with."""
    from node.app.launch import PROGRAM, Started, become
    from node.control import commands

    ours = shared.config({})
    with shared.client(ours) as client:
        before = Started.of(client.pid)
        commands.stop(client, now=False)
    with interrupts.telling("the daemon has ended and is not started again"):
        before.enter()
        if background is None:
            background = before.background
        if background:
            return launching.launched(ours, before.arguments)
        become([PROGRAM, *before.arguments])
