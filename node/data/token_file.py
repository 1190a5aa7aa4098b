"""Token ids in files that are read on demand, and files of tokenised text, made once and read by
every later start.

A file is not mapped: if a mapped file is cut while it is in use, the process ends by SIGBUS.

The file of tokenised text is named by a hash of its origin. The sha256 of its ids stands behind
them: a file that was cut or changed since is made anew, for errors in it would be trained on. It is
written under a hidden name. A process that is killed meanwhile leaves that behind, and the next one
that wants tokenised text of the same home removes it.
"""

import contextlib
import hashlib
import json
import logging
import os
import re
import secrets
import weakref
from collections.abc import Iterable
from copy import copy
from pathlib import Path

import numpy as np

from node.core.errors import UsageFault, writing
from node.core.home import new_file, remove_stale
from node.core.interrupts import raising
from node.data.marks import Conversation
from node.data.tokenizer import Tokenizer, document_ids

_FORMAT = 2
SUM = hashlib.sha256().digest_size
"""Bytes of the sum at the end of a file."""
_STAGED = re.compile(r"\.[0-9a-f]{32}\.[a-z0-9]+\.[0-9a-f]{8}")
"""Hidden names of files that are being written."""
_log = logging.getLogger("tutti.data")


class TokenFile:
    """An array [n] of ``dtype``, the first ``count`` numbers of a file that stays open as long as
    the array or a part of it is kept. A slice is a part; ``numpy.asarray`` reads it.

    Raises OSError when the file cannot be opened, and when it is read but no longer that long.
    """

    def __init__(self, path: Path, dtype: np.dtype, count: int) -> None:
        self.dtype = dtype
        self._path = path
        self._first = 0
        self._count = count
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._whole = self
        weakref.finalize(self, os.close, self._fd)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, where: slice) -> "TokenFile":
        start, stop, step = where.indices(self._count)
        if step != 1:
            raise ValueError(f"a part of a file in steps of {step}")
        part = copy(self)
        part._first = self._first + start
        part._count = max(0, stop - start)
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


Documents = Iterable[tuple[bytes | Conversation, bool]]
"""Documents or parts of one, and True for each that the end of a document follows."""


def cached(
    home: Path,
    source: str,
    documents: Documents,
    tokenizer: Tokenizer,
    end: int | None,
    *,
    marked: bool = False,
) -> TokenFile:
    """Token ids of ``documents``, each followed by the id ``end`` unless that is None; a file under
    ``home/data``, which is written first when it is not there. ``source`` names the bytes of the
    documents. ``marked``: the documents are conversations, and their ids carry marks.

    Two daemons may do this at once: each writes its own file and the last rename wins, with equal
    content. Raises OutOfResources when the disk is full, UsageFault when the directory cannot be
    written.
    """
    key = hashlib.sha256(json.dumps([_FORMAT, source, tokenizer.digest, end]).encode()).hexdigest()
    dtype = id_type(tokenizer, marked)
    path = home / "data" / f"{key[:32]}.{dtype.name}"
    _remove_left(path.parent)
    if not whole(path):
        if path.exists():
            _log.warning("the tokenised text %s is damaged and made anew", path)
        what = f"tokenised text in {path.parent}"
        with writing(what, "choose a home you may write to", UsageFault):
            _write(path, documents, tokenizer, end, dtype)
    return TokenFile(path, dtype, (path.stat().st_size - SUM) // dtype.itemsize)


def id_type(tokenizer: Tokenizer, marked: bool = False) -> np.dtype:
    """Type of the ids in a file. An end mark of a byte tokenizer is the id 257, so that one byte is
    too narrow even there; marks need 32 bits."""
    if tokenizer.vocab <= 1 << 16 and not marked:
        return np.dtype("<u2")
    return np.dtype("<u4")


def with_sum(ids: bytes) -> bytes:
    """The content of a file of ids."""
    return ids + hashlib.sha256(ids).digest()


def whole(path: Path) -> bool:
    """Return True if a file was written to its end and not changed since; reads all of it."""
    found = hashlib.sha256()
    try:
        with open(path, "rb") as file:
            left = os.fstat(file.fileno()).st_size - SUM
            while left > 0 and (piece := file.read(min(left, 1 << 22))):
                found.update(piece)
                left -= len(piece)
            return left == 0 and file.read(SUM + 1) == found.digest()
    except OSError:
        return False


def _remove_left(directory: Path) -> None:
    """Remove what processes that were killed have left of files that they wrote."""
    with contextlib.suppress(OSError):  # no directory yet
        for name in filter(_STAGED.fullmatch, os.listdir(directory)):
            remove_stale(directory / name)


def _write(
    path: Path, documents: Documents, tokenizer: Tokenizer, end: int | None, dtype: np.dtype
) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    total = hashlib.sha256()
    with raising():
        try:
            with open(new_file(staged), "wb") as file:
                for document, ended in documents:
                    ids = document_ids(document, tokenizer, end if ended else None)
                    piece = ids.astype(dtype).tobytes()
                    file.write(piece)
                    total.update(piece)
                file.write(total.digest())
                file.flush()
                os.fsync(file.fileno())
                # Before the file is closed: until then it is not taken for one that was left.
                os.replace(staged, path)
        finally:
            staged.unlink(missing_ok=True)
