"""The one thread that touches tensors. Everything else stays on the event loop, which never
computes."""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from enum import IntEnum
from functools import partial
from itertools import count
from queue import PriorityQueue
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Priority(IntEnum):
    """Priorities of jobs: smaller ones go first, equal ones in order of arrival."""

    TOKEN = -1
    """The next tokens of texts: short, and somebody reads along. They go before every other job,
    and long jobs let them in between two layers (:meth:`DeviceThread.breathe`). However many there
    are, the other jobs go on: each time, those that wait at that moment are let in."""
    COMMIT = 0
    """Adding finished gradients: short, and frees memory."""
    BACKWARD = 1
    """Frees a stash entry and lets the peer before us go on."""
    LOSS = 2
    FORWARD = 3
    FORWARD_ONLY = 4
    """Evaluation and generation."""
    OTHER = 5


class DeviceThread(Executor):
    """A single worker thread with a priority queue.

    It is also a ``concurrent.futures.Executor``, so the optimizer step can share it with
    ``loop.run_in_executor(device, fn)`` and never runs beside a forward. ``idle_s`` are
    seconds since the start. With ``backward_first`` False, everything but COMMIT is served in
    order of arrival. One thread alone, the event loop's, queues jobs and closes it. ``failed`` is
    called, on the device thread, with the error of each job that raises one, before the waiter
    gets it.
    """

    def __init__(
        self,
        name: str = "device",
        *,
        backward_first: bool = True,
        failed: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        self.backward_first = backward_first
        self._failed = failed
        self.idle_s = 0.0
        self._running_since = 0.0
        self._queue = PriorityQueue[tuple[int, int, Future[Any], Callable[[], Any] | None]]()
        self._order = count()
        self._tokens: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._waking = False
        """A job is queued that lets TOKEN jobs in where no other one does."""
        self._closed = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def busy_for(self) -> float:
        """Seconds that the running job has been running; 0 while there is none."""
        since = self._running_since
        if not since:
            return 0.0
        return time.perf_counter() - since

    def now(self) -> float:
        """Seconds of the clock by which work on this device is timed."""
        return time.perf_counter()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Executor's way in, at the lowest priority."""
        return self.enqueue(Priority.OTHER, partial(fn, *args, **kwargs))

    def enqueue(self, priority: Priority, fn: Callable[[], T]) -> Future[T]:
        """Queue ``fn``. Raises RuntimeError after :meth:`close`."""
        if self._closed:
            raise RuntimeError("the device thread is closed")
        future: Future[T] = Future()
        if priority is Priority.TOKEN:
            self._tokens.append((future, fn))
            if not self._waking:
                self._waking = True
                self._queue.put((int(Priority.OTHER), next(self._order), Future(), self._wake))
            return future
        rank = int(Priority.BACKWARD)
        if self.backward_first or priority is Priority.COMMIT:
            rank = int(priority)
        self._queue.put((rank, next(self._order), future, fn))
        return future

    async def run(self, fn: Callable[[], T], priority: Priority = Priority.OTHER) -> T:
        """Run ``fn`` on the device thread and return its result; its exceptions are raised here. A
        cancelled waiter takes its job out of the queue."""
        return await asyncio.wrap_future(self.enqueue(priority, fn))

    def breathe(self) -> None:
        """Run the TOKEN jobs that wait now; later ones wait for the next call. Called by a long
        job, on the device thread, where it can be interrupted: between two layers, forward or
        backward."""
        for _ in range(len(self._tokens)):
            self._run(*self._tokens.popleft())

    def _wake(self) -> None:
        self._waking = False
        self.breathe()

    def _run(self, future: Future[Any], fn: Callable[[], Any]) -> None:
        """Run one job, if somebody still waits for it."""
        if not future.set_running_or_notify_cancel():
            return
        try:
            result = fn()
        except BaseException as error:  # noqa: BLE001 - the waiter gets it
            self._failed(error)
            future.set_exception(error)
        else:
            future.set_result(result)

    def close(self) -> None:
        """Cancel what waits, let the running job end, and stop. Safe to call twice."""
        self.shutdown(wait=True, cancel_futures=True)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._closed = True
        if cancel_futures:
            with self._queue.mutex:
                for _, _, future, _ in self._queue.queue:
                    future.cancel()
            for future, _ in tuple(self._tokens):
                future.cancel()
        # comes after whatever waits
        self._queue.put((len(Priority), next(self._order), Future(), None))
        if wait and threading.current_thread() is not self._thread:
            self._thread.join()

    def _work(self) -> None:
        last = time.perf_counter()
        while True:
            _, _, future, fn = self._queue.get()
            if fn is None:
                return
            start = time.perf_counter()
            self.idle_s += start - last
            self._running_since = start
            self.breathe()
            self._run(future, fn)
            self._running_since = 0.0
            last = time.perf_counter()
            del future, fn  # an idle worker must not keep the last micro-batch's graph alive
