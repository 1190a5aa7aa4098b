"""Memory and processor cores that this process may use: the machine's, within the limits of control
groups and of the process's affinity.

Enters: /proc and the control groups, versions 1 and 2, at every level from this process's group to
the topmost one that is visible. Leaves: bytes and a number of cores. Never: a change of a limit.
"""

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import psutil

from node.core.numbers import whole_number

ROOT = Path("/")


@dataclass(frozen=True)
class GroupMemory:
    """Memory limit of one control group. ``used``: bytes of the group's processes, without cached
    files that were not read lately."""

    limit: int
    used: int
    place: Path = field(default=Path(), compare=False)
    """The group's directory."""


def memory_total() -> int:
    """Bytes of main memory that this process and the processes it shares limits with may use: the
    machine's, or the lowest limit of a control group."""
    limits = [group.limit for group in memory_limits()]
    return min([psutil.virtual_memory().total, *limits])


def memory_free() -> int:
    """Bytes of main memory that can still be taken."""
    left = [group.limit - group.used for group in memory_limits()]
    return max(0, min([psutil.virtual_memory().available, *left]))


def cores() -> int:
    """Processor cores that this process may keep busy, at least 1: the cores of its affinity, and
    no more than the lowest quota of a control group, rounded up."""
    quotas = [math.ceil(quota) for quota in core_quotas()]
    return max(1, min([_allowed_cores(), *quotas]))


@cache
def bf16_units() -> bool:
    """Return True if the processor multiplies numbers in bf16 by instructions of its own. False
    where the system does not list them (as Linux does)."""
    words = set(_text(Path("/proc/cpuinfo")).split())
    return not words.isdisjoint(("avx512_bf16", "amx_bf16", "bf16"))


def memory_limits(root: Path = ROOT) -> list[GroupMemory]:
    """Limits of all control groups of this process that have one. ``root``: the directory under
    which ``proc/self`` and the mount points are."""
    found: list[GroupMemory] = []
    for version, group in _groups("memory", root):
        if version == 2:
            limits = [_number(group / "memory.max"), _number(group / "memory.high")]
            used = _number(group / "memory.current") or 0
            cached = _row(group / "memory.stat", "inactive_file") or 0
        else:
            stat = group / "memory.stat"
            # The second one counts groups above the mount point too.
            limits = [
                _number(group / "memory.limit_in_bytes"),
                _row(stat, "hierarchical_memory_limit"),
            ]
            used = _number(group / "memory.usage_in_bytes") or 0
            cached = _row(stat, "total_inactive_file") or 0
        known = [limit for limit in limits if limit is not None]
        if known:
            found.append(GroupMemory(min(known), max(0, used - cached), group))
    return found


def left_by(others: Mapping[int, int]) -> int:
    """Bytes by which other daemons make :func:`memory_total` less, at least 0. ``others``: bytes
    that each takes, by process. A daemon outside of this process's control group takes nothing of
    the group's limit, only of the machine."""
    total = memory_total()
    taken = [0, sum(others.values()) - (psutil.virtual_memory().total - total)]
    for group in memory_limits():
        inside = sum(n for pid, n in others.items() if group.place in memory_groups(pid))
        taken.append(inside - (group.limit - total))
    return max(taken)


def memory_groups(pid: int, root: Path = ROOT) -> set[Path]:
    """Directories of all control groups of a process for its memory. ``root`` as for
    :func:`memory_limits`."""
    return {group for _, group in _groups("memory", root, str(pid))}


def core_quotas(root: Path = ROOT) -> list[float]:
    """Processor time of every control group of this process that is limited, in cores. ``root`` as
    for :func:`memory_limits`."""
    found: list[float] = []
    for version, group in _groups("cpu", root):
        if version == 2:
            quota, _, period = _text(group / "cpu.max").partition(" ")
        else:
            quota = _text(group / "cpu.cfs_quota_us")
            period = _text(group / "cpu.cfs_period_us")
        quota_us = whole_number(quota)
        period_us = whole_number(period)
        if quota_us and period_us:
            found.append(quota_us / period_us)
    return found


def _allowed_cores() -> int:
    """Cores of this process's affinity, which a control group's cpuset limits too. A system without
    affinity (macOS) allows all."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@dataclass(frozen=True)
class _Mount:
    """A mounted hierarchy of control groups. ``top``: the group that is seen at ``point``."""

    version: int
    top: str
    point: Path


def _groups(controller: str, root: Path, process: str = "self") -> Iterator[tuple[int, Path]]:
    """(version, directory) of each control group of a process for a controller, the innermost
    first. A hybrid system has the controller in version 1 or 2, and is asked for both."""
    ours = _paths(controller, root, process)
    mounts = _mounts(controller, root)
    for version, path in ours.items():
        inside = [m for m in mounts if m.version == version and _within(path, m.top)]
        # In a container without a namespace for groups, the path is the host's and the mount point
        # is the container's own group.
        for mount in inside or [m for m in mounts if m.version == version]:
            below = ""
            if inside:
                below = path.removeprefix(mount.top.rstrip("/"))
            group = mount.point / below.strip("/")
            while True:
                yield version, group
                if group in (mount.point, group.parent):
                    break
                group = group.parent


def _within(path: str, top: str) -> bool:
    return top == "/" or path == top or path.startswith(f"{top}/")


def _paths(controller: str, root: Path, process: str) -> dict[int, str]:
    """A process's group, by version, for a controller."""
    found: dict[int, str] = {}
    for line in _text(root / f"proc/{process}/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        # A path that leaves its namespace ("/../other") is of a group that is not visible here.
        if ".." in path.split("/"):
            path = "/"
        if number == "0" and not controllers:
            found[2] = path
        elif controller in controllers.split(","):
            found[1] = path
    return found


def _mounts(controller: str, root: Path) -> list[_Mount]:
    """Mounted hierarchies of version 2, and of version 1 with the controller (proc(5))."""
    found: list[_Mount] = []
    for line in _text(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        fields = before.split(" ")
        kinds = after.split(" ")
        if len(fields) < 5 or len(kinds) < 3:
            continue
        point = root / _unescaped(fields[4]).lstrip("/")
        if kinds[0] == "cgroup2":
            found.append(_Mount(2, _unescaped(fields[3]), point))
        elif kinds[0] == "cgroup" and controller in kinds[2].split(","):
            found.append(_Mount(1, _unescaped(fields[3]), point))
    return found


def _unescaped(text: str) -> str:
    """A path of mountinfo, which writes a space, a tab, a newline and a backslash in octal."""
    for octal, character in (("040", " "), ("011", "\t"), ("012", "\n"), ("134", "\\")):
        text = text.replace(f"\\{octal}", character)
    return text


def _text(path: Path) -> str:
    """The content of a file, "" where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _number(path: Path) -> int | None:
    """The number in a file; None where there is none. For no limit version 2 writes "max", and
    version 1 a number of 19 digits, which is no number to :func:`whole_number`."""
    return whole_number(_text(path))


def _row(path: Path, name: str) -> int | None:
    """The number in a row "name number" of a file; None where there is no such row."""
    for line in _text(path).splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return whole_number(value.strip())
    return None
