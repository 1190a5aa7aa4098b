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
_PREFIX, _LOCK = "tutti-rt-", "lock"


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
        # closed on exec.
        self._lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        _sweep(self.path)

    def close(self) -> None:
        """Remove the directory. Safe to call twice."""
        if self._lock >= 0:
            shutil.rmtree(self.path, ignore_errors=True)
            os.close(self._lock)
            self._lock = -1


def _sweep(mine: Path) -> None:
    for other in mine.parent.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if other == mine or other.is_symlink() or other.stat().st_uid != os.getuid():
                continue
            # Without a lock file it is just being made, or none of ours.
            lock = os.open(other / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(other, ignore_errors=True)
            finally:
                os.close(lock)
