"""Completion of command lines by a shell.

The script of a shell runs the program again, with the line so far and a question in its
environment (:data:`COMPLETION`), and the program prints the words that may follow. The scripts and
the search for words are click's.
"""

import click
from click.shell_completion import (
    BashComplete,
    CompletionItem,
    FishComplete,
    ShellComplete,
    ZshComplete,
)

from node.commands.line.shared import HOME_OPTION, take_home
from node.commands.line.usage import COMPLETION, PROGRAM


class _HomeAnywhere(ShellComplete):
    """Completion of a line in which ``--home DIR`` may stand anywhere. click does not know that
    option: it is taken out of a line before."""

    def get_completions(self, args: list[str], incomplete: str) -> list[CompletionItem[str]]:
        if args[-1:] == [HOME_OPTION]:
            return [CompletionItem(incomplete, type="dir")]
        found = super().get_completions(take_home(args), incomplete)
        if incomplete.startswith("-") and HOME_OPTION.startswith(incomplete):
            found.append(CompletionItem(HOME_OPTION, help="Directory of this node's files"))
        return found


class Bash(_HomeAnywhere, BashComplete):
    """Completion by bash."""


class Zsh(_HomeAnywhere, ZshComplete):
    """Completion by zsh."""


class Fish(_HomeAnywhere, FishComplete):
    """Completion by fish."""


SHELLS: dict[str, type[ShellComplete]] = {"bash": Bash, "zsh": Zsh, "fish": Fish}


def script(app: click.Command, shell: str) -> str:
    """The script that a shell of this name reads."""
    return SHELLS[shell](app, {}, PROGRAM, COMPLETION).source()


def answer(app: click.Command, question: str) -> str | None:
    """Reply to a shell's question: possible words, or its script. None for an unknown shell or
    question."""
    shell, _, what = question.partition("_")
    if shell not in SHELLS:
        return None
    asked = SHELLS[shell](app, {}, PROGRAM, COMPLETION)
    if what == "source":
        return asked.source()
    if what == "complete":
        return asked.complete() + "\n"
    return None
