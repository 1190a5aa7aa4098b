"""The program itself: ``version``, ``help``, ``upgrade`` and ``completion``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from node.commands.line import options, shared
from node.commands.line.usage import PROGRAM, OneOf, argument, command, flag, option
from node.core.errors import ExitCode, UsageFault
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
@flag("--check", help="Ask the package index for the newest version: one request.")
@option(
    "--index",
    default="",
    metavar="URL",
    help="The index. Default: https://pypi.org/simple/",
)
@options.as_json
def upgrade(check: bool, index: str, as_json: bool) -> int:
    """Print the commands that update this tutti. With --check first look whether there is a newer
    one. Nobody is asked without --check, and nothing is installed."""
    from node.app.owner import upgrade as owner

    if index and not check:
        raise UsageFault("--index without --check", "tutti upgrade --check --index URL")
    offered = None
    if check:
        offered = owner.check(index)
    if as_json:
        document = {"here": VERSION, "update": owner.update_commands()}
        if offered is not None:
            document = offered.document()
        shared.print_json(document)
    else:
        print(shared.advice("\n".join(owner.lines(offered))))
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
