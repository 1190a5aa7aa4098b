"""The end of the running daemon: ``drain``, ``stop`` and ``restart``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from node.commands.line import launching, options, shared
from node.commands.line.usage import command, flag, option
from node.core import interrupts
from node.core.errors import ExitCode

if TYPE_CHECKING:
    from node.config import NodeConfig


@command()
@option("--timeout", default=600.0, type=click.FloatRange(min=1), help="Seconds to finish in.")
@options.as_json
def drain(timeout: float, as_json: bool) -> int:
    """Finish what is in flight, hand over, leave the swarm and stop."""
    from node.control import commands

    with shared.client_when_back() as client:
        return commands.drain(client, timeout, as_json=as_json)


@command()
@flag("--now", help="Kill it when it takes longer than five seconds.")
def stop(now: bool) -> int:
    """Stop the daemon and wait until its process is gone. A longer wait is explained."""
    from node.control import commands

    with shared.client_when_back() as client:
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
    the TUTTI_* settings that it was started with. A service is restarted by systemd."""
    from node.app.launch import PROGRAM, Started, become
    from node.control import commands

    ours = shared.config({})
    with shared.client_when_back(ours) as client:
        if background is None and _by_systemd(ours, client.pid):
            return ExitCode.OK
        before = Started.of(client.pid)
        commands.stop(client, now=False)
    with interrupts.telling("the daemon has ended and is not started again"):
        before.enter()
        if background is None:
            background = before.background
        if background:
            return launching.launched(ours, before.arguments)
        become([PROGRAM, *before.arguments])


def _by_systemd(ours: NodeConfig, pid: int) -> bool:
    """Have systemd restart the daemon if it is a service. Return False if it is none."""
    from node.app.owner import service

    if not service.runs_as(ours, pid):
        return False
    shared.say("this daemon is a service: systemd stops and starts it")
    with interrupts.telling("systemd goes on restarting the daemon"):
        service.restart(ours)
    return True
