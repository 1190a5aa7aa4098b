"""Main memory that each daemon of one user on one machine plans to take, so that all of them share
the machine instead of each counting all of it.

A daemon's pledge is a small file in a private directory. The daemon keeps the file locked while it
lives, so a pledge ends with its process, however that ends. A daemon that cannot write its pledge
works all the same: others see none of its memory.
"""

import contextlib
import fcntl
import hashlib
import math
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psutil

from node.core.memory import of_files, resident
from node.core.numbers import whole_number
from node.telemetry.resources import left_by

LOCK = "lock"
WAIT_S = 10.0
"""Longest wait for another daemon that is reading and writing pledges, in seconds."""
LOOK_S = 0.02
RENEW_S = 3600.0
"""Seconds between two renewals of a pledge."""
COUNTED_S = 5.0
"""Seconds for which a count of daemons holds."""
MOST_BYTES = 64
"""Length of a pledge, which is filled up with spaces."""


class Pledges:
    """The pledges on this machine, as the daemon of ``home`` sees them. ``folder``: their
    directory."""

    def __init__(self, home: Path, folder: Path | None = None) -> None:
        self.folder = folder or Path(f"/tmp/tutti-{os.getuid()}-memory")
        self._name = hashlib.sha256(os.fsencode(home.absolute())).hexdigest()[:16]
        self._own: IO[bytes] | None = None
        self._alone = False
        self._counted = 1
        self._counted_at = -math.inf
        """Monotonic time of the last count."""

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Keep other daemons from reading and writing pledges until this one has decided. Blocks
        for up to :data:`WAIT_S` seconds, unless this one is inside already."""
        if self._alone:
            yield
            return
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError):
                self._prepare()
                lock = held.enter_context(open(self.folder / LOCK, "ab"))
                deadline = time.monotonic() + WAIT_S
                while not _locked(lock) and time.monotonic() < deadline:
                    time.sleep(LOOK_S)
            self._alone = True
            held.callback(setattr, self, "_alone", False)
            yield

    def others(self) -> int:
        """Bytes of main memory that other daemons take from this one. A daemon counts with its
        pledge, or with what it has in memory if that is more, without libraries, which this daemon
        has too. Of the limit of a control group only daemons inside of it take something. Removes
        pledges of daemons that have ended. Blocks as :meth:`alone`."""
        found: dict[int, int] = {}
        # An unfinished pledge looks like the pledge of a daemon that has ended.
        with self.alone(), contextlib.suppress(OSError):
            self._prepare()
            for path in self.folder.iterdir():
                if path.name not in (LOCK, self._name) and (pledge := _pledged(path)):
                    pid, nbytes = pledge
                    found[pid] = found.get(pid, 0) + nbytes
        return left_by(found)

    def count(self) -> int:
        """Number of living daemons of this machine that have a pledge, this one included. Reads
        without locks, so that nobody waits."""
        living = {os.getpid()}
        paths = list[Path]()
        with contextlib.suppress(OSError):
            self._prepare()
            paths += self.folder.iterdir()
        for path in paths:
            # Its daemon may end now; no process has a number that the system cannot hold.
            with contextlib.suppress(OSError, OverflowError):
                with path.open(encoding="ascii", errors="replace") as file:
                    pid = whole_number(file.read(MOST_BYTES).partition(" ")[0])
                if pid and psutil.pid_exists(pid):
                    living.add(pid)
        return len(living)

    def lately(self) -> int:
        """The last :meth:`count`, at most :data:`COUNTED_S` seconds old."""
        now = time.monotonic()
        if now - self._counted_at > COUNTED_S:
            self._counted = self.count()
            self._counted_at = now
        return self._counted

    def pledge(self, nbytes: int) -> None:
        """Tell the other daemons that this one takes ``nbytes`` at most, without its libraries. The
        first pledge blocks as :meth:`alone`."""
        with contextlib.suppress(OSError):
            if self._own is None:
                with self.alone():
                    self._own = self._opened()
            if self._own is None:
                return
            # One write of always the same length: a reader sees the old number or the new one.
            written = f"{os.getpid()} {nbytes}".ljust(MOST_BYTES)
            os.pwrite(self._own.fileno(), written.encode("ascii"), 0)

    def _opened(self) -> IO[bytes] | None:
        """The file of the own pledge, locked; None where another process of this home has it.
        Raises OSError."""
        self._prepare()
        own = open(os.open(self.folder / self._name, os.O_RDWR | os.O_CREAT, 0o600), "r+b")
        if _locked(own):
            return own
        own.close()
        return None

    def renew(self) -> None:
        """Mark the pledge as in use: cleaners of /tmp remove files that have not changed for
        days."""
        if self._own is not None:
            with contextlib.suppress(OSError):
                os.utime(self._own.fileno())

    def close(self) -> None:
        """End the pledge. Safe to call twice."""
        if self._own is not None:
            with contextlib.suppress(OSError):
                os.unlink(self.folder / self._name)
            self._own.close()
            self._own = None

    def _prepare(self) -> None:
        """Make the directory. Raises OSError if it is not a private one of this user."""
        with contextlib.suppress(FileExistsError):
            self.folder.mkdir(mode=0o700)
        seen = self.folder.lstat()
        if not stat.S_ISDIR(seen.st_mode) or seen.st_uid != os.getuid() or seen.st_mode & 0o077:
            raise OSError(f"{self.folder} is not a private directory")


def _pledged(path: Path) -> tuple[int, int] | None:
    """Process and bytes of one pledge; None, and the file is gone, if its daemon has ended."""
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            if _locked(file, fcntl.LOCK_SH):
                path.unlink()
                return None
            pid, _, nbytes = file.read(MOST_BYTES).strip().partition(" ")
    except OSError:
        return None
    process = whole_number(pid) or 0
    taken = 0
    if process:
        taken = resident(process) - of_files(process)
    return process, max(whole_number(nbytes) or 0, taken)


def _locked(file: IO[str] | IO[bytes], kind: int = fcntl.LOCK_EX) -> bool:
    """Try to lock a file, until it is closed. Return True if it is locked now."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
