"""This node's key: ``id new`` and ``id show``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from node.commands.line import options, shared
from node.commands.line.usage import VerbGroup, command
from node.core.errors import ExitCode

if TYPE_CHECKING:
    from node.identity.keys import Identity


@command()
@options.as_json
def new(as_json: bool) -> int:
    """Make this node's key and show its PeerId. A key that is there stays."""
    from node.identity.keys import Identity

    _show(Identity.create(shared.config({}).identity_path), as_json=as_json)
    return ExitCode.OK


@command()
@options.as_json
def show(as_json: bool) -> int:
    """PeerId, name and key file."""
    _show_known(as_json=as_json)
    return ExitCode.OK


def _show_known(*, as_json: bool) -> None:
    from node.identity.keys import Identity

    _show(Identity.load(shared.config({}).identity_path), as_json=as_json)


def _show(me: Identity, *, as_json: bool) -> None:
    if as_json:
        shared.print_json({"peer": me.peer_id, "name": me.name, "key": str(me.path)})
    else:
        print(f"{me.peer_id}   {me.name}\nkey   {me.path}   (keep a backup; never share it)")


@click.pass_context
def _show_without_verb(ctx: click.Context) -> int:
    if ctx.invoked_subcommand is None:
        _show_known(as_json=False)
    return ExitCode.OK


identity = VerbGroup(
    "id",
    {"Commands": (new, show)},
    help="Who this node is. Without a verb: show.",
    callback=_show_without_verb,
    invoke_without_command=True,
)
