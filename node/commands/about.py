"""The program itself: ``version``, ``help``, ``config`` and ``completion``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from node.commands.line import options, shared
from node.commands.line.usage import PROGRAM, OneOf, argument, command
from node.control import terminal
from node.core.errors import ExitCode
from node.core.version import OLDEST_PROTOCOL, PROTOCOL, PROTOCOLS, VERSION

SHELLS = ("bash", "zsh", "fish")


@command()
@options.as_json
def version(as_json: bool) -> int:
    """The version of this software and of the protocol it speaks."""
    if as_json:
        spoken = {"protocol": PROTOCOL, "oldest_protocol": OLDEST_PROTOCOL}
        shared.print_json({"tutti": VERSION, **spoken, "python": sys.version.split()[0]})
    else:
        print(f"tutti {VERSION}   {PROTOCOLS}   python {sys.version.split()[0]}")
    return ExitCode.OK


def _verbs(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Verbs that a shell offers behind the words of ``tutti help`` that are there already."""
    found: click.Command | None = ctx.find_root().command
    for word in ctx.params.get("verb") or ():
        if isinstance(found, click.Group):
            found = found.commands.get(word)
    if not isinstance(found, click.Group):
        return []
    return [name for name in found.commands if name.startswith(incomplete)]


@command("help")
@argument(
    "verb",
    metavar="[VERB...]",
    nargs=-1,
    shell_complete=_verbs,
    help="Default: all verbs.",
)
@click.pass_context
def help_of(ctx: click.Context, verb: Sequence[str]) -> int:
    """Explain a verb, as its option --help does."""
    root = ctx.find_root().command
    with root.make_context(PROGRAM, [*verb, "--help"]) as line:
        root.invoke(line)
    return ExitCode.OK


@command()
@options.config
@options.settings
@options.as_json
def config(config: Path | None, settings: dict[str, Any], as_json: bool) -> int:
    """Every setting of this node with its meaning and its value, as a config.toml to begin with:
    tutti config > config.toml"""
    from node.config import config_document, config_toml

    ours = shared.config({"config": config} | settings)
    if as_json:
        shared.print_json(config_document(ours))
    else:
        terminal.as_file(sys.stdout)
        print(config_toml(ours), end="")
    return ExitCode.OK


@command()
@argument("shell", metavar="SHELL", type=OneOf(SHELLS), help="bash, zsh or fish.")
@click.pass_context
def completion(ctx: click.Context, shell: str) -> int:
    """Print the script by which a shell completes verbs, options and files. docs/operating.md says
    where it goes."""
    from node.commands.line.completing import script

    print(script(ctx.find_root().command, shell), end="")
    return ExitCode.OK
