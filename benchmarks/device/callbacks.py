"""Forked daemons that measure every callback of their event loop.

The process of :class:`testbed.daemons.forks.Forks` with this module as its program. A daemon runs
on asyncio's own loop instead of uvloop, whose callbacks cannot be reached from Python, and appends
a line to ``log/callbacks.jsonl`` in its home for every callback that took :data:`TOLD_S` or more
processor time of the loop's thread: ``{at, seconds, what, where, garbage_s, faults, switches}``.
``at`` is Unix time, ``what`` the callback, ``where`` the functions that were seen running in it,
``garbage_s`` the part of it that collected garbage, ``faults`` the pages that the system had to
find for it, ``switches`` how often another thread took its processor.

Time in which the thread waits for a processor or for another thread is nobody's callback, so it
does not count.
"""

import asyncio
import gc
import json
import resource
import signal
import sys
import threading
import time
from collections.abc import Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.shared.loops import read_lines, run_daemons, running_code
from testbed.daemons import forks

MODULE = "benchmarks.device.callbacks"
TOLD_S = 0.001
SEEN_S = 0.0015
"""Processor seconds of a callback after which the running code is looked up."""
LOOK_S = 0.001
FILE = Path("log", "callbacks.jsonl")


@dataclass(frozen=True)
class Turn:
    """One callback of an event loop."""

    at: float
    seconds: float
    what: str
    where: str
    garbage_s: float = 0.0
    faults: int = 0
    switches: int = 0


def read_turns(home: Path, since: float, until: float) -> list[Turn]:
    """The callbacks between two Unix times that the daemon of this home has told, longest first."""
    within = [turn for turn in read_lines(home / FILE, Turn) if since <= turn.at <= until]
    return sorted(within, key=lambda turn: -turn.seconds)


class CallbackMeter:
    """Measures the callbacks of asyncio loops of this process, and writes long ones to ``file``."""

    def __init__(self, file: Path, told_s: float = TOLD_S) -> None:
        self._out = file.open("a", buffering=1)
        self._told_s = told_s
        self._began = 0.0
        self._where = ""
        self._collecting = 0.0
        self._garbage_s = 0.0

    def install(self) -> None:
        """Put the meter around every callback, and a timer that looks at long ones."""
        self._main = threading.get_ident()
        gc.callbacks.append(self._collects)
        run = asyncio.Handle._run  # pyright: ignore[reportPrivateUsage]
        meter = self

        def measured(handle: asyncio.Handle) -> None:
            meter.run(run, handle)

        asyncio.Handle._run = measured  # pyright: ignore
        signal.signal(signal.SIGPROF, self._look)
        signal.siginterrupt(signal.SIGPROF, False)
        signal.setitimer(signal.ITIMER_PROF, LOOK_S, LOOK_S)

    def run(self, run: Any, handle: asyncio.Handle) -> None:
        """Run one callback."""
        callback = getattr(handle, "_callback", None)
        self._where = ""
        self._garbage_s = 0.0
        before = resource.getrusage(resource.RUSAGE_THREAD)
        self._began = time.thread_time()
        run(handle)
        seconds = time.thread_time() - self._began
        self._began = 0.0
        if seconds >= self._told_s:
            after = resource.getrusage(resource.RUSAGE_THREAD)
            turn = Turn(
                time.time(),
                round(seconds, 5),
                named(callback),
                self._where,
                round(self._garbage_s, 5),
                after.ru_minflt + after.ru_majflt - before.ru_minflt - before.ru_majflt,
                after.ru_nivcsw - before.ru_nivcsw,
            )
            self._out.write(json.dumps(asdict(turn)) + "\n")

    def _collects(self, phase: str, info: dict[str, int]) -> None:
        if threading.get_ident() != self._main:
            return
        if phase == "start":
            self._collecting = time.thread_time()
            return
        seconds = time.thread_time() - self._collecting
        self._garbage_s += seconds
        if seconds >= SEEN_S:
            searched = len(gc.get_objects(info["generation"]))
            self._where = f"garbage of generation {info['generation']}, {searched} objects left"

    def _look(self, number: int, frame: FrameType | None) -> None:
        if self._began and not self._where and time.thread_time() - self._began > SEEN_S:
            self._where = running_code(frame, ours=4, libraries=2)


def named(callback: Any) -> str:
    """The function of a callback, or the coroutine of the task that it goes on with."""
    task = getattr(callback, "__self__", None)
    if isinstance(task, asyncio.Task):
        coroutine: Any = task.get_coro()
        return f"task {getattr(coroutine, '__qualname__', coroutine)}"
    return str(getattr(callback, "__qualname__", callback))[:120]


def watch_every_daemon() -> None:
    """Measure the callbacks of every daemon that this process becomes."""

    def measured(file: Path, body: Coroutine[Any, Any, Any], **options: Any) -> Any:
        CallbackMeter(file).install()
        with asyncio.Runner(loop_factory=asyncio.SelectorEventLoop, **options) as runner:
            return runner.run(body)

    run_daemons(FILE, measured)


if __name__ == "__main__":
    watch_every_daemon()
    sys.exit(forks.main())
