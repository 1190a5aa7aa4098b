"""Token ids in a file, read when they are asked for.

The file is not mapped: where a mapped one is cut while it is used, the process ends by SIGBUS.
"""

from __future__ import annotations

import os
import weakref
from copy import copy
from pathlib import Path

import numpy as np


class TokenFile:
    """An array [n] of ``dtype``, the first ``count`` numbers of a file that stays open as long as
    the array or a part of it is kept. A slice is a part; ``numpy.asarray`` reads it.

    Raises OSError when the file cannot be opened, and when it is read but no longer that long.
    """

    def __init__(self, path: Path, dtype: np.dtype, count: int) -> None:
        self.dtype, self._path, self._first, self._count = dtype, path, 0, count
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._whole = self
        weakref.finalize(self, os.close, self._fd)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, where: slice) -> TokenFile:
        start, stop, step = where.indices(self._count)
        if step != 1:
            raise ValueError(f"a part of a file in steps of {step}")
        part = copy(self)
        part._first, part._count = self._first + start, max(0, stop - start)
        return part

    def __array__(self, dtype: np.dtype | None = None, copy: bool | None = None) -> np.ndarray:
        size = self.dtype.itemsize
        found = bytearray()
        while left := self._count * size - len(found):
            piece = os.pread(self._fd, left, self._first * size + len(found))
            if not piece:
                raise OSError(f"{self._path} was cut while it was in use")
            found += piece
        return np.frombuffer(found, self.dtype).astype(dtype or self.dtype, copy=False)
