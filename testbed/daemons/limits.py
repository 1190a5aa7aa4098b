"""Faults that need the machine: a process that is paused, starved or short of memory, and a disk
that is full.

Memory and processor time are limited with control groups (version 1 or 2), the disk is a small
tmpfs. Everything made here is taken away by :meth:`Limits.close`, and needs root.
"""

import contextlib
import errno
import os
import subprocess
import time
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
PERIOD_US = 100_000


class Unavailable(Exception):
    """This machine or this user cannot do that."""


class Limits:
    """Control groups and small disks of one benchmark."""

    def __init__(self) -> None:
        self._groups: list[Path] = []
        self._disks: list[Path] = []

    def memory(self, pid: int, limit: int) -> None:
        """No more than ``limit`` bytes for what the process asks for from now on; the kernel kills
        it then. Raises Unavailable."""
        group, old = self._group("memory", pid)
        self._write(group / ("memory.limit_in_bytes" if old else "memory.max"), str(limit))
        self._write(group / "cgroup.procs", str(pid))

    def processor(self, pid: int, share: float) -> None:
        """At most this share of one core. Raises Unavailable."""
        group, old = self._group("cpu", pid)
        quota = max(1000, int(PERIOD_US * share))
        if old:
            self._write(group / "cpu.cfs_period_us", str(PERIOD_US))
            self._write(group / "cpu.cfs_quota_us", str(quota))
        else:
            self._write(group / "cpu.max", f"{quota} {PERIOD_US}")
        self._write(group / "cgroup.procs", str(pid))

    def small_disk(self, place: Path, size: str) -> None:
        """A tmpfs there. Raises Unavailable."""
        place.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise Unavailable(f"no small disk: {done.stderr.strip()}")
        self._disks.append(place)

    def lift(self) -> None:
        """Remove the control groups; processes in them go back to the parent group."""
        for group in self._groups:
            with contextlib.suppress(OSError):
                for pid in (group / "cgroup.procs").read_text().split():
                    with contextlib.suppress(OSError):
                        (group.parent / "cgroup.procs").write_text(pid)
            for _ in range(20):
                with contextlib.suppress(OSError):
                    group.rmdir()
                if not group.exists():
                    break
                time.sleep(0.1)
        self._groups = [g for g in self._groups if g.exists()]

    def close(self) -> None:
        """Groups and disks away. Safe to call twice; processes that use a disk must have ended."""
        self.lift()
        for place in self._disks:
            subprocess.run(["umount", "-l", str(place)], capture_output=True, check=False)
        self._disks = []

    def _group(self, controller: str, pid: int) -> tuple[Path, bool]:
        old = (GROUPS / controller).is_dir()
        root = GROUPS / controller if old else GROUPS
        if not old and controller not in _read(GROUPS / "cgroup.controllers").split():
            raise Unavailable(f"no control group for {controller}")
        group = root / f"tutti-{os.getpid()}-{controller}-{pid}"
        try:
            group.mkdir(exist_ok=True)
            if not old:
                (GROUPS / "cgroup.subtree_control").write_text(f"+{controller}")
        except OSError as e:
            raise Unavailable(f"no control group for {controller}: {e.strerror}") from e
        if group not in self._groups:
            self._groups.append(group)
        return group, old

    @staticmethod
    def _write(place: Path, value: str) -> None:
        try:
            place.write_text(value)
        except OSError as e:
            raise Unavailable(f"{place}: {e.strerror}") from e


def fill(place: Path) -> Path:
    """A file that takes all the room left on a small disk."""
    junk = place / "junk"
    with junk.open("wb", buffering=0) as f:
        try:
            while True:
                f.write(bytes(4096))
        except OSError as e:
            if e.errno != errno.ENOSPC:
                raise
    return junk


def _read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text()
    return ""
