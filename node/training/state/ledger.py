"""The newest vote of this peer, kept where it outlives the process: who is started again must not
vote a second time on what it has voted on."""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
import zlib
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
        self._path, self._file, self._count = path, -1, 0
        self._cell, self._last = 0, (0, 0)
        self._said = b""
        if path is not None:
            with contextlib.suppress(OSError):
                self._read(path.read_bytes())

    def term(self, cell: CellId) -> int:
        """Of the newest vote; 0 before the first one in this cell."""
        return self._last[0] if _number(cell) == self._cell else 0

    def cast(self, cell: CellId, term: int, attempt: int, said: bytes) -> None:
        """This is about to be signed. Raises Refused for what is older than the last vote, or says
        something else of the same attempt."""
        at, name = (term, attempt), hashlib.sha256(said).digest()
        if _number(cell) != self._cell:
            self._cell, self._last = _number(cell), (0, 0)
        if at < self._last or (at == self._last and name != self._said):
            raise Refused(
                f"a vote in attempt {attempt} of term {term} after one in attempt "
                f"{self._last[1]} of term {self._last[0]}"
            )
        if at != self._last:
            self._last, self._said = at, name
            self._write()

    def _read(self, raw: bytes) -> None:
        for row in (raw[i : i + _SIZE] for i in range(0, 2 * _SIZE, _SIZE)):
            if len(row) == _SIZE and zlib.crc32(row[: _ROW.size]) == _CRC.unpack(row[-4:])[0]:
                count, cell, term, attempt, said = _ROW.unpack(row[: _ROW.size])
                if count >= self._count:
                    self._count, self._cell = count, cell
                    self._last, self._said = (term, attempt), said

    def _write(self) -> None:
        """A disk that is full or gone stops nobody: the vote is remembered in memory then."""
        if self._path is None:
            return
        self._count += 1
        row = _ROW.pack(self._count, self._cell, *self._last, self._said)
        with contextlib.suppress(OSError):
            if self._file < 0:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            os.pwrite(self._file, row + _CRC.pack(zlib.crc32(row)), self._count % 2 * _SIZE)


def _number(cell: CellId) -> int:
    return int(cell or "0", 16)
