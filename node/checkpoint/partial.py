"""What was already fetched and verified, so that a broken donor, or a restart, costs only what was
under way.

Pieces of tensors are kept by their hash: a name from another peer is never part of a path, and what
is found again is known to be right because it hashes to its own name.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from node.checkpoint.files import directory, local_fault, reading
from node.core.errors import Refused
from node.core.journey import Version
from node.wire.tensors import hash_of

_PIECE = re.compile(r"[0-9a-f]{64}\.(piece|tensor)(\.writing)?")
"""Former versions kept whole tensors, or wrote under another name first."""


class Partial:
    """In memory, and in a ``directory`` of its own when one is given, where it survives a restart.

    ``version`` is what was under way when the last fetch ended early: the next one asks for it
    first.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self.directory = directory
        self._held: dict[bytes, memoryview] = {}
        self.version: Version | None = None

    def find(self, hashed: bytes, into: memoryview) -> bool:
        """Put the piece of this hash, exactly as long as ``into``, there; whether it is here.
        ``into`` stays as it is from then on. Blocks on the disk when the piece is not in memory."""
        held = self._held.get(hashed)
        if held is not None and len(held) == len(into):
            into[:] = held
        elif held is not None or self.directory is None or not _read(self.directory, hashed, into):
            return False
        self._held[hashed] = into  # what it was in before is not kept in memory twice
        return True

    def keep(self, hashed: bytes, piece: memoryview) -> None:
        """Remember a verified piece, which stays as it is. Blocks on the disk; raises
        OutOfResources when it is full. A file that is torn has another hash than its name says."""
        # Two tensors may have the same piece, and arrive at the same time.
        if self._held.setdefault(hashed, piece) is not piece or self.directory is None:
            return
        path = self.directory / _named(hashed)
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            path.unlink(missing_ok=True)  # torn, or a link that leads elsewhere
            path.touch(0o600)
            path.write_bytes(piece)
        except OSError as e:
            with suppress(OSError):
                path.unlink()
            raise local_fault("keep fetched state", self.directory, e) from e

    def only(self, hashes: Collection[bytes]) -> None:
        """Drop what is no part of the state wanted now: pieces of versions that are gone would add
        up. Blocks on the disk."""
        for hashed in self._held.keys() - hashes:
            del self._held[hashed]
        if self.directory is not None:
            wanted = {_named(hashed) for hashed in hashes}
            with suppress(OSError):
                for name in os.listdir(self.directory):
                    if _PIECE.fullmatch(name) and name not in wanted:
                        (self.directory / name).unlink(missing_ok=True)

    def clear(self) -> None:
        """Forget everything: the state is whole, or no longer wanted. Files of other makers in the
        directory stay."""
        self.only(())
        self.version = None
        if self.directory is not None:
            with suppress(OSError):  # not empty: somebody else keeps files there
                self.directory.rmdir()


def _named(hashed: bytes) -> str:
    return f"{hashed.hex()}.piece"


def _read(where: Path, hashed: bytes, into: memoryview) -> bool:
    filled = 0
    try:
        with directory(where) as at, reading(_named(hashed), at) as (fd, size):
            if size != len(into):
                return False
            while filled < size and (got := os.preadv(fd, [into[filled:]], filled)):
                filled += got
    except (OSError, Refused):
        return False
    return hash_of(into) == hashed
