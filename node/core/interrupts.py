"""Ctrl-C in a command: one line, exit code 130, nothing left behind.

A handler that raises KeyboardInterrupt wherever the program happens to be is no use here: raised
while torch is loaded it aborts the process, inside a library it becomes a traceback, and inside a
destructor it is lost. So a command ends at once, in the handler. Code that has something to take
down says so with :func:`raising` and :func:`held`. A second Ctrl-C always ends the process at once.
The daemon has handlers of its own while its event loop runs.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from enum import Enum
from types import FrameType
from typing import Any

EXIT_CODE = 130
"""128 + SIGINT, as shells have it; :class:`node.core.errors.ExitCode` names it INTERRUPTED."""
LAST_WORDS = "interrupted"
TOGETHER_S = 1.0
"""Seconds in which several SIGTERM are one: a program that ends a group of processes, and the make
in that group, each send one."""
AGAIN_S = 0.05
"""Seconds until a Ctrl-C that Python raised where nothing can catch it is delivered again."""


class _Mode(Enum):
    LEAVE = "leave"
    RAISE = "raise"
    HOLD = "hold"


class _State:
    """State of this process. The handler runs in the main thread, between two instructions."""

    mode = _Mode.LEAVE
    words = LAST_WORDS
    arrived = False
    arrived_at = 0.0
    """Monotonic time of the first signal."""
    installed = False


def install(*more: signal.Signals) -> None:
    """Handle SIGINT, and the signals in ``more`` in the same way, from now on. A signal that is
    ignored, as in a background job of a script, stays ignored."""
    for number in (signal.SIGINT, *more):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _handle)
    sys.unraisablehook = _unraisable
    _State.installed = True
    # A process that has replaced itself kept a Ctrl-C waiting until here.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def resume(*more: signal.Signals) -> None:
    """As :func:`install`, but only where SIGINT was handled before: an event loop leaves Python's
    own handler behind."""
    if _State.installed:
        install(*more)


def ignore() -> None:
    """Handle no Ctrl-C from now on: the command is over, and only the interpreter ends."""
    if _State.installed:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


@contextlib.contextmanager
def raising() -> Iterator[None]:
    """A Ctrl-C inside raises KeyboardInterrupt, so that ``finally`` is run."""
    with _in_mode(_Mode.RAISE):
        if _State.arrived and threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        yield


@contextlib.contextmanager
def held() -> Iterator[None]:
    """A Ctrl-C inside counts at the end of the block, for work that must not be left half done. It
    counts more than an error of the block, which somebody may catch and go on."""
    try:
        with _in_mode(_Mode.HOLD):
            yield
    except Exception:
        _count()
        raise
    _count()


def _count() -> None:
    """Act on a Ctrl-C that was held."""
    if _State.arrived and _State.mode is _Mode.LEAVE:
        leave()
    if _State.arrived and _State.mode is _Mode.RAISE:
        raise KeyboardInterrupt


@contextlib.contextmanager
def telling(words: str) -> Iterator[None]:
    """A Ctrl-C inside ends the process with ``words`` instead of "interrupted"."""
    # Loaded here: a command installs its handler before all else.
    from node.core.home import advice

    before = _State.words
    _State.words = advice(words)
    try:
        yield
    finally:
        _State.words = before


def acted() -> None:
    """The program has acted on a Ctrl-C and goes on: the next one is a first one again."""
    _State.arrived = False


def block(*more: signal.Signals) -> None:
    """Let a Ctrl-C wait until the next :func:`install`, which the program that replaces this one
    calls first, and the signals in ``more`` until :func:`unblock`."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *more})


def unblock(*numbers: signal.Signals) -> None:
    """Take signals again, also those that waited: this program handles them now."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, set(numbers))


def leave() -> None:
    """Print the last words and end this process now."""
    # Not print: the Ctrl-C may have come while the buffer of stderr was being written.
    start = "\n" if _is_terminal() else ""
    with contextlib.suppress(OSError):
        os.write(2, f"{start}{_State.words}\n".encode(errors="replace"))
    os._exit(EXIT_CODE)


@contextlib.contextmanager
def _in_mode(mode: _Mode) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # a Ctrl-C does not reach other threads
        return
    before = _State.mode
    _State.mode = mode
    try:
        yield
    finally:
        _State.mode = before


def _handle(number: int, frame: FrameType | None) -> None:
    now = time.monotonic()
    if _State.arrived and number == signal.SIGTERM and now - _State.arrived_at < TOGETHER_S:
        return
    if _State.arrived:
        os._exit(EXIT_CODE)
    if _State.mode is _Mode.LEAVE:
        leave()
    _State.arrived = True
    _State.arrived_at = now
    if _State.mode is _Mode.RAISE:
        raise KeyboardInterrupt


def _unraisable(unraisable: Any) -> None:
    """Deliver a Ctrl-C again that was raised in a destructor or a callback, which swallow it."""
    if not issubclass(unraisable.exc_type, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)
        return
    _State.arrived = False
    main = threading.main_thread().ident
    if main is not None:
        threading.Timer(AGAIN_S, signal.pthread_kill, (main, signal.SIGINT)).start()


def _is_terminal() -> bool:
    try:
        return os.isatty(2)
    except OSError:
        return False
