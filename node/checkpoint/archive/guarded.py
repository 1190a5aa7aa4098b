"""Guarded access to the files of an archive, below the path that its operator names, in a file
system of fsspec.

Enters: paths below that path. Leaves: names and open files. Never: a file behind a link, a pipe or
a device that somebody put there; more names than :data:`LISTED`.

Links and pipes are detected if the place is a directory of this machine. Other file systems of
fsspec do not distinguish them, or have none.
"""

import itertools
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from node.checkpoint.files import directory, reading
from node.core.errors import Refused

LISTED = 10_000
"""Number of names in a directory that are read, at most."""


class GuardedFiles:
    """The files below ``top`` in a file system of fsspec. ``shown``: name of the place in
    messages."""

    def __init__(self, files: Any, top: str, shown: str) -> None:
        self.fs = files
        self.top = top
        self._shown = shown
        self._is_local = "file" in _protocols(files)

    def check(self, path: str) -> None:
        """Raises Refused if this path, or a directory on the way to it, is a link, a pipe or a
        device. A path with nothing there is good."""
        if not self._is_local:
            return
        way = self.top
        for name in path.removeprefix(self.top).strip("/").split("/"):
            way = f"{way}/{name}"
            try:
                mode = os.lstat(way).st_mode
            except FileNotFoundError:
                return
            if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
                raise Refused(
                    f"{name} at {self._shown} is a link, a pipe or a device, and is not followed",
                    "look who put it there, and move it away",
                )

    def names(self, path: str) -> list[str]:
        """Names in a directory, sorted, at most :data:`LISTED`; none if the directory does not
        exist or is behind a link."""
        try:
            self.check(path)
            if self._is_local:
                with os.scandir(path) as entries:
                    return sorted(entry.name for entry in itertools.islice(entries, LISTED))
            found = self.fs.ls(path, detail=False)
        except (FileNotFoundError, NotADirectoryError, Refused):
            return []
        names = {str(one).rstrip("/").rpartition("/")[2] for one in found[:LISTED]}
        return sorted(names - {path.rpartition("/")[2], ""})

    @contextmanager
    def reading(self, path: str) -> Iterator[Any]:
        """An open file. Raises Refused for a link, a pipe or a device on its path, and OSError."""
        self.check(path)
        with self.fs.open(path, "rb") as file:
            yield file

    @contextmanager
    def writing(self, path: str) -> Iterator[Any]:
        """A file open for writing, which is flushed to the disk of this machine. Raises Refused for
        a link, a pipe or a device on its path, and OSError if it cannot be flushed."""
        self.check(path)
        with self.fs.open(path, "wb") as file:
            yield file
            if self._is_local:
                file.flush()
                os.fsync(file.fileno())

    def put(self, path: str, data: bytes) -> None:
        """Write a small file. Raises Refused for one that is not followed, OSError."""
        self.check(path)
        self.fs.pipe_file(path, data)

    def sync(self, path: str, names: Collection[str]) -> None:
        """Flush a directory of this machine, these of its files, and the directories above it.
        Other file systems have no such call. Raises OSError, Refused."""
        if not self._is_local:
            return
        with directory(path) as at:
            for name in sorted({*os.listdir(at)} & {*names}):
                with reading(name, at) as (file, _):
                    os.fsync(file)
        while path != self.top:
            with directory(path) as at:
                os.fsync(at)
            path = path.rpartition("/")[0]


def _protocols(files: Any) -> tuple[str, ...]:
    said = files.protocol
    if isinstance(said, str):
        return (said,)
    return tuple(said)
