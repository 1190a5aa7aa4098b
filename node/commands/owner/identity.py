"""This node's key: ``id new``, ``show``, ``export`` and ``import``."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING

import click

from node.commands.line import options, shared
from node.commands.line.usage import FileArgument, VerbGroup, argument, command, flag, option
from node.core import interrupts
from node.core.errors import ExitCode, UsageFault

if TYPE_CHECKING:
    from node.identity.keys import Identity


sealed_file = argument(
    "file", metavar="FILE", type=options.FILE, help="File with a key that a passphrase locks."
)
passphrase_file = option(
    "--passphrase-file",
    "passphrase",
    default="",
    type=FileArgument(),
    metavar="FILE",
    help="Take the passphrase from the first line of a file, - for stdin. Default: ask for it.",
)


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


@command("export")
@sealed_file
@passphrase_file
@flag("--force", help="Replace the file.")
@options.as_json
def export_key(file: Path, passphrase: str, force: bool, as_json: bool) -> int:
    """Write this node's key to a file that a passphrase locks, for another machine or as a
    backup."""
    from node.app.owner import identity as owner

    ask = partial(_passphrase, passphrase)
    moved = owner.export_key(shared.config({}), file, ask, force=force)
    if as_json:
        shared.print_json({"peer": moved.identity.peer_id, "file": str(moved.file)})
    else:
        print(f"wrote    {moved.file}   {moved.identity.peer_id}, {moved.identity.name}")
        print(f"there    tutti id import {quote(moved.file.name)}")
    shared.say(owner.ONCE)
    return ExitCode.OK


@command("import")
@sealed_file
@passphrase_file
@flag("--force", help="Where this node has a key: set that aside.")
@options.as_json
def import_key(file: Path, passphrase: str, force: bool, as_json: bool) -> int:
    """Make the key in a file of  tutti id export  this node's key."""
    from node.app.owner import identity as owner

    ask = partial(_passphrase, passphrase)
    moved = owner.import_key(shared.config({}), file, ask, force=force)
    if as_json:
        before = None
        if moved.before is not None:
            before = str(moved.before)
        key = str(moved.file)
        shared.print_json({"peer": moved.identity.peer_id, "key": key, "before": before})
    else:
        print("\n".join(_lines(moved.identity, moved.file)))
        if moved.before is not None:
            print(f"before   {moved.before}")
    shared.say(owner.ONCE)
    return ExitCode.OK


def _passphrase(file: str, new: bool) -> str:
    """The passphrase in ``file``, else from the terminal, twice if it is a ``new`` one. Raises
    UsageFault."""
    import getpass

    from node.app.owner.identity import passphrase_from

    if file:
        return passphrase_from(file)
    if not sys.stdin.isatty():
        raise UsageFault("a passphrase is needed", "--passphrase-file FILE , - for stdin")
    with interrupts.raising():  # the terminal shows typed letters again
        said = getpass.getpass("Passphrase: ")
        if new and said != getpass.getpass("Once more: "):
            raise UsageFault("the two passphrases differ", "try again; nothing was written")
    return said


def _show_known(*, as_json: bool) -> None:
    from node.identity.keys import Identity

    _show(Identity.load(shared.config({}).identity_path), as_json=as_json)


def _show(me: Identity, *, as_json: bool) -> None:
    if as_json:
        shared.print_json({"peer": me.peer_id, "name": me.name, "key": str(me.path)})
    else:
        print("\n".join(_lines(me, me.path)))


def _lines(me: Identity, key: Path | None) -> list[str]:
    return [f"{me.peer_id}   {me.name}", f"key   {key}   (keep a backup; never share it)"]


@click.pass_context
def _show_without_verb(ctx: click.Context) -> int:
    if ctx.invoked_subcommand is None:
        _show_known(as_json=False)
    return ExitCode.OK


identity = VerbGroup(
    "id",
    {"Commands": (new, show, export_key, import_key)},
    help="Who this node is. Without a verb: show.",
    callback=_show_without_verb,
    invoke_without_command=True,
)
