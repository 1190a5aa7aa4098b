"""``tutti id export|import``: the key of a home to another machine, and from one. Enters: a file, a
passphrase. Leaves: a sealed file, or the key file of a home, whole or not at all. Never: a key that
is lost because another took its name."""

import os
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from node.config import NodeConfig, write_atomically
from node.control.sockets import listener
from node.core.errors import Refused, UsageFault, writing
from node.core.home import expanded
from node.identity.backup import MOST_BYTES, check_passphrase, open_sealed, seal
from node.identity.keys import Identity

ONCE = (
    "Run one id on one machine at a time. Two daemons with one id take each other's place in the "
    "swarm, and what both sign in one epoch proves to the others that this peer votes twice: they "
    "do not count its votes any more. The id is the owner's, too, of every run that it has signed."
)
"""Advice on a key that is in two places."""
_PASSPHRASE_BYTES = 1024


@dataclass(frozen=True)
class MovedKey:
    """A key that was written. ``before``: the place of the key or the file that was there, None for
    none."""

    identity: Identity
    file: Path
    before: Path | None = None


def export_key(
    ours: NodeConfig, file: Path, ask: Callable[[bool], str], *, force: bool
) -> MovedKey:
    """Write the key of this home to ``file``, sealed, mode 0600. ``ask(new)`` returns the
    passphrase. Raises Refused if the home has no key or the file exists and ``force`` is not given,
    UsageFault for a passphrase that is too short, LocalFault if the file cannot be written."""
    identity = Identity.load(ours.identity_path)
    target = expanded(file)
    if os.path.realpath(target) == os.path.realpath(ours.identity_path):
        raise UsageFault(f"{file} is the key of this home itself", "name another file")
    if os.path.lexists(target) and not force:
        raise Refused(f"{file} exists already", "name another file, or replace it with  --force")
    passphrase = ask(True)
    check_passphrase(passphrase)
    raw = seal(identity, passphrase)
    with writing(file, "name a file in a directory that you may write"):
        if not target.parent.is_dir():
            raise UsageFault(f"there is no directory {target.parent}", "make it first")
        write_atomically(target, raw)
    return MovedKey(identity, target)


def import_key(
    ours: NodeConfig, file: Path, ask: Callable[[bool], str], *, force: bool
) -> MovedKey:
    """Make the key in ``file`` the key of this home. A key that is there is moved aside with
    ``force``, and a reason to refuse without. Raises Refused also while a daemon runs here and for
    a wrong passphrase, UsageFault for a file that is no exported key, LocalFault if the key cannot
    be written."""
    path = ours.identity_path
    raw = _read(expanded(file), file)
    there = os.path.lexists(path)
    if there and not force:
        raise Refused(
            f"{path} exists already: this home is a peer of its own",
            f"give the other one a home of its own:  tutti id import {file} --home DIR  , or set "
            "the key aside with  --force",
        )
    if listener(ours.control_socket) is not None:
        raise Refused("a daemon runs with the key of this home", "tutti stop , then again")
    identity = open_sealed(raw, ask(False))
    if not there:
        identity.write_new(path)
        return MovedKey(identity, path)
    before = path.with_name(f"{path.name}.before-{time.time_ns()}")
    identity.path = path
    identity.lock()  # a daemon that starts now does not take the key that leaves
    try:
        identity.write_over(path, before)
    finally:
        identity.unlock()
    return MovedKey(identity, path, before)


def passphrase_from(file: str) -> str:
    """The passphrase in the first line of a file, "-" for stdin. Raises UsageFault."""
    try:
        if file == "-":
            raw = sys.stdin.buffer.readline(_PASSPHRASE_BYTES)
        else:
            with open(expanded(file), "rb") as opened:
                raw = opened.readline(_PASSPHRASE_BYTES)
        return raw.decode().rstrip("\r\n")
    except OSError as e:
        raise UsageFault(
            f"cannot read {file}: {e.strerror}", "name a file with a passphrase"
        ) from e
    except UnicodeDecodeError as e:
        raise UsageFault(f"the passphrase in {file} is not UTF-8", "write it anew") from e


def _read(path: Path, shown: Path) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as e:
        raise UsageFault(
            f"cannot read {shown}: {e.strerror}", "name a file of  tutti id export"
        ) from e
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise UsageFault(f"{shown} is not a file", "name a file of  tutti id export")
        return os.read(fd, MOST_BYTES + 1)
    finally:
        os.close(fd)
