"""Work at a place that may never answer, or that takes too long to be waited for at a stop: on a
thread that nobody waits for, watched by the event loop. No call of a library of file systems can be
ended from outside, and threads of an executor are waited for at the end of the process."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from node.core.clock import Clock
from node.core.errors import LocalFault

T = TypeVar("T")
STALL_S = 600.0
"""Usual seconds without a block that came or went after which work is given up."""
WATCH_S = 1.0
"""Seconds between two looks at work under way."""


class ThreadWork:
    """Work of a thread that may be given up. ``moved``: time of its last block."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._given_up = threading.Event()
        self.moved = clock.now()

    def goes_on(self) -> bool:
        """Called between two blocks. Return False if the work is given up."""
        self.moved = self._clock.now()
        return not self._given_up.is_set()

    def give_up(self) -> None:
        """Let the work end at its next block."""
        self._given_up.set()


class Aside:
    """One piece of work at a time. ``prepare``: called first on each thread; ``stall_s``: seconds
    without a block that came or went after which work is given up, infinite for work that does not
    tell of its blocks."""

    def __init__(
        self,
        clock: Clock,
        prepare: Callable[[], None] = lambda: None,
        stall_s: float = STALL_S,
    ) -> None:
        self._clock = clock
        self._prepare = prepare
        self._stall_s = stall_s
        self.free = asyncio.Event()
        """Set while no thread works, also none that was given up and has not noticed."""
        self.free.set()

    async def call(self, do: Callable[[ThreadWork], T]) -> T:
        """Call ``do`` on a thread of its own and return its result. Cancelled, it gives the work up
        and waits no longer. Raises what ``do`` raises, and LocalFault if another thread has not
        ended, or if nothing moves for ``stall_s``."""
        if not self.free.is_set():
            raise LocalFault("the attempt before has not ended: the place does not answer")
        work = ThreadWork(self._clock)
        self.free.clear()
        loop = asyncio.get_running_loop()
        result: asyncio.Future[T] = loop.create_future()

        def succeeded(value: T) -> None:
            self.free.set()
            if not result.done():
                result.set_result(value)

        def failed(error: Exception) -> None:
            self.free.set()
            if not result.done():
                result.set_exception(error)

        def run() -> None:
            try:
                self._prepare()
                value = do(work)
            except Exception as e:  # noqa: BLE001
                told(failed, e)
            else:
                told(succeeded, value)

        def told(report: Callable[[Any], None], outcome: Any) -> None:
            with contextlib.suppress(RuntimeError):  # the loop may have ended long ago
                loop.call_soon_threadsafe(report, outcome)

        threading.Thread(target=run, name="aside", daemon=True).start()
        try:
            while not result.done():
                await asyncio.wait({result}, timeout=WATCH_S)
                if not result.done() and self._clock.now() - work.moved > self._stall_s:
                    raise LocalFault(f"nothing has moved for {self._stall_s:.0f} s")
            return result.result()
        finally:
            work.give_up()
            result.cancel()
