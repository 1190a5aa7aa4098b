"""The files of an archive, below the path that its operator names.

Enters: paths below that path. Leaves: names and open files. Never: a file behind a link, a pipe or
a device that somebody put there; more names than :data:`LISTED`.

In a directory of this machine each name is opened relative to the descriptor of the directory above
it, and no link is followed, so it does not matter when somebody plants one. Other file systems of
fsspec do not distinguish links and pipes, or have none.
"""

import contextlib
import errno
import itertools
import os
import stat
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO

from node.checkpoint.files import directory
from node.core.errors import Refused

LISTED = 10_000
"""Number of names in a directory that are read, at most."""
_LEAF = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
"""A pipe is opened without waiting for its other end, and refused then."""


class LocalFiles:
    """The files below the directory ``top`` of this machine, which may itself be a link. ``shown``:
    name of the place in messages."""

    def __init__(self, top: str, shown: str) -> None:
        self.top = top
        self._shown = shown

    def names(self, path: str) -> list[str]:
        """Names in a directory, sorted, at most :data:`LISTED`; none if the directory does not
        exist or is behind a link."""
        try:
            with self._directories(path) as opened, os.scandir(opened[-1]) as entries:
                return sorted(entry.name for entry in itertools.islice(entries, LISTED))
        except (FileNotFoundError, NotADirectoryError, Refused):
            return []

    @contextmanager
    def reading(self, path: str) -> Iterator[BinaryIO]:
        """An open file. Raises Refused for a link, a pipe or a device on its path, and OSError."""
        with self._open(path, os.O_RDONLY) as fd, open(fd, "rb", closefd=False) as file:
            yield file

    @contextmanager
    def writing(self, path: str) -> Iterator[BinaryIO]:
        """A file open for writing, which is flushed to the disk. Raises Refused for a link, a pipe
        or a device on its path, and OSError if it cannot be flushed."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with self._open(path, flags) as fd, open(fd, "wb", closefd=False) as file:
            yield file
            file.flush()
            os.fsync(fd)

    def put(self, path: str, data: bytes) -> None:
        """Write a small file; :meth:`sync` flushes it. Raises as :meth:`writing`."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
        with self._open(path, flags) as fd, open(fd, "wb", closefd=False) as file:
            file.write(data)

    def make_directory(self, path: str) -> None:
        """Make a directory and the directories above it, where they are missing. Raises OSError,
        Refused."""
        os.makedirs(self.top or "/", exist_ok=True)
        with self._directories(path, make=True):
            pass

    def remove(self, path: str) -> None:
        """Remove a file. Raises OSError, Refused."""
        above, _, name = path.rpartition("/")
        with self._directories(above) as opened:
            os.unlink(name, dir_fd=opened[-1])

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory. Raises OSError, Refused."""
        above, _, name = path.rpartition("/")
        with self._directories(above) as opened:
            os.rmdir(name, dir_fd=opened[-1])

    def sync(self, path: str, names: Collection[str]) -> None:
        """Flush a directory, these of its files, and the directories from ``top`` down to it.
        Raises OSError, Refused."""
        with self._directories(path) as opened:
            for name in sorted({*os.listdir(opened[-1])} & {*names}):
                with self._open(f"{path}/{name}", os.O_RDONLY) as fd:
                    os.fsync(fd)
            for at in reversed(opened):
                os.fsync(at)

    def forget(self) -> None:
        """Nothing is remembered between two calls."""

    @contextmanager
    def _directories(self, path: str, *, make: bool = False) -> Iterator[list[int]]:
        """Descriptors of the directories from ``top`` down to ``path``; with ``make`` missing ones
        are made."""
        with contextlib.ExitStack() as stack:
            opened = [stack.enter_context(directory(self.top or "/"))]
            for name in path.removeprefix(self.top).strip("/").split("/"):
                if not name:
                    continue
                at = opened[-1]
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(name, dir_fd=at)
                try:
                    opened.append(stack.enter_context(directory(name, at)))
                except OSError as e:
                    # The kernel says of a link only that it is no directory.
                    if _is_planted(name, at):
                        raise self._planted(name) from e
                    raise
            yield opened

    @contextmanager
    def _open(self, path: str, flags: int) -> Iterator[int]:
        """The descriptor of a regular file. Raises Refused, OSError."""
        above, _, name = path.rpartition("/")
        with self._directories(above) as opened:
            try:
                fd = os.open(name, flags | _LEAF, 0o666, dir_fd=opened[-1])
            except OSError as e:
                if e.errno in (errno.ELOOP, errno.ENXIO):
                    raise self._planted(name) from e
                raise
            try:
                mode = os.fstat(fd).st_mode
                if stat.S_ISDIR(mode):
                    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
                if not stat.S_ISREG(mode):
                    raise self._planted(name)
                yield fd
            finally:
                os.close(fd)

    def _planted(self, name: str) -> Refused:
        return Refused(
            f"{name} at {self._shown} is a link, a pipe or a device, and is not followed",
            "look who put it there, and move it away",
        )


class RemoteFiles:
    """The files below ``top`` in a file system of fsspec, with the methods of
    :class:`LocalFiles`; each raises what the package of that file system raises."""

    def __init__(self, files: Any, top: str) -> None:
        self.top = top
        self._fs = files

    def names(self, path: str) -> list[str]:
        """Names in a directory, sorted, at most :data:`LISTED`; none if it does not exist."""
        try:
            found = self._fs.ls(path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return []
        names = {str(one).rstrip("/").rpartition("/")[2] for one in found[:LISTED]}
        return sorted(names - {path.rpartition("/")[2], ""})

    @contextmanager
    def reading(self, path: str) -> Iterator[Any]:
        """An open file."""
        with self._fs.open(path, "rb") as file:
            yield file

    @contextmanager
    def writing(self, path: str) -> Iterator[Any]:
        """A file open for writing."""
        with self._fs.open(path, "wb") as file:
            yield file

    def put(self, path: str, data: bytes) -> None:
        """Write a small file."""
        self._fs.pipe_file(path, data)

    def make_directory(self, path: str) -> None:
        """Make a directory and the directories above it, where they are missing."""
        self._fs.makedirs(path, exist_ok=True)

    def remove(self, path: str) -> None:
        """Remove a file."""
        self._fs.rm_file(path)

    def remove_directory(self, path: str) -> None:
        """Remove an empty directory; an object store has none."""
        with contextlib.suppress(NotImplementedError):
            self._fs.rmdir(path)

    def sync(self, path: str, names: Collection[str]) -> None:
        """Such a file system has no call that flushes."""

    def forget(self) -> None:
        """Forget listings of directories, which fsspec remembers."""
        self._fs.invalidate_cache()


PlaceFiles = LocalFiles | RemoteFiles


def place_files(files: Any, top: str, shown: str) -> PlaceFiles:
    """The files below ``top`` in ``files``, a file system of fsspec."""
    said = files.protocol
    protocols = (said,) if isinstance(said, str) else tuple(said)
    if "file" in protocols:
        return LocalFiles(top, shown)
    return RemoteFiles(files, top)


def _is_planted(name: str, at: int) -> bool:
    """Return True for a link, a pipe or a device, for the message only: it may change meanwhile."""
    try:
        mode = os.stat(name, dir_fd=at, follow_symlinks=False).st_mode
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
