"""Signs that somebody uses this machine: keyboard and mouse, other programs on the GPU, other load.

Enters: access times of terminals, logind's sessions, NVML's list of processes, the counters of
processor time. Leaves: a :class:`Usage`, and a sentence about the measured signs. Never: what was
typed, or a window's title. Everything blocks for some milliseconds.

* **Terminals**: the access time of ``/dev/tty*`` and ``/dev/pts/*``, as ``w`` shows it. The kernel
  sets it when a program reads what was typed, to within 8 seconds.
* **Desktops**: logind's IdleHint of graphical sessions. A desktop sets it some minutes after the
  last key or mouse movement, so those minutes come on top; until then the session counts as in use.
* **The GPU**: processes that compute on an NVIDIA GPU (NVML), without this daemon and its children
  and without other daemons of tutti. Programs that only draw do not count.
* **Load**: processor time of all programs but those with a raised niceness, which give way anyway,
  less this daemon's and its children's. Other daemons of tutti are such programs by default.

Device files under ``/dev/input`` are not asked: Linux sets no time on them, and reading them needs
rights that a daemon should not have.
"""

import contextlib
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

LOGIND_S = 2.0
"""Longest wait for an answer of logind, in seconds."""
GRAPHICAL = ("x11", "wayland", "mir")
_TERMINAL = re.compile(r"tty[1-9][0-9]*|[0-9]+")
_OURS = re.compile(r"(^|/)(tutti|tutti\.py|cli\.py)$")


@dataclass(frozen=True, slots=True)
class Usage:
    """Signs of use, as in :class:`node.availability.machine.Sampled`."""

    input_s: float | None = None
    gpu: str = ""
    load: float | None = None


def _ask(words: Sequence[str]) -> str:
    """Output of a program; "" if there is none or it fails."""
    try:
        done = subprocess.run(
            words, capture_output=True, text=True, timeout=LOGIND_S, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    if done.returncode:
        return ""
    return done.stdout


class UsageMeter:
    """Measures the signs of use. ``idle``: keyboard, mouse and GPU count; ``load``: other load
    does. ``devices``: the directory of the terminals; ``ask`` runs a program for its output."""

    def __init__(
        self,
        *,
        idle: bool,
        load: bool,
        devices: Path = Path("/dev"),
        ask: Callable[[Sequence[str]], str] = _ask,
    ) -> None:
        self._idle = idle
        self._load = load
        self._devices = devices
        self._run = ask
        self._logind = idle and shutil.which("loginctl") is not None
        self._gpus = idle and _nvml()
        self._times: tuple[float, float, float] | None = None
        """Seconds of all other programs, their own time and this daemon's, at the last look."""

    def sources(self) -> str:
        """The signs that can be measured on this machine, for people; empty for none."""
        found: list[str] = []
        if self._idle:
            found.append("terminals (access times, as w shows them)")
            if self._logind:
                found.append("desktop sessions (logind's idle hint)")
            if self._gpus:
                found.append("programs that compute on the GPU (NVML)")
        if self._load:
            found.append("load of other programs (without those with a raised niceness)")
        return ", ".join(found)

    def read(self) -> Usage:
        """Look at everything that counts. The first look knows no load."""
        input_s = None
        gpu = ""
        load = None
        if self._idle:
            input_s = self._input_s()
        if self._gpus:
            gpu = other_on_gpu()
        if self._load:
            load = self._other_load()
        return Usage(input_s, gpu, load)

    def _input_s(self) -> float | None:
        """Seconds since the last sign of a person; None where there was none."""
        wall = time.time()
        found = [max(0.0, wall - at) for at in _terminal_times(self._devices)]
        if self._logind:
            found += self._desktops()
        return min(found, default=None)

    def _desktops(self) -> list[float]:
        listed = self._run(("loginctl", "list-sessions", "--no-legend", "--no-pager"))
        names = [line.split()[0] for line in listed.splitlines() if line.split()]
        if not names:
            return []
        names_of = ("Type", "Class", "State", "IdleHint", "IdleSinceHint")
        wanted = tuple(word for name in names_of for word in ("-p", name))
        return idle_seconds(self._run(("loginctl", "show-session", *names, *wanted)), time.time())

    def _other_load(self) -> float | None:
        """Share of the cores that others kept busy since the last look."""
        before = self._times
        now = time.monotonic()
        all_s = busy_s()
        own_s = own_cpu_s()
        self._times = now, all_s, own_s
        if before is None or now <= before[0]:
            return None
        others = (all_s - before[1]) - max(0.0, own_s - before[2])
        return max(0.0, others) / (now - before[0]) / (os.cpu_count() or 1)


def idle_seconds(sessions: str, wall: float) -> list[float]:
    """Seconds without input of each graphical session, from ``loginctl show-session``. A session
    that does not say that it is idle is in use. ``wall``: Unix seconds now."""
    found: list[float] = []
    for block in sessions.split("\n\n"):
        said: Mapping[str, str] = dict(
            line.split("=", 1) for line in block.splitlines() if "=" in line
        )
        # A login screen has a session without a person, and programs may outlive a closed one.
        there = said.get("Class", "user").startswith("user") and said.get("State") != "closing"
        if said.get("Type") not in GRAPHICAL or not there:
            continue
        since = said.get("IdleSinceHint", "")
        if said.get("IdleHint") == "yes" and since.isascii() and since.isdigit():
            found.append(max(0.0, wall - int(since) / 1e6))
        else:
            found.append(0.0)
    return found


def _terminal_times(devices: Path) -> Iterator[float]:
    """Access times of the terminals, Unix seconds."""
    for folder in (devices, devices / "pts"):
        with contextlib.suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if _TERMINAL.fullmatch(entry.name):
                    with contextlib.suppress(OSError):
                        yield entry.stat().st_atime


def busy_s() -> float:
    """Seconds of processor time of all programs of this machine since its start, without those
    with a raised niceness where the system counts them apart."""
    times = psutil.cpu_times()
    return times.user + times.system + getattr(times, "irq", 0.0) + getattr(times, "softirq", 0.0)


def own_cpu_s() -> float:
    """The share of this process and its living children in :func:`busy_s`."""
    total = 0.0
    own = psutil.Process()
    for process in (own, *own.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            times = process.cpu_times()
            total += times.system
            if process.nice() <= 0:
                total += times.user
    return total


def _nvml() -> bool:
    """Return True if NVML is here, and lists processes of an NVIDIA GPU."""
    try:
        import pynvml

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetCount() > 0
    except Exception:  # noqa: BLE001 - no library, no driver, no GPU: there is nothing to see
        return False


def other_on_gpu() -> str:
    """A program that computes on a GPU of this machine beside tutti, as "NAME, pid N"; empty for
    none. Processes of another namespace, which have no name here, are left out: one of them may be
    this daemon."""
    import pynvml

    own = {os.getpid(), *(p.pid for p in psutil.Process().children(recursive=True))}
    count = 0
    # The driver may be replaced while this runs.
    with contextlib.suppress(pynvml.NVMLError):
        count = pynvml.nvmlDeviceGetCount()
    for index in range(count):
        found: list[int] = []
        with contextlib.suppress(pynvml.NVMLError):
            device = pynvml.nvmlDeviceGetHandleByIndex(index)
            found = [p.pid for p in pynvml.nvmlDeviceGetComputeRunningProcesses(device)]
        for pid in found:
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                words = process.cmdline()[:4]
                if pid not in own and not any(_OURS.search(word) for word in words):
                    return f"{process.name()[:40]}, pid {pid}"
    return ""
