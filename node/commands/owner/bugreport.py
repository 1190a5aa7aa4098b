"""A report of a fault: ``bugreport``."""

from __future__ import annotations

import sys
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

import click

from node.commands.line import options, shared
from node.commands.line.usage import argument, command, flag, option
from node.core import interrupts
from node.core.errors import ExitCode, UsageFault

if TYPE_CHECKING:
    from node.app.owner.bugreport import BugReport


@command()
@argument(
    "file",
    metavar="[FILE]",
    default=None,
    type=options.FILE,
    help="Archive to write. Default: a name with the time in it.",
)
@flag("--yes", "-y", help="Write it without asking.")
@flag("--print", "show", help="Print everything that it would hold, and write nothing.")
@option(
    "--recording",
    type=options.FILE,
    metavar="FILE",
    help="A recording of  tutti start --record. Default: the newest that is known here.",
)
@flag("--force", help="Replace the file.")
@options.config
@options.settings
@options.as_json
def bugreport(
    *,
    file: Path | None,
    yes: bool,
    show: bool,
    recording: Path | None,
    force: bool,
    config: Path | None,
    settings: dict[str, Any],
    as_json: bool,
) -> int:
    """Gather what a report of a fault needs into one archive on this machine: versions, machine,
    settings, events, output, metrics, checks, recording. Nothing is sent.

    Tokens, keys, addresses, paths and names of data are replaced by marks. Shows what it holds and
    asks before it writes.
    """
    from node.app.owner import bugreport as owner

    ours = shared.config({"config": config} | settings)
    target = file or owner.usual_file()
    if recording is not None and not recording.is_file():
        raise UsageFault(f"there is no {recording}", "name a file of  tutti start --record")
    if not show:
        owner.check_file(target, force=force)
    if not (yes or show or sys.stdin.isatty()):
        raise UsageFault("writing a report needs your consent", "repeat with  --print or  --yes")
    doctor = _doctor({"config": config} | settings)
    report = owner.Collector(ours, doctor, recording).collect(shared.say)
    if show:
        for text in report.shown():
            print(text)
        return ExitCode.OK
    shared.say("\n".join(report.lines()))
    if not yes and not _agreed(report, target):
        return ExitCode.REFUSED
    owner.write(report, target)
    if as_json:
        shared.print_json({"file": str(target.absolute()), **report.document()})
    else:
        print(f"wrote    {target}   (look into it:  tar -xzOf {quote(str(target))} | less)")
        shared.say("nothing was sent; add it to your report yourself")
    return ExitCode.OK


def _doctor(flags: dict[str, Any]) -> list[str]:
    """Command line of the doctor for the same home and settings."""
    from node.app.launch import as_flags

    words = ["doctor", "--offline", "--json"]
    if "home" in shared.HOME:
        words = ["--home", shared.HOME["home"], *words]
    return [*words, *as_flags({name: one for name, one in flags.items() if one is not None})]


def _agreed(report: BugReport, target: Path) -> bool:
    """Ask for the consent to write a report, after showing all of it if the user wants."""
    with interrupts.raising():
        while True:
            answer = click.prompt(f"Write it to {target}? [y/n, s shows all of it]", err=True)
            word = answer.strip().lower()
            if word in ("y", "yes"):
                return True
            if word in ("n", "no"):
                return False
            if word in ("s", "show"):
                click.echo_via_pager("\n".join(report.shown()))
