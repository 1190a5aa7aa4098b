"""What was already fetched and verified, so that a broken donor, or a restart, costs only what was
under way.

Tensors are kept by the sha256 of their bytes: a name from another peer is never part of a path, and
what is found again is known to be right because it hashes to its own name.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from node.checkpoint.files import Disk, directory, local_fault, reading
from node.checkpoint.state import WIRE
from node.core.errors import Refused
from node.core.journey import Version
from node.wire.tensors import encode, nbytes_of

_PIECE = re.compile(r"[0-9a-f]{64}\.tensor(\.writing)?")


class Partial:
    """In memory, and in a ``directory`` of its own when one is given, where it survives a restart.

    ``version`` is what was under way when the last fetch ended early: the next one asks for it
    first.
    """

    def __init__(self, directory: Path | str | None = None, *, disk: Disk | None = None) -> None:
        self.directory = None if directory is None else Path(directory)
        self._disk = disk or Disk()
        self._held: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self.version: Version | None = None

    def find(self, sha256: str, shape: Sequence[int]) -> torch.Tensor | None:
        """The fp32 tensor whose bytes hash to ``sha256``, or None. Blocks on the disk when it is
        not in memory."""
        key = sha256, tuple(shape)
        if (
            key not in self._held
            and self.directory is not None
            and (found := _read(self.directory, sha256, key[1])) is not None
        ):
            self._held[key] = found
        return self._held.get(key)

    def keep(self, sha256: str, tensor: torch.Tensor) -> None:
        """Remember a verified fp32 tensor. Blocks on the disk; raises OutOfResources when it is
        full."""
        self._held[sha256, tuple(tensor.shape)] = tensor
        if self.directory is None:
            return
        try:
            self._write(self.directory, f"{sha256}.tensor", encode(tensor, WIRE))
        except OSError as e:
            raise local_fault("keep fetched state", self.directory, e) from e

    def forget(self, sha256: str) -> None:
        """Drop what a lying manifest made us keep."""
        for key in [k for k in self._held if k[0] == sha256]:
            del self._held[key]
        if self.directory is not None:
            (self.directory / f"{sha256}.tensor").unlink(missing_ok=True)

    def only(self, hashes: Collection[str]) -> None:
        """Drop what is no part of the state wanted now: pieces of versions that are gone would add
        up. Blocks on the disk."""
        held = {sha256 for sha256, _ in self._held}
        if self.directory is not None:
            with suppress(OSError):
                held |= {
                    name.partition(".")[0]
                    for name in os.listdir(self.directory)
                    if _PIECE.fullmatch(name)
                }
        for sha256 in held - set(hashes):
            self.forget(sha256)

    def clear(self) -> None:
        """Forget everything: the state is whole, or no longer wanted. Files of other makers in the
        directory stay."""
        self._held.clear()
        self.version = None
        if self.directory is None or not self.directory.is_dir():
            return
        try:
            with directory(self.directory) as at:
                for name in os.listdir(at):
                    if _PIECE.fullmatch(name):
                        self._disk.unlink(name, at)
        except OSError as e:
            raise local_fault("clear fetched state", self.directory, e) from e
        with suppress(OSError):  # not empty: somebody else keeps files there
            self.directory.rmdir()

    def _write(self, where: Path, name: str, data: memoryview) -> None:
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        with directory(where) as at:
            with suppress(FileNotFoundError):
                self._disk.unlink(f"{name}.writing", at)
            fd = self._disk.create(f"{name}.writing", at)
            try:
                self._disk.write(fd, data)
            except OSError:
                self._disk.unlink(f"{name}.writing", at)
                raise
            finally:
                os.close(fd)
            self._disk.rename(f"{name}.writing", name, at)


def _read(where: Path, sha256: str, shape: tuple[int, ...]) -> torch.Tensor | None:
    try:
        with directory(where) as at, reading(f"{sha256}.tensor", at) as (fd, size):
            if size != nbytes_of(shape, WIRE):
                return None
            tensor = torch.empty(shape, dtype=torch.float32)
            view, filled = encode(tensor, WIRE), 0
            while filled < size and (got := os.preadv(fd, [view[filled:]], filled)):
                filled += got
    except (OSError, Refused):
        return None
    return tensor if hashlib.sha256(view).hexdigest() == sha256 else None
