"""Requests of a window that go on at the same time. Enters: tasks, the number of requests that may
be under way. Leaves: turns. Never: a tensor, a plan, the content of a request."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Places:
    """Places for requests, of which ``count`` are under way at a time. A request that takes longer
    than ``slow_s`` seconds goes on and gives its place to the next one, so slow ones hold up no
    other."""

    def __init__(self, count: int, slow_s: float) -> None:
        self._free = asyncio.Semaphore(count)
        self._slow_s = slow_s

    @asynccontextmanager
    async def one(self) -> AsyncIterator[None]:
        """Context of a request: begins when there is a place for it."""
        await self._free.acquire()
        held = [self._free]

        def leave() -> None:
            while held:
                held.pop().release()

        slow = asyncio.get_running_loop().call_later(self._slow_s, leave)
        try:
            yield
        finally:
            slow.cancel()
            leave()


async def first_of(under_way: set[asyncio.Task[None]], until: float) -> set[asyncio.Task[None]]:
    """Wait until one of the tasks has ended, or the event loop's clock shows ``until``. Returns the
    tasks that go on. Raises the exception that ended a task."""
    left = max(0.0, until - asyncio.get_running_loop().time())
    if not under_way:
        await asyncio.sleep(left)
        return set()
    done, going = await asyncio.wait(under_way, timeout=left, return_when=asyncio.FIRST_COMPLETED)
    for task in done:
        if not task.cancelled():
            task.result()
    return going
