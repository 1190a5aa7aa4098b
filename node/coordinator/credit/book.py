"""The file of a peer's receipts: records that are only appended, in two files that take turns.
Enters: bytes of records. Leaves: the whole ones, and the places of damaged ones. Never: the content
of a record (:mod:`node.coordinator.credit.record`).

A record is `TWR1`, its length and a CRC of its bytes, then the bytes. A reader that meets anything
else goes on at the next `TWR1`, so damage costs the records that it hits. A `TWR1` that begins no
whole record costs a CRC of all the bytes that its length names. A file may be made of nothing else,
so a reader gives it up after some time.
"""

import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from node.core.errors import UsageFault
from node.wire.limits import SIZES

RECEIPTS = "receipts"
"""Name of the newer file in the directory of a run."""
MARK = b"TWR1"
_HEAD = struct.Struct(">4sII")
LONGEST = SIZES["v1.EpochReceipts"]
"""Bytes of the longest record."""
FILE_BYTES = 16 << 20
"""Bytes of a file before the next one begins; the older of two is given up then."""
MOST_FILE = 256 << 20
"""Bytes of the largest file that is read."""
LOST = 4
"""Bytes compared without finding a record, for each byte of a file, until the rest of the file is
given up."""
LOST_LEAST = 64 << 20
"""Lower bound on that limit, in bytes, for small files."""
MARK_COST = 1 << 10
"""Number of bytes that are charged for a mark that begins no record: comparing them takes as
long."""


class Book(Protocol):
    """A place for records."""

    def append(self, record: bytes) -> None:
        """Add a record. Blocks on the disk. Raises OSError."""
        ...


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a file that are no whole record: offset of the first byte, and their number."""

    at: int
    nbytes: int


class FileBook:
    """Records in the file ``path``, and older ones beside it with the ending ``.1``. Each file has
    at most ``most`` bytes, or one record."""

    def __init__(self, path: Path, most: int = FILE_BYTES) -> None:
        self.path = path
        self._most = most

    @property
    def files(self) -> list[Path]:
        """The files that are there, the older one first."""
        older = self.path.with_name(f"{self.path.name}.1")
        return [p for p in (older, self.path) if p.is_file()]

    def append(self, record: bytes) -> None:
        """Add a record in one write. Raises OSError."""
        raw = framed(record)
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            if 0 < os.fstat(fd).st_size and os.fstat(fd).st_size + len(raw) > self._most:
                os.close(fd)
                fd = -1
                os.replace(self.path, self.path.with_name(f"{self.path.name}.1"))
                fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            if os.write(fd, raw) != len(raw):
                raise OSError(f"cannot write all of a record to {self.path}")
        finally:
            if fd >= 0:
                os.close(fd)


def framed(record: bytes) -> bytes:
    """A record as it stands in a file."""
    return _HEAD.pack(MARK, len(record), zlib.crc32(record)) + record


def records(raw: bytes) -> Iterator[bytes | Damage]:
    """The records in the bytes of a file, and the damage between them, in order. Takes time linear
    in the file's bytes: after too many bytes compared without finding a record, the rest of the
    file is one damage."""
    view = memoryview(raw)
    left = max(LOST_LEAST, LOST * len(raw))
    at = 0
    bad = -1
    while at < len(raw):
        size, crc = _head_at(raw, at)
        record = view[at + _HEAD.size : at + _HEAD.size + size]
        if size >= 0 and zlib.crc32(record) == crc:
            if bad >= 0:
                yield Damage(bad, at - bad)
                bad = -1
            yield bytes(record)
            at += _HEAD.size + size
            continue
        if bad < 0:
            bad = at
        left -= max(size, 0) + MARK_COST
        found = raw.find(MARK, at + 1)
        if found < 0 or left < 0:
            break
        at = found
    if bad >= 0:
        yield Damage(bad, len(raw) - bad)


def _head_at(raw: bytes, at: int) -> tuple[int, int]:
    """Length and CRC of the record that may begin at this place; (-1, 0) if none can."""
    if len(raw) - at < _HEAD.size:
        return -1, 0
    mark, size, crc = _HEAD.unpack_from(raw, at)
    if mark != MARK or size > min(LONGEST, len(raw) - at - _HEAD.size):
        return -1, 0
    return size, crc


def read(path: Path) -> bytes:
    """The bytes of a file of receipts. Raises UsageFault for one that cannot be read, or is too
    large for one."""
    step = "name files of receipts, as  tutti ledger export FILE  writes them"
    try:
        if not path.is_file():
            raise UsageFault(f"there is no file {path}", step)
        if path.stat().st_size > MOST_FILE:
            raise UsageFault(f"{path} has more than {MOST_FILE >> 20} MiB", step)
        return path.read_bytes()
    except OSError as e:
        raise UsageFault(f"cannot read {path}: {e.strerror}", step) from e
