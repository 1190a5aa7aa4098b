"""The run of one command: a command line enters, an exit code leaves, and every fault is shown on
stderr."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import click

from node.commands.line.shared import HOME, home_flag, say, take_home
from node.commands.line.usage import COMPLETION, PROGRAM, what_was_wrong
from node.control import terminal
from node.core import interrupts, libraries
from node.core.errors import (
    DISK_FULL,
    ExitCode,
    LocalFault,
    OutOfResources,
    PeerFault,
    UsageFault,
    WireError,
)
from node.core.home import name_home


def main(app: click.Command, argv: Sequence[str]) -> int:
    """Run one command; returns the exit code."""
    words = list(argv)
    libraries.prepare()
    sys.excepthook = crashed
    terminal.prepare()
    HOME.clear()
    name_home("")
    code = _run(app, words)
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError as error:
        terminal.mute(sys.stdout)
        return _unwritten(error, words)
    return code


def _run(app: click.Command, words: list[str]) -> int:
    """Run one command; its exit code, after every fault has been shown."""
    try:
        _check_text(words)
        question = os.environ.get(COMPLETION)
        if question:
            return _complete(app, question)
        line = take_home(words)
        name_home(home_flag())
        if line[:1] in (["--version"], ["-V"]):
            line[0] = "version"
        with app.make_context(PROGRAM, line) as context:
            code = int(app.invoke(context) or 0)
        if code == ExitCode.INTERRUPTED:  # the daemon or the monitor has noticed the Ctrl-C itself
            say(interrupts.LAST_WORDS)
        return code
    except click.exceptions.Exit as end:
        return end.exit_code
    except LocalFault as fault:
        return _fail(fault, words)
    except (PeerFault, WireError) as error:
        return _fail(LocalFault(str(error), "try another peer, or again", ExitCode.NETWORK), words)
    except click.exceptions.NoArgsIsHelpError as error:
        say(error.format_message())
        return ExitCode.USAGE
    except click.ClickException as error:
        return _fail(UsageFault(*what_was_wrong(error)), words)
    except KeyboardInterrupt:
        say(interrupts.LAST_WORDS)
        return ExitCode.INTERRUPTED
    except click.Abort:
        if sys.stderr.isatty():
            say("")  # the cursor stands behind a question
        say(interrupts.LAST_WORDS)
        return ExitCode.INTERRUPTED
    except SystemExit as end:
        # rich makes one of a broken pipe.
        if not _caused(end, BrokenPipeError):
            raise
        terminal.mute(sys.stdout, sys.stderr)
        return ExitCode.READER_GONE
    except OSError as error:
        if not isinstance(error, BrokenPipeError) and error.errno not in DISK_FULL:
            raise
        terminal.mute(sys.stdout)
        return _unwritten(error, words)


def _complete(app: click.Command, question: str) -> int:
    """Answer a shell that completes a line; no fault of the line is shown there."""
    from node.commands.line.completing import answer

    text = answer(app, question)
    if text is None:
        return ExitCode.USAGE
    print(text, end="")
    return ExitCode.OK


def _unwritten(error: OSError, words: list[str]) -> int:
    """The exit code after output that could not be written, said unless its reader has gone."""
    if isinstance(error, BrokenPipeError):
        terminal.mute(sys.stdout, sys.stderr)
        return ExitCode.READER_GONE
    what = f"cannot write the output: {error.strerror or error}"
    return _fail(OutOfResources(what, "free some space, or write to another place"), words)


def _caused(error: BaseException, kind: type[BaseException]) -> bool:
    """Return True if an exception of ``kind`` led to ``error``."""
    while error.__context__ is not None:
        error = error.__context__
        if isinstance(error, kind):
            return True
    return False


def _check_text(words: list[str]) -> None:
    """Raises UsageFault for words that are no text, and for a working directory that is none or
    gone: paths go into messages and files as UTF-8."""
    try:
        here = os.getcwd()
    except OSError as e:
        raise UsageFault("the working directory is gone", "cd  to one that exists") from e
    for text in (*words, here, HOME.get("home", ""), os.environ.get("TUTTI_HOME", "")):
        try:
            text.encode()
        except UnicodeEncodeError as e:
            raise UsageFault(f"{text!r} is not UTF-8", "use names that are") from e


def _fail(fault: LocalFault, words: list[str]) -> int:
    from node.control.commands import show_fault

    try:
        show_fault(fault, as_json="--json" in words)
    except (OSError, SystemExit):  # nobody reads it; the exit code says it
        terminal.mute(sys.stdout, sys.stderr)
    return int(fault.code)


def crashed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """For an unexpected error: the traceback into a file, one sentence on stderr."""
    import traceback

    story = "".join(traceback.format_exception(kind, error, trace))
    folder = Path(HOME.get("home") or os.path.expanduser("~/.cache/tutti"))
    try:
        (folder / "log").mkdir(parents=True, exist_ok=True)
        path = folder / "log" / "crash.log"
        path.write_text(story, encoding="utf-8", errors="backslashreplace")
        where = f"the traceback is in {path}; please send it with your report"
    except OSError:
        where = story
    say(f"tutti: unexpected {kind.__name__}: {error}\n  {where}")
