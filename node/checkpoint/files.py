"""Files that are whole or absent: nothing is followed, everything is flushed before it gets its
name; and named tensors in one safetensors file, streamed out and hashed on the way, checked before
the library reads it.

Names are opened relative to a directory's descriptor, so a link planted on the way is refused and
not walked. All that a checkpoint asks of the operating system when it writes are calls of ``os``
here and in ``store.py``; a test rehearses a power cut after every single one.
"""

import errno
import fcntl
import hashlib
import mmap
import os
import re
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from node.core.errors import DISK_FULL, LocalFault, OutOfResources, Refused
from node.wire.remote import HeldTensor, collected
from node.wire.tensor_file import file_header

_NO_FOLLOW = os.O_NOFOLLOW | os.O_CLOEXEC
HEADER_LIMIT = 8 << 20
"""Bytes of header this project writes or reads; the library itself allows 100 MB."""

NAME = re.compile(r"(?!.*\.\.)[A-Za-z0-9_][A-Za-z0-9_.:#\[\]-]{0,199}(/[a-z][a-z0-9_]{0,63})?")
"""A parameter ("model.norm.weight") or an optimizer state of a part
("model.norm.weight/momentum")."""

_BLOCK = 8 << 20
PRIORITY = 19
"""Niceness of a thread that works beside training, on systems where a thread has its own."""


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
    if at is None:
        fd = os.open(path, flags)
    else:
        fd = os.open(path, flags | os.O_NOFOLLOW, dir_fd=at)
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


def sha256_of(fd: int, goes_on: Callable[[], bool] = lambda: True) -> str:
    """Hex sha256 of a file from its beginning, whatever the descriptor's position. ``goes_on`` is
    asked before each block. Raises OSError, Interrupted."""
    sha = hashlib.sha256()
    block = memoryview(bytearray(_BLOCK))
    with open(fd, "rb", buffering=0, closefd=False) as file:
        file.seek(0)
        while size := file.readinto(block):
            if not goes_on():
                raise Interrupted()
            sha.update(block[:size])
    return sha.hexdigest()


def remove_tree(name: str, at: int) -> None:
    """Remove a directory that holds only files, as every one made here does. Raises
    OSError."""
    with directory(name, at) as fd:
        for entry in sorted(os.listdir(fd)):
            os.unlink(entry, dir_fd=fd)
    os.rmdir(name, dir_fd=at)


def local_fault(doing: str, where: Path, error: OSError) -> LocalFault:
    """Fault for an error of the disk: OutOfResources when it is full, LocalFault otherwise."""
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


def yield_to_others() -> None:
    """Lower the priority of this thread: hashing gigabytes must not slow training down. On Linux a
    thread has a niceness of its own."""
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), PRIORITY)


def check_name(name: str) -> None:
    """Raises ValueError for a tensor name outside the pattern; a name is never a path, and never
    looks like one."""
    if NAME.fullmatch(name) is None:
        raise ValueError(f"not a tensor name: {name[:80]!r}")


class Interrupted(LocalFault):
    """The caller asked to give up a reading or writing."""

    def __init__(self) -> None:
        super().__init__("the checkpoint was given up", "an earlier one is untouched")


class BlockWriter:
    """Writes bytes to a new file in large aligned blocks and hashes them on the way.

    Where the filesystem allows it, the blocks go past the page cache: copying gigabytes into the
    cache takes several times the processor time of everything else here.
    """

    def __init__(self, fd: int, goes_on: Callable[[], bool]) -> None:
        """``goes_on`` is asked before each block."""
        self._fd = fd
        self._goes_on = goes_on
        self._block = memoryview(mmap.mmap(-1, _BLOCK))
        self._filled = self._written = 0
        self._sha = hashlib.sha256()
        self._set_direct(True)

    @property
    def size(self) -> int:
        """Bytes that were added."""
        return self._written + self._filled

    def add(self, data: memoryview) -> None:
        """Append bytes. Raises OSError, Interrupted."""
        while len(data):
            piece = data[: _BLOCK - self._filled]
            self._block[self._filled : self._filled + len(piece)] = piece
            self._filled += len(piece)
            data = data[len(piece) :]
            if self._filled == _BLOCK:
                self._flush()

    def finish(self) -> str:
        """Write the last bytes; returns the hex sha256 of the file. Raises OSError, Interrupted."""
        # The length of a file is rarely a multiple of the disk's block size.
        self._set_direct(False)
        self._flush()
        return self._sha.hexdigest()

    def _flush(self) -> None:
        if not self._goes_on():
            raise Interrupted()
        data = self._block[: self._filled]
        self._sha.update(data)
        try:
            write(self._fd, data)
        except OSError as e:
            if e.errno != errno.EINVAL or not self._direct:
                raise
            # Some filesystems open files in this mode and then refuse to write.
            self._set_direct(False)
            os.lseek(self._fd, self._written, os.SEEK_SET)
            write(self._fd, data)
        self._written += self._filled
        self._filled = 0

    def _set_direct(self, direct: bool) -> None:
        """Write past the page cache from now on, or not; without effect where that is not known."""
        self._direct = False
        flag = getattr(os, "O_DIRECT", 0)
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | flag if direct else flags & ~flag)
        except OSError:
            return
        self._direct = direct and flag != 0


def write_tensors(
    fd: int,
    tensors: Mapping[str, HeldTensor],
    goes_on: Callable[[], bool] = lambda: True,
) -> tuple[int, str]:
    """Write ``tensors`` (any device, any strides) to a new file; returns the number of bytes
    written and their hex sha256. ``goes_on`` is asked before each block.

    Raises ValueError for a name that cannot be kept, OSError from the disk, Interrupted.
    """
    header = _header(tensors)
    out = BlockWriter(fd, goes_on)
    out.add(memoryview(header))
    for name in sorted(tensors):
        flat = collected(tensors[name]).detach().cpu().contiguous().reshape(-1)
        out.add(flat.view(torch.uint8).numpy().data)
    digest = out.finish()
    return out.size, digest


def read_tensors(
    fd: int, size: int, goes_on: Callable[[], bool] = lambda: True
) -> dict[str, torch.Tensor]:
    """Every tensor of an open file of ``size`` bytes, on the CPU, independent of the file
    afterwards. ``goes_on`` is asked before each tensor.

    The length of the header is checked before the library sees the file. Raises Refused for
    anything that is not such a file, OSError from the disk, Interrupted.
    """
    head = os.pread(fd, 8, 0)
    length = int.from_bytes(head, "little")
    if len(head) < 8 or length > size - 8:
        raise Refused("its header is longer than the file")
    if length > HEADER_LIMIT:
        raise Refused(f"its header of {length} bytes is over the limit of {HEADER_LIMIT}")
    try:
        with safe_open(f"/dev/fd/{fd}", framework="pt", device="cpu") as opened:
            tensors: dict[str, torch.Tensor] = {}
            for name in opened.keys():
                if not goes_on():
                    raise Interrupted()
                tensors[name] = opened.get_tensor(name).clone()
        for name in tensors:
            check_name(name)
    except (SafetensorError, ValueError) as e:
        raise Refused(f"not a file of tensors: {e}") from e
    return tensors


def _header(tensors: Mapping[str, HeldTensor]) -> bytes:
    for name in tensors:
        check_name(name)
    head, _ = file_header({name: (t.dtype, t.shape) for name, t in tensors.items()})
    if len(head) - 8 > HEADER_LIMIT:
        raise ValueError(
            f"{len(tensors)} tensors need a header of {len(head) - 8} bytes, more than "
            f"{HEADER_LIMIT}"
        )
    return head
