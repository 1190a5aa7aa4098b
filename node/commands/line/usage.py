"""click's commands, arguments and options as this program has them: help in plain text, verbs under
headings, and errors that name the help of their verb."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from node.core.errors import UsageFault

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

PROGRAM = "tutti"
"""The program's name in help and errors."""
COMPLETION = "_TUTTI_COMPLETE"
"""Environment variable with the question of a shell that completes a line: SHELL_complete, or
SHELL_source for the script."""

Decorator = Callable[[Callable[..., Any]], Any]
"""Adds an argument or an option to the function of a command."""


class _Described(click.Command):
    """Help in this program's form.

    It goes through ``print`` as all other text does: click writes UTF-8 to a terminal that says it
    knows ASCII only.
    """

    def get_help_option(self, ctx: click.Context) -> click.Option | None:
        option = super().get_help_option(ctx)
        if option is not None:
            option.callback = _print_help
        return option

    def get_short_help_str(self, limit: int = 45) -> str:
        """The first sentence of the help, never cut."""
        paragraph = " ".join((self.help or "").partition("\n\n")[0].split())
        return paragraph.partition(". ")[0].rstrip(".")

    def format_arguments(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        found = [one for one in self.get_params(ctx) if isinstance(one, click.Argument)]
        if found:
            with formatter.section("Arguments"):
                formatter.write_dl([one.get_help_record(ctx) for one in found])


def _print_help(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        print(ctx.get_help())
        ctx.exit()


class Command(_Described):
    """A verb."""


class VerbGroup(_Described, click.Group):
    """Verbs under headings, in this order.

    :param panels: the verbs of each heading.
    """

    def __init__(
        self, name: str, panels: Mapping[str, Sequence[click.Command]], **how: Any
    ) -> None:
        super().__init__(name, **how)
        self.panels = panels
        for verbs in panels.values():
            for verb in verbs:
                self.add_command(verb)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        wide = max(map(len, self.commands))
        for heading, verbs in self.panels.items():
            rows = [(f"{verb.name:{wide}}", verb.get_short_help_str()) for verb in verbs]
            with formatter.section(heading):
                formatter.write_dl(rows)


class Argument(click.Argument):
    """An argument with its default in its help, or with the word "required"."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str]:
        metavar, text = super().get_help_record(ctx)
        default = self.get_default(ctx, call=False)
        if self.required:
            text += "  [required]"
        elif isinstance(default, int | float | str):
            text += f"  [default: {default}]"
        return metavar, text


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

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(word) for word in self.words if word.startswith(incomplete)]


class FileArgument(click.types.StringParamType):
    """Text that may name a file, or something else: shells complete it as the name of a file.

    :param kind: "file" or "dir".
    """

    def __init__(self, kind: str = "file") -> None:
        self.kind = kind

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from click.shell_completion import CompletionItem

        return [CompletionItem(incomplete, type=self.kind)]


def command(name: str | None = None, **how: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """Make a verb of a function that returns an exit code. Its docstring is the verb's help."""
    return click.command(name, cls=Command, **how)


def argument(name: str, *, metavar: str, help: str, **how: Any) -> Decorator:
    """Add an argument. One with a default, None included, may be left out."""
    return click.argument(name, cls=Argument, metavar=metavar, help=help, **how)


def option(*words: str, help: str, default: Any = None, **how: Any) -> Decorator:
    """Add an option with a value. Its default is part of its help unless it is empty."""
    shown = default is not None and default != ""
    return click.option(*words, help=help, default=default, show_default=shown, **how)


def flag(*words: str, help: str) -> Decorator:
    """Add an option without a value, False unless it is given."""
    return click.option(*words, help=help, is_flag=True, default=False)


def repeatable(*words: str, help: str, **how: Any) -> Decorator:
    """Add an option that may be given several times: a list of its values, or None."""
    return click.option(*words, help=help, multiple=True, callback=_list_or_none, **how)


def _list_or_none(
    ctx: click.Context, param: click.Parameter, values: Sequence[Any]
) -> list[Any] | None:
    return list(values) or None


def what_was_wrong(error: click.ClickException) -> tuple[str, str]:
    """The sentence of a line that cannot be read, and where its verb is explained."""
    where = PROGRAM
    if isinstance(error, click.UsageError) and error.ctx is not None:
        where = error.ctx.command_path
    return error.format_message() or "no command given", f"see  {where} -h"
