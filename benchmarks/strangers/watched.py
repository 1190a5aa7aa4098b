"""Forked daemons that measure how long their event loop is blocked.

The process of :class:`testbed.daemons.forks.Forks` with this module as its program. A daemon
appends a line to ``log/loop.jsonl`` in its home for every second in which its loop stood still for
:data:`TOLD_S` or more: ``{at, seconds, where}``. ``at`` is Unix time, ``where`` the code that was
seen running.
"""

import asyncio
import json
import sys
import threading
import time
from collections.abc import Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.shared.loops import read_lines, run_daemons, running_code
from testbed.daemons import forks

MODULE = "benchmarks.strangers.watched"
TICK_S = 0.05
TELL_S = 1.0
"""Seconds that one line is about."""
LOOK_S = 0.1
TOLD_S = 0.05
SEEN_S = 0.15
"""Seconds of a block after which the running code is looked up."""
FILE = Path("log", "loop.jsonl")


@dataclass(frozen=True)
class Block:
    """The longest time in one second in which an event loop did not turn."""

    at: float
    seconds: float
    where: str


def blocked(due: float, now: float, cpu_before: float, cpu: float) -> float:
    """Seconds for which the loop ran code instead of a timer.

    ``due`` and ``now``: the time at which the timer was due and the time at which it ran.
    ``cpu_before`` and ``cpu``: processor seconds of the loop's thread at the timer before, and now.
    Time in which the thread waited for a processor is nobody's callback, so it does not count.
    """
    return max(0.0, min(now - due, cpu - cpu_before))


def read_blocks(home: Path, since: float, until: float) -> list[Block]:
    """The blocks between two Unix times that the daemon of this home has told."""
    return [block for block in read_lines(home / FILE, Block) if since <= block.at <= until]


class LoopWatch:
    """Watches the running event loop of this thread until the process ends."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._main = threading.get_ident()
        self._clock = time.pthread_getcpuclockid(self._main)
        self._loop = asyncio.get_running_loop()
        self._ticked = time.monotonic()
        self._cpu = time.thread_time()
        self._told = self._ticked
        self._longest = 0.0
        self._where = ""
        self._tick()
        threading.Thread(target=self._look, name="loop-watch", daemon=True).start()

    def _tick(self) -> None:
        now = time.monotonic()
        cpu = time.thread_time()
        seconds = blocked(self._ticked + TICK_S, now, self._cpu, cpu)
        self._longest = max(self._longest, seconds)
        if now - self._told >= TELL_S:
            self._tell()
            self._told = now
        self._ticked = now
        self._cpu = cpu
        self._loop.call_later(TICK_S, self._tick)

    def _tell(self) -> None:
        if self._longest >= TOLD_S:
            block = Block(time.time(), round(self._longest, 4), self._where)
            with self._file.open("a") as out:
                out.write(json.dumps(asdict(block)) + "\n")
        self._longest = 0.0
        self._where = ""

    def _look(self) -> None:
        """Look up the code that runs during a block. In a thread of its own."""
        while True:
            time.sleep(LOOK_S)
            late = time.monotonic() - self._ticked
            busy = time.clock_gettime(self._clock) - self._cpu
            if not self._where and min(late, busy) > SEEN_S:
                frame = sys._current_frames().get(self._main)  # pyright: ignore[reportPrivateUsage]
                self._where = running_code(frame, ours=3)


def watch_every_daemon() -> None:
    """Start a :class:`LoopWatch` in the event loop of every daemon that this process becomes."""
    run = uvloop.run

    def watched(file: Path, body: Coroutine[Any, Any, Any], **options: Any) -> Any:
        async def both() -> Any:
            LoopWatch(file)
            return await body

        return run(both(), **options)

    run_daemons(FILE, watched)


if __name__ == "__main__":
    watch_every_daemon()
    sys.exit(forks.main())
