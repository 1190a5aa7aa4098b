"""A directory of our own for unix sockets. A daemon that was killed leaves its one behind; the next
to start sweeps it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

SOCKET_PATH = 104
"""Longest unix socket path on every system; the names in our directory need 30 of it."""
_PREFIX, _LOCK, _NEW = "tutti-rt-", "lock", "lock.new"


class RuntimeDirectory:
    """``path`` is 0700 and exists until :meth:`close` or the sweep of a later daemon after our
    death."""

    def __init__(self) -> None:
        made = tempfile.mkdtemp(prefix=_PREFIX)
        if len(made) > SOCKET_PATH - 30:
            os.rmdir(made)
            made = tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp")
        self.path = Path(made)
        # The lock goes when its holder does, however that ends, so a directory that can be locked
        # belongs to nobody. A child process may not inherit it: os.open makes descriptors that are
        # closed on exec. It gets its name once it is locked: another daemon that starts meanwhile
        # would sweep it.
        self._lock = os.open(self.path / _NEW, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        os.rename(self.path / _NEW, self.path / _LOCK)
        _sweep(self.path.parent)

    def close(self) -> None:
        """Remove the directory. Safe to call twice."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _sweep(directory: Path) -> None:
    for other in directory.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if not other.is_symlink() and other.stat().st_uid == os.getuid():
                # Without a lock file it is just being made, or none of ours.
                lock = os.open(other / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(other, ignore_errors=True)
                finally:
                    os.close(lock)
