"""Settings of this node: ``config``, ``config get``, ``set``, ``unset`` and ``explain``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from node.commands.line import options, shared
from node.commands.line.usage import VerbGroup, argument, command, option
from node.control import terminal
from node.control.sockets import listener
from node.core.errors import ExitCode, LocalFault, UsageFault

if TYPE_CHECKING:
    from node.app.owner.settings import SettingChange


def _names(ctx: click.Context, param: click.Parameter, incomplete: str) -> Sequence[str]:
    """Names of settings that a shell offers."""
    from node.config import KNOWN, SHORT_NAMES

    return [name for name in (*KNOWN, *SHORT_NAMES) if name.startswith(incomplete)]


setting = argument(
    "name",
    metavar="NAME",
    shell_complete=_names,
    help="Such as threads, limits.in_flight; short names such as max_up too.",
)
written_file = option(
    "--config",
    "file",
    type=options.FILE,
    metavar="FILE",
    help="The file. Default: the config.toml of this node.",
)


@command()
@setting
@options.config
@options.settings
@options.as_json
def get(name: str, config: Path | None, settings: dict[str, Any], as_json: bool) -> int:
    """Print the value of a setting, and on stderr where it comes from: an option, the environment,
    a file, or built in."""
    from node.app.owner.settings import value_of

    found = value_of(shared.config({"config": config} | settings), name)
    if as_json:
        shared.print_json(found.document())
    else:
        print(found.shown())
        shared.say(f"{found.name}: {found.source}")
    return ExitCode.OK


@command("set", context_settings={"ignore_unknown_options": True})
@setting
@argument(
    "value",
    metavar="VALUE",
    default=None,
    help="As behind --set; several with commas between them. NAME=VALUE in one word does, too.",
)
@written_file
@options.as_json
def set_one(name: str, value: str | None, file: Path | None, as_json: bool) -> int:
    """Keep a setting in the settings file. It holds from the next start on."""
    if value is None:
        name, there, value = name.partition("=")
        if not there:
            raise UsageFault(f"no value for {name}", f"tutti config set {name} VALUE")
    from node.app.owner.settings import set_value
    from node.config import settings_file

    changed = set_value(settings_file(file, shared.HOME.get("home")), name, value)
    return _show(changed, file, as_json=as_json)


@command()
@setting
@written_file
@options.as_json
def unset(name: str, file: Path | None, as_json: bool) -> int:
    """Take a setting out of the settings file."""
    from node.app.owner import settings as owner
    from node.config import settings_file

    changed = owner.unset(settings_file(file, shared.HOME.get("home")), name)
    return _show(changed, file, as_json=as_json)


@command()
@setting
@options.config
@options.settings
@options.as_json
def explain(name: str, config: Path | None, settings: dict[str, Any], as_json: bool) -> int:
    """Explain a setting: meaning, type, range, default, value, variables of the environment."""
    from node.app.owner.settings import explained

    found = explained(shared.config({"config": config} | settings), name)
    if as_json:
        shared.print_json(found.document())
    else:
        print(shared.advice("\n".join(found.lines())))
    return ExitCode.OK


@command("config")
@options.config
@options.settings
@options.as_json
def print_all(config: Path | None, settings: dict[str, Any], as_json: bool) -> int:
    """Every setting of this node with its meaning and its value."""
    from node.config import config_document, config_toml

    ours = shared.config({"config": config} | settings)
    if as_json:
        shared.print_json(config_document(ours))
    else:
        terminal.as_file(sys.stdout)
        print(config_toml(ours), end="")
    return ExitCode.OK


@click.pass_context
def _print_without_verb(ctx: click.Context, **given: Any) -> int:
    verb = ctx.invoked_subcommand
    if verb is None:
        return ctx.invoke(print_all, **given)
    if any(given.values()):
        raise UsageFault("an option before the verb", f"write it behind  tutti config {verb}")
    return ExitCode.OK


def _show(changed: SettingChange, file: Path | None, *, as_json: bool) -> int:
    """Show a change of the settings file. Another fault in the settings is no fault of it."""
    try:
        ours = shared.config({"config": file})
        note = changed.overruled(ours)
        if not note and listener(ours.control_socket) is not None:
            note = "it holds from the next start on:  tutti restart"
    except LocalFault as fault:
        note = f"there is another fault: {fault.what}; {fault.next_step}"
    if as_json:
        shared.print_json(changed.document() | {"note": note})
    else:
        print("\n".join(changed.lines()))
        if note:
            shared.say(note)
    return ExitCode.OK


config = VerbGroup(
    "config",
    {"Commands": (get, set_one, unset, explain)},
    help="Settings of this node. Without a verb: every setting with its meaning and its value, as "
    "a config.toml to begin with: tutti config > config.toml",
    params=print_all.params,
    callback=_print_without_verb,
    invoke_without_command=True,
)
