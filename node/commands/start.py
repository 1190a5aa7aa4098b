"""Daemons that take part in a run: ``start`` and ``join``; and ``bootstrap``, one that only helps
others to find each other."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from node.commands.line import launching, options, shared
from node.commands.line.usage import FileArgument, argument, command, flag, option
from node.control.sockets import clear_stale, listener
from node.core import interrupts
from node.core.errors import ExitCode, LocalFault, UsageFault

if TYPE_CHECKING:
    from node.config import NodeConfig

RENDEZVOUS_PORT = 31337
"""Where others find a rendezvous that is set to no port."""


@command()
@argument(
    "what",
    metavar="[INVITE|swarm.toml]",
    default=None,
    type=FileArgument(),
    help="Default: the swarm used last, else a solo one.",
)
@options.background
@options.peer_settings
@options.joins
@options.run_settings
def start(what: str | None, background: bool, settings: dict[str, Any], **given: Any) -> int:
    """Run a node, in the foreground unless --background. With nothing configured: a solo swarm on
    built-in data that others can join."""
    flags = given | settings
    ours = shared.config(flags)
    ours.check_places()
    clear_stale(ours.control_socket)  # refuses a second daemon
    if background:
        words = ["start"]
        if what:
            words.append(what)
        return launching.in_background(ours, words, flags)
    from node.app import joining

    manifest, invite = joining.choose(ours, what)
    if "libp2p" in sys.modules and manifest is not None and invite is not None:
        launching.again(ours.manifest_path(manifest.run_id), flags | {"join": invite.addresses})
    return launching.run_daemon(ours, manifest, invite)


@command()
@argument(
    "invite",
    metavar="[INVITE|MULTIADDR]",
    default=None,
    help="What the other side's  tutti swarm invite  printed; with --lan a swarm's name.",
)
@flag("--lan", help="List the swarms on this LAN, and join the one there is or the one named.")
@flag("--yes", "-y", help="Accept without asking.")
@flag("--no-start", help="Only remember the swarm.")
@options.verbose
@options.background
@options.peer_settings
@options.run_settings
def join(
    invite: str | None,
    lan: bool,
    yes: bool,
    no_start: bool,
    verbose: bool,
    background: bool,
    settings: dict[str, Any],
    **given: Any,
) -> int:
    """Show a swarm, ask for your consent, remember it, and start. Nothing runs before you say
    yes."""
    flags = given | settings
    ours = shared.config(flags)
    ours.check_places()
    renews = not (no_start or lan) and _is_of_running_daemon(ours, invite)
    if not (no_start or renews):
        clear_stale(ours.control_socket)  # refuses a second daemon
    from node.app import joining

    if renews and invite is not None:
        path = joining.renew(ours, invite)
        shared.say(f"remembered in {path}")
        shared.say("the daemon that runs takes the invite with  tutti restart")
        return ExitCode.OK
    if lan:
        found = joining.on_the_lan()
        shared.say("\n".join(joining.lan_lines(found)))
        invite = joining.chosen(found, invite)
    elif invite is None:
        raise UsageFault(
            "no invite was given",
            "tutti join INVITE, or  tutti join --lan  for what is on this LAN",
        )
    manifest, asked = joining.look(ours, invite, joins=True)
    joining.check(ours, asked)
    shared.say("\n".join(joining.sheet(ours, manifest, signed=True, verbose=verbose)))
    if yes:
        joining.check_reading(ours, manifest)
    else:
        if not sys.stdin.isatty():
            raise UsageFault(
                "joining needs your consent", "look at the above and repeat with  --yes"
            )
        with interrupts.raising():  # the prompt leaves the terminal as it was
            if not click.confirm("Join this swarm?", err=True):
                return ExitCode.REFUSED
        # The user has seen which files are read, and agreed for this run.
        agreed = dataclasses.replace(ours.places(manifest.run_id), for_all_runs=())
        ours.keep_places(manifest.run_id, agreed)
    path = ours.remember(manifest, asked)
    shared.say(f"remembered in {path}")
    if no_start:
        shared.say("start it with  tutti start")
        return ExitCode.OK
    # Not the invite, which is remembered: others can read command lines, and it may have a token.
    flags |= {"join": asked.addresses}
    if background:
        return launching.in_background(ours, ["start", str(path)], flags)
    launching.again(path, flags)


def _is_of_running_daemon(ours: NodeConfig, text: str | None) -> bool:
    """Return True for an invite to the run in which the daemon of this home takes part. Raises
    UsageFault for an invite that cannot be read."""
    from node.identity.invites import Invite, is_invite

    if text is None or not is_invite(text) or listener(ours.control_socket) is None:
        return False
    invite = Invite.decode(text)
    try:
        with shared.client(ours) as client:
            return client.status().swarm.run_id == invite.run_id
    except LocalFault:  # it ends, or is too busy to answer
        return False


@command()
@options.p2p_port
@options.listen
@options.joins
@option("--swarm", type=options.FILE, help="swarm.toml this rendezvous serves.")
@options.background
@options.max_up
@options.max_down
@options.config
@options.settings
def bootstrap(swarm: Path | None, background: bool, settings: dict[str, Any], **given: Any) -> int:
    """Run a rendezvous: helps peers find each other, holds no part of the model. Its port is 31337
    where none is set."""
    served = None
    if swarm:
        served = str(swarm)
    flags = {"role": "rendezvous", "swarm": served} | given | settings
    ours = shared.config(flags)
    if "transport.p2p_port" not in ours.sources:
        flags |= {"p2p_port": RENDEZVOUS_PORT}
        ours = shared.config(flags)
    clear_stale(ours.control_socket)  # refuses a second daemon
    if background:
        return launching.in_background(ours, ["start"], flags)
    from node.app import joining

    manifest, invite = joining.choose(ours, None)
    return launching.run_daemon(ours, manifest, invite)
