"""The newest vote of this peer, kept where it outlives the process: a restarted peer must not vote
a second time on the same attempt."""

import contextlib
import hashlib
import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path

from node.core.errors import Refused
from node.core.ids import CellId

_ROW = struct.Struct(">QQQQ32s")
"""Number of the row, the cell, term, attempt, sha256 of the signed bytes."""
_CRC = struct.Struct(">I")
_SIZE = _ROW.size + _CRC.size


class VoteLedger:
    """The last vote of this peer; in one cell votes grow in (term, attempt). ``path``: file of two
    rows, written in turns, so that one of them is whole whenever the process or the machine stops;
    None: kept in memory only. A power cut may lose the rows of the last second: a row is written at
    once and not flushed, because an epoch may take less time than the disk."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._row = (-1, 0, 0, 0, b"")
        """The newest row, as it is written."""
        if path is not None:
            with contextlib.suppress(OSError):
                self._row = max(_rows(path.read_bytes()), default=self._row)

    def term(self, cell: CellId) -> int:
        """Term of the newest vote; 0 before the first one in this cell."""
        _, last_cell, term, *_ = self._row
        if last_cell != _number(cell):
            return 0
        return term

    def cast(self, cell: CellId, term: int, attempt: int, said: bytes) -> None:
        """Record a vote that is about to be signed. Raises Refused if it is older than the last
        vote, or differs from it on the same attempt."""
        new = (_number(cell), term, attempt, hashlib.sha256(said).digest())
        last = self._row[1:]
        if new == last:
            return
        if new[0] == last[0] and new[1:3] <= last[1:3]:
            raise Refused(
                f"a vote in attempt {attempt} of term {term} after one in attempt {last[2]} of "
                f"term {last[1]}"
            )
        self._row = (self._row[0] + 1, *new)
        self._write()

    def _write(self) -> None:
        """Write the row. If the disk is full or gone, the vote is kept in memory only, and nothing
        stops."""
        if self._path is None:
            return
        row = _ROW.pack(*self._row)
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                os.pwrite(file, row + _CRC.pack(zlib.crc32(row)), self._row[0] % 2 * _SIZE)
            finally:
                os.close(file)


def _rows(raw: bytes) -> Iterator[tuple[int, int, int, int, bytes]]:
    """The rows of a file that are whole."""
    for row in (raw[i : i + _SIZE] for i in range(0, 2 * _SIZE, _SIZE)):
        if len(row) == _SIZE and zlib.crc32(row[: _ROW.size]) == _CRC.unpack(row[-4:])[0]:
            yield _ROW.unpack(row[: _ROW.size])


def _number(cell: CellId) -> int:
    return int(cell or "0", 16)
