"""The newest vote of this peer, kept where it outlives the process: who is started again must not
vote a second time on what it has voted on."""

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
"""Number of the row, the cell, term, attempt, sha256 of what was signed."""
_CRC = struct.Struct(">I")
_SIZE = _ROW.size + _CRC.size


class VoteLedger:
    """Votes of one cell grow in (term, attempt). ``path``: two rows, written in turns, so that one
    of them is whole whenever the process or the machine stops; None: kept in memory only. A power
    cut may lose the last second of them: a row is written at once and not flushed, because an epoch
    may take less time than the disk."""

    def __init__(self, path: Path | None = None) -> None:
        self._path, self._file = path, -1
        self._row = (-1, 0, 0, 0, b"")
        """The newest, as it is written."""
        if path is not None:
            with contextlib.suppress(OSError):
                self._row = max(_rows(path.read_bytes()), default=self._row)

    def term(self, cell: CellId) -> int:
        """Of the newest vote; 0 before the first one in this cell."""
        _, last_cell, term, *_ = self._row
        return term if last_cell == _number(cell) else 0

    def cast(self, cell: CellId, term: int, attempt: int, said: bytes) -> None:
        """This is about to be signed. Raises Refused for what is older than the last vote, or says
        something else of the same attempt."""
        new, last = (_number(cell), term, attempt, hashlib.sha256(said).digest()), self._row[1:]
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
        """A disk that is full or gone stops nobody: the vote is remembered in memory then."""
        if self._path is None:
            return
        row = _ROW.pack(*self._row)
        with contextlib.suppress(OSError):
            if self._file < 0:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            os.pwrite(self._file, row + _CRC.pack(zlib.crc32(row)), self._row[0] % 2 * _SIZE)


def _rows(raw: bytes) -> Iterator[tuple[int, int, int, int, bytes]]:
    """Those of a file that are whole."""
    for row in (raw[i : i + _SIZE] for i in range(0, 2 * _SIZE, _SIZE)):
        if len(row) == _SIZE and zlib.crc32(row[: _ROW.size]) == _CRC.unpack(row[-4:])[0]:
            yield _ROW.unpack(row[: _ROW.size])


def _number(cell: CellId) -> int:
    return int(cell or "0", 16)
