"""A region of memory in which one process leaves bytes for another one: an outbox for its writer,
an inbox for its reader.

A region is an unnamed file in memory (memfd): nothing is left of it when both processes are gone.
It is read and written by system calls and never mapped, so an access ends with too few bytes or an
error, and never with a signal, whatever the other process does. Layout: for each block the number
of the piece that was taken from it last; then the blocks. A piece lies in consecutive blocks,
behind its number.
"""

import contextlib
import fcntl
import mmap
import os
import secrets
import stat
import struct
import sys
from typing import NamedTuple

from node.core.errors import WireError

BLOCK = 1 << 15
"""Bytes of a block."""
BLOCKS = 256
NUMBER = 8
"""Bytes of the number of a piece."""
HEADER = 4096
"""Bytes before the first block."""
SIZE = HEADER + BLOCK * BLOCKS
"""Bytes of a region. The system provides those that have been written."""
PEERS = 8
"""Daemons with which memory is shared at most."""
MOST = PEERS * SIZE
"""Bytes of the regions that one daemon writes to. Those that it reads count at their writers."""
LEAST = 1 << 14
"""Bytes from which a piece is left in a region. A smaller one costs less in its call."""
REUSE_S = 600.0
"""Seconds after which the blocks of a piece that nobody took are used again. The pieces of a
cancelled call are never taken; those of another call are taken earlier."""
NAME = 8
"""Bytes of the name of a region."""
SUPPORTED = sys.platform == "linux"
"""True on systems with unnamed files that can be sealed."""
_LAYOUT = struct.Struct(f">{NAME}sHQI")


class Place(NamedTuple):
    """The place of a piece in a region."""

    region: bytes
    block: int
    number: int
    length: int

    @classmethod
    def read(cls, raw: bytes) -> "Place":
        """The place that a peer names. Raises WireError for anything of another length."""
        if len(raw) != _LAYOUT.size:
            raise WireError(f"a place in shared memory of {len(raw)} bytes")
        return cls(*_LAYOUT.unpack(raw))


class Outbox:
    """The writer's end."""

    def __init__(self) -> None:
        """Raises OSError if the system provides no such memory."""
        self.name = secrets.token_bytes(NAME)
        fd = os.memfd_create("tutti", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self._file = os.fdopen(fd, "r+b", 0)
        self.fd = fd
        self._number = 0
        self._held: dict[int, tuple[bytes, int, float]] = {}
        """Number, blocks and time of each piece that was not taken yet, by its first block."""
        try:
            os.ftruncate(self.fd, SIZE)
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _seals())
        except OSError:
            self.close()
            raise

    def put(self, data: memoryview, now: float) -> bytes | None:
        """Leave a piece. Returns its place, or None if there is no room for it. ``now`` is in
        monotonic seconds."""
        with contextlib.suppress(OSError):
            blocks = -(-(NUMBER + len(data)) // BLOCK)
            at = self._room(blocks, now)
            if at is None:
                return None
            self._number += 1
            number = self._number.to_bytes(NUMBER, "big")
            written = os.pwritev(self.fd, (number, data), HEADER + at * BLOCK)
            if written == NUMBER + len(data):
                self._held[at] = number, blocks, now
                return _LAYOUT.pack(self.name, at, self._number, len(data))
        return None

    def withdraw(self, place: Place) -> None:
        """Use the blocks of a piece again that its reader will not take any more."""
        number, _, _ = self._held.get(place.block, (b"", 0, 0.0))
        if number == place.number.to_bytes(NUMBER, "big"):
            del self._held[place.block]

    def close(self) -> None:
        """Give the memory back. Safe to call twice."""
        self._file.close()

    def _room(self, blocks: int, now: float) -> int | None:
        """The first block of a free place of this size; None if there is none."""
        taken = os.pread(self.fd, NUMBER * BLOCKS, 0)
        for at, (number, _, since) in list(self._held.items()):
            if taken[NUMBER * at : NUMBER * (at + 1)] == number or now - since > REUSE_S:
                del self._held[at]
        free = 0
        for at in sorted(self._held):
            if at - free >= blocks:
                return free
            free = at + self._held[at][1]
        if BLOCKS - free >= blocks:
            return free
        return None


class Inbox:
    """The reader's end."""

    def __init__(self, name: bytes, fd: int) -> None:
        """Takes over the descriptor of the region ``name``. Raises WireError, and closes it, if it
        is anything else."""
        if why := _objection(fd):
            os.close(fd)
            raise WireError(f"a descriptor that is no region of memory: {why}")
        self.name = name
        self._file = os.fdopen(fd, "r+b", 0)
        self.fd = fd

    def take(self, place: Place, into: memoryview) -> int:
        """Copy a piece to the beginning of ``into``, and return its length; its place is free then.
        Raises WireError for a place beyond the region and a piece larger than ``into``, before
        anything is read, and for a piece that is not there."""
        start = HEADER + place.block * BLOCK
        if not 0 < place.length <= min(len(into), SIZE - start - NUMBER):
            raise WireError(f"a piece of {place.length} bytes in block {place.block}")
        number = place.number.to_bytes(NUMBER, "big")
        try:
            length = os.preadv(self.fd, [into[: place.length]], start + NUMBER)
            # The writer writes the number first. If it is still the same, no other piece was
            # written over these bytes while they were read.
            if length != place.length or os.pread(self.fd, NUMBER, start) != number:
                raise WireError("a piece that is not in its region")
            os.pwrite(self.fd, number, NUMBER * place.block)
        except OSError as e:
            raise WireError(f"a region that cannot be used: {e.strerror}") from e
        return length

    def close(self) -> None:
        """Give the memory back. Safe to call twice."""
        self._file.close()


def _seals() -> int:
    """The seals of a region: its size is fixed."""
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _objection(fd: int) -> str:
    """Reason why a descriptor is no region, "" if it is one. Other files have no such seals: a file
    of a network could keep a reader waiting, and a device could take what is written to it."""
    try:
        facts = os.fstat(fd)
        if not stat.S_ISREG(facts.st_mode) or facts.st_size != SIZE:
            return f"a file of {facts.st_size} bytes"
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) != _seals():
            return "its size is not sealed"
        if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
            return "its pages are of another size"
    except OSError as e:
        return e.strerror or str(e)
    return ""
