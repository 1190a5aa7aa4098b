"""Files that are whole or absent: nothing is followed, everything is flushed before it gets its
name.

Names are opened relative to a directory's descriptor, so a link planted on the way is refused and
not walked. All that a checkpoint asks of the operating system when it writes are calls of ``os``
here and in ``store.py``; a test rehearses a power cut after every single one.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from node.core.errors import DISK_FULL, LocalFault, OutOfResources, Refused

_NO_FOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC


@contextmanager
def new_file(name: str, at: int) -> Iterator[int]:
    """The descriptor of a new file, readable by its owner only, flushed after the with-block; an
    existing name is an error. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_FOLLOW
    out = os.open(name, flags, 0o600, dir_fd=at)
    try:
        yield out
        os.fsync(out)
    finally:
        os.close(out)


def write(fd: int, data: memoryview) -> None:
    """All of ``data``; the system may take it in several pieces. Raises OSError."""
    while len(data):
        data = data[os.write(fd, data) :]


@contextmanager
def directory(path: str | Path, at: int | None = None) -> Iterator[int]:
    """The descriptor of a directory, for the time of a with-block.

    With ``at`` the name is one step below that directory and must not be a link; without, it is a
    path the user chose, links allowed. Raises OSError.
    """
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    fd = os.open(path, flags) if at is None else os.open(path, flags | os.O_NOFOLLOW, dir_fd=at)
    try:
        yield fd
    finally:
        os.close(fd)


@contextmanager
def reading(name: str, at: int) -> Iterator[tuple[int, int]]:
    """(descriptor, size in bytes) of a regular file, for the time of a with-block.

    Raises Refused when ``name`` is missing, a link, a device or a directory, OSError when it cannot
    be opened.
    """
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | _NO_FOLLOW, dir_fd=at)
    except FileNotFoundError as e:
        raise Refused(f"{name} is missing") from e
    except OSError as e:
        if e.errno == errno.ELOOP:
            raise Refused(f"{name} is a link") from e
        raise
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise Refused(f"{name} is not a regular file")
        yield fd, found.st_size
    finally:
        os.close(fd)


def sha256_of(fd: int) -> str:
    """Hex sha256 of a file from its beginning, whatever the descriptor's position. Raises
    OSError."""
    with open(fd, "rb", buffering=0, closefd=False) as file:
        file.seek(0)
        return hashlib.file_digest(file, "sha256").hexdigest()


def remove_tree(name: str, at: int) -> None:
    """Remove a directory that holds only files, as every one made here does. Raises
    OSError."""
    with directory(name, at) as fd:
        for entry in sorted(os.listdir(fd)):
            os.unlink(entry, dir_fd=fd)
    os.rmdir(name, dir_fd=at)


def local_fault(doing: str, where: Path, error: OSError) -> LocalFault:
    """What to raise when the disk says no: OutOfResources when it is full, LocalFault otherwise."""
    reason = error.strerror or str(error)
    if error.errno in DISK_FULL:
        return OutOfResources(
            f"no room to {doing} under {where}: {reason}",
            "free space on that disk or keep fewer checkpoints, then go on; what is already under "
            f"{where} is untouched",
        )
    return LocalFault(
        f"cannot {doing} under {where}: {reason}",
        f"check that {where} exists and that this user may write there",
    )
