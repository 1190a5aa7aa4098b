"""Network namespaces by their names: the command that runs another one there, and a way in for a
process that runs already."""

import ctypes
import os
from collections.abc import Sequence

FOLDER = "/var/run/netns"
"""Directory of the named namespaces."""
_ENTER = ("ip", "netns", "exec")
_NEWNET = 0x40000000


def through(name: str) -> tuple[str, ...]:
    """Return the command that runs another one in the namespace ``name``."""
    return (*_ENTER, name)


def entered(command: Sequence[str]) -> str:
    """Return the namespace that ``command`` was made for by :func:`through`; "" if it is another
    command, or none."""
    return command[-1] if command and tuple(command) == through(command[-1]) else ""


def enter(name: str) -> None:
    """Move the calling thread, and threads and processes that it starts, to the namespace ``name``.
    Raises OSError."""
    there = os.open(f"{FOLDER}/{name}", os.O_RDONLY)
    try:
        move_to(there)
    finally:
        os.close(there)


def move_to(descriptor: int) -> None:
    """Move the calling thread to the namespace of an open descriptor. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(descriptor, _NEWNET):
        raise OSError(ctypes.get_errno(), "cannot enter a network namespace")
