"""Tokenised text on disk, mapped into memory, named by a hash of where it came from: made once, read by every later start."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from node.core.errors import OutOfResources, UsageFault
from node.data.tokenizer import Tokenizer

_FORMAT = 1


def cached(home: Path, source: str, documents: Iterator[bytes], tokenizer: Tokenizer, end: int | None) -> np.ndarray:
    """Token ids of ``documents``, each followed by the id ``end`` unless that is None; read-only map of a file under
    ``home/data``, which is written first when it is not there. ``source`` names the documents' bytes.

    Two daemons may do this at once: each writes its own file and the last rename wins, with equal content.
    Raises OutOfResources when the disk is full, UsageFault when the directory cannot be written.
    """
    key = hashlib.sha256(json.dumps([_FORMAT, source, tokenizer.digest, end]).encode()).hexdigest()
    # An end mark of a byte tokenizer is the id 257, so that one byte is too narrow even there.
    dtype = np.dtype("<u2") if tokenizer.vocab <= 1 << 16 else np.dtype("<u4")
    path = home / "data" / f"{key[:32]}.{dtype.name}"
    if not path.is_file():
        try:
            _write(path, documents, tokenizer, end, dtype)
        except OSError as e:
            if e.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OutOfResources(f"no space to keep tokenised text in {path.parent}", "free some space") from e
            raise UsageFault(f"cannot keep tokenised text in {path.parent}: {e}", "choose a home you may write to") from e
    return np.memmap(path, dtype=dtype, mode="r") if path.stat().st_size else np.empty(0, dtype=dtype)


def _write(path: Path, documents: Iterator[bytes], tokenizer: Tokenizer, end: int | None, dtype: np.dtype) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    mark = b"" if end is None else np.asarray([end], dtype=dtype).tobytes()
    try:
        with open(staged, "xb") as file:
            for document in documents:
                file.write(tokenizer.encode(document).astype(dtype).tobytes())
                file.write(mark)
            file.flush()
            os.fsync(file.fileno())
        os.replace(staged, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            staged.unlink()
