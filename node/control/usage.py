"""Help and errors of the command line: help in plain text, and errors that name the help of their
verb.

typer's own help loads rich and its renderers, a quarter of a second; it also takes text in brackets
for markup.
"""

import copy
from collections.abc import Collection, Sequence
from typing import Any

import click
import typer.core
import typer.main
from typer.core import TyperCommand, TyperGroup

from node.core.errors import UsageFault

PANELS = ("Run", "Watch", "Swarm owner", "Model", "About")
"""Headings of the verbs, in the order of the help."""
_NAME = "tutti"


class Argument(typer.core.TyperArgument):
    """click 8.4 gave arguments a help text of their own, and its constructor clears the one that
    typer has set before."""

    def __init__(self, *, help: str | None = None, **how: Any) -> None:
        super().__init__(help=help, **how)
        self.help = help


typer.main.__dict__["TyperArgument"] = Argument


class _PrintedHelp(click.Command):
    """Help goes through ``print`` as all other text does: click writes UTF-8 to a terminal that
    says it knows ASCII only."""

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        option = super().get_help_option(ctx)
        if option is not None:
            option.callback = _print_help
        return option


def _print_help(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        print(ctx.get_help())
        ctx.exit()


class Command(_PrintedHelp, TyperCommand):
    """A verb."""

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Print nothing: typer's part of the help has the arguments."""


class VerbGroup(_PrintedHelp, TyperGroup):
    """Verbs under :data:`PANELS`, each with its first sentence, never cut."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                panel = getattr(command, "rich_help_panel", None)
                heading = "Commands"
                if isinstance(panel, str):
                    heading = panel
                panels.setdefault(heading, []).append((name, _first_sentence(command.help or "")))
        wide = max((len(name) for rows in panels.values() for name, _ in rows), default=0)
        rank = {heading: i for i, heading in enumerate(PANELS)}
        for heading, rows in sorted(
            panels.items(), key=lambda panel: rank.get(panel[0], len(rank))
        ):
            with formatter.section(heading):
                formatter.write_dl([(f"{name:{wide}}", text) for name, text in rows])


class OneOf(click.ParamType):
    """An argument with a few allowed words. Another word is refused before its verb loads
    anything."""

    name = "word"

    def __init__(self, words: Collection[str]) -> None:
        self.words = words

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The word. Raises UsageFault for any other."""
        if value not in self.words:
            what = f"there is no {value!r}"
            if param is not None and param.opts[0].startswith("-"):
                what = f"{param.opts[0]} {value}"
            raise UsageFault(what, f"allowed: {', '.join(self.words)}")
        return value


class App(typer.Typer):
    """A typer application of these."""

    def __init__(self, *, no_args_is_help: bool = True, **how: Any) -> None:
        # click suggests names as well as typer does.
        super().__init__(
            cls=VerbGroup,
            rich_markup_mode=None,
            suggest_commands=False,
            no_args_is_help=no_args_is_help,
            **how,
        )

    def built(self, words: Sequence[str]) -> click.Command:
        """Command that reads the line ``words``. If they begin with a verb, it has only that verb:
        making all commands takes longer than most of them run."""
        name = next((word for word in words if not word.startswith("-")), "")
        commands = [
            c
            for c in self.registered_commands
            if name == (c.name or getattr(c.callback, "__name__", ""))
        ]
        groups = [g for g in self.registered_groups if name == g.name]
        if not (commands or groups):
            return typer.main.get_command(self)
        part = copy.copy(self)
        part.registered_commands = commands
        part.registered_groups = groups
        return typer.main.get_command(part)

    def command(self, name: str | None = None, **how: Any) -> Any:
        """As typer's."""
        return super().command(name, cls=Command, **how)


def what_was_wrong(error: click.ClickException) -> tuple[str, str]:
    """The sentence of a line that cannot be read, and where its verb is explained."""
    where = _NAME
    if isinstance(error, click.UsageError) and error.ctx is not None:
        where = error.ctx.command_path
    return error.format_message() or "no command given", f"see  {where} -h"


def _first_sentence(text: str) -> str:
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".")
