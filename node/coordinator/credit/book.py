"""The file of a peer's receipts: records that are only appended, in two files that take turns.
Enters: bytes of records. Leaves: the whole ones, and the places of damaged ones. Never: the content
of a record (:mod:`node.coordinator.credit.record`).

A record is `TWR1`, its length and a CRC of its bytes, then the bytes. A reader that meets anything
else goes on at the next `TWR1`, so damage costs the records that it hits.
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


class Book(Protocol):
    """A place for records."""

    def append(self, record: bytes) -> None:
        """Add a record. Blocks on the disk. Raises OSError."""
        ...


@dataclass(frozen=True, slots=True)
class Damage:
    """Bytes of a file that are no whole record: the first one, and how many."""

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
    """The records in the bytes of a file, and the damage between them, in order."""
    at = 0
    bad = -1
    while at < len(raw):
        record = _record_at(raw, at)
        if record is not None:
            if bad >= 0:
                yield Damage(bad, at - bad)
                bad = -1
            yield record
            at += _HEAD.size + len(record)
            continue
        if bad < 0:
            bad = at
        found = raw.find(MARK, at + 1)
        at = len(raw) if found < 0 else found
    if bad >= 0:
        yield Damage(bad, len(raw) - bad)


def _record_at(raw: bytes, at: int) -> bytes | None:
    """The whole record that begins at this place; None if none does."""
    if len(raw) - at < _HEAD.size:
        return None
    mark, size, crc = _HEAD.unpack_from(raw, at)
    start = at + _HEAD.size
    if mark != MARK or size > min(LONGEST, len(raw) - start):
        return None
    record = raw[start : start + size]
    if zlib.crc32(record) != crc:
        return None
    return record


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
