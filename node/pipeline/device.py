"""The one thread that computes with tensors, and the threads of concurrent copies. Everything else
stays on the event loop, which never computes."""

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from itertools import count
from queue import Empty, PriorityQueue
from typing import Any, ParamSpec, TypeVar

from node.model.lanes import Lanes, LaneThread, Mark
from node.pipeline.text_budget import TextBudget

P = ParamSpec("P")
T = TypeVar("T")
U = TypeVar("U")
AHEAD = 1
"""Number of jobs issued ahead of the job that the device computes. They leave no gap between jobs;
with more of them, an urgent job would wait longer."""


class Priority(IntEnum):
    """Priorities of jobs, the smallest first. Jobs of one priority go by turn, then by arrival."""

    TOKEN = -1
    """The next tokens of texts: short, and a person waits for them. They go before every other job,
    and long jobs let them in between two layers (:meth:`DeviceThread.breathe`). The other jobs go
    on, however many token jobs arrive: only the ones that wait at that moment are let in. Beside
    training they have a share of the time (:class:`~node.pipeline.text_budget.TextBudget`)."""
    COMMIT = 0
    """Adding finished gradients: short, and frees memory."""
    VISIT = 1
    """Forward, loss or backward of a visit; among these, the smallest turn goes first
    (:meth:`node.pipeline.hops.planned.PlannedWork.turn`)."""
    FORWARD_ONLY = 2
    """Evaluation and generation."""
    OTHER = 3


TRAINING = {Priority.COMMIT, Priority.VISIT}
"""Priorities of the jobs that only a device that trains has."""


@dataclass(slots=True, eq=False)
class _Job:
    """``fn`` runs on the device thread. ``finish`` turns the value that ``fn`` returned into the
    result, once the device has computed that far. ``trains``: only a device that trains has such
    jobs."""

    fn: Callable[[], Any]
    finish: Callable[[Any], Any] | None = None
    trains: bool = False
    future: Future[Any] = field(default_factory=Future)


class DeviceThread(Executor):
    """Worker thread of a device, with a priority queue of jobs.

    It is also a ``concurrent.futures.Executor``, so the optimizer step can share it with
    ``loop.run_in_executor(device, fn)`` and never runs beside a forward. ``idle_s``: seconds
    without a job since the start. ``by_arrival`` True puts all jobs but COMMIT and TOKEN in
    order of arrival. Only the event loop's thread queues jobs and closes it. If a job
    or a call of :meth:`beside` raises, ``failed`` is called with the error on the thread that
    ran it, before the waiter gets it.

    ``lanes``: the lanes of the device. If they copy concurrently, the thread issues a job that has
    a ``finish`` part, and begins the next job while that part copies the result down. Results
    arrive in the order in which their jobs were issued.

    ``begin`` is called on each of the threads before their first job.

    ``text_share``: the share of its processor's time that texts have while the device trains; 1 for
    a GPU, whose time the processor's does not show. ``daemons`` returns the number of daemons that
    share the processor.
    """

    def __init__(
        self,
        name: str = "device",
        *,
        by_arrival: bool = False,
        failed: Callable[[BaseException], None] = lambda error: None,
        lanes: Lanes | None = None,
        begin: Callable[[], None] = lambda: None,
        text_share: float = 1.0,
        daemons: Callable[[], int] = lambda: 1,
    ) -> None:
        self.by_arrival = by_arrival
        self.lanes = lanes or Lanes()
        self._failed = failed
        self.idle_s = 0.0
        self._running: dict[_Job, float] = {}
        """Start of each job that runs or has its result copied down, in seconds of
        ``perf_counter``."""
        self._drained = 0.0
        """Time at which the latest copy down ended, in seconds of ``perf_counter``."""
        self._issued: deque[Mark] = deque()
        """End marks of the jobs that the device may still compute."""
        self._uploads = LaneThread(f"{name}-up", begin)
        self._downloads = LaneThread(f"{name}-down", begin)
        self._queue = PriorityQueue[tuple[int, float, int, _Job | None]]()
        self._order = count()
        self._tokens: deque[_Job] = deque()
        self._budget = TextBudget(text_share)
        self._daemons = daemons
        self._waking = False
        """True while a job is queued that runs the TOKEN jobs if no other job lets them in."""
        self._closed = False
        self._thread = threading.Thread(target=self._work, args=(begin,), name=name, daemon=True)
        self._thread.start()

    @property
    def busy_for(self) -> float:
        """Seconds since the oldest unfinished job began; 0 while there is none."""
        now = time.perf_counter()
        return now - min(self._running.values(), default=now)

    def now(self) -> float:
        """Seconds of the clock by which work on this device is timed."""
        return time.perf_counter()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call as ``Executor.submit`` does, at the lowest priority."""
        return self.enqueue(Priority.OTHER, partial(fn, *args, **kwargs))

    def enqueue(
        self,
        priority: Priority,
        fn: Callable[[], Any],
        finish: Callable[[Any], Any] | None = None,
        *,
        turn: float = 0.0,
    ) -> Future[Any]:
        """Queue ``fn``. ``finish``, if given, turns the value that ``fn`` returned into the result;
        with concurrent lanes it runs while the next jobs run. Among jobs of one priority, the
        smallest ``turn`` goes first. Raises RuntimeError after :meth:`close`."""
        if self._closed:
            raise RuntimeError("the device thread is closed")
        job = _Job(fn, finish, priority in TRAINING)
        if priority is Priority.TOKEN:
            self._tokens.append(job)
            if not self._waking:
                self._waking = True
                self._put(Priority.OTHER, 0.0, _Job(self._wake))
            return job.future
        if self.by_arrival and priority is not Priority.COMMIT:
            priority = Priority.VISIT
            turn = 0.0
        self._put(priority, turn, job)
        return job.future

    def _put(self, priority: Priority, turn: float, job: _Job | None) -> None:
        self._queue.put((int(priority), turn, next(self._order), job))

    async def run(self, fn: Callable[[], T], priority: Priority = Priority.OTHER) -> T:
        """Run ``fn`` on the device thread and return its result; its exceptions are raised here. A
        cancelled waiter takes its job out of the queue."""
        return await asyncio.wrap_future(self.enqueue(priority, fn))

    async def run_through(
        self,
        fn: Callable[[], T],
        finish: Callable[[T], U],
        priority: Priority,
        turn: float = 0.0,
    ) -> U:
        """Run a job with a ``finish`` part, as :meth:`run` does, and return the result of that
        part."""
        return await asyncio.wrap_future(self.enqueue(priority, fn, finish, turn=turn))

    async def beside(self, fn: Callable[[], T]) -> T:
        """Run ``fn``, which inspects a received tensor or copies it to the device, on the thread of
        copies up, concurrently with the jobs."""
        return await asyncio.wrap_future(self._uploads.submit(self._watched, fn))

    def _watched(self, fn: Callable[[], T]) -> T:
        try:
            return fn()
        except BaseException as error:
            self._failed(error)
            raise

    def breathe(self) -> None:
        """Run the TOKEN jobs that wait now, as far as their share of the time goes; later ones wait
        for the next call. Called by a long job, on the device thread, where it can be interrupted:
        between two layers, forward or backward."""
        limited = self._budget.share < 1.0
        for _ in range(len(self._tokens)):
            began = time.perf_counter()
            if limited and self._budget.wait_s(began):
                return
            worked = time.thread_time()
            self._run(self._tokens.popleft())
            if limited:
                took = time.thread_time() - worked
                self._budget.spend(began, took, time.perf_counter(), self._daemons())

    def _wake(self) -> None:
        self._waking = False
        self.breathe()

    def _run(self, job: _Job) -> None:
        """Run one job, unless it was cancelled."""
        if not job.future.set_running_or_notify_cancel():
            return
        self._running[job] = time.perf_counter()
        try:
            result = job.fn()
            if job.finish is None:
                self._end(job, result)
            elif self.lanes.beside:
                self._issued.append(self.lanes.mark())
                self._downloads.post(partial(self._finish, job, job.finish, result))
            else:
                self._end(job, job.finish(result))
        except BaseException as error:  # noqa: BLE001 - the waiter gets it
            self._fail(job, error)

    def _finish(self, job: _Job, finish: Callable[[Any], Any], made: Any) -> None:
        """Copy the result of a job to the host, on the thread of copies down."""
        try:
            result = finish(made)
        except BaseException as error:  # noqa: BLE001 - the waiter gets it
            self._fail(job, error)
        else:
            self._end(job, result)
        self._drained = time.perf_counter()

    def _end(self, job: _Job, result: Any) -> None:
        del self._running[job]
        job.future.set_result(result)

    def _fail(self, job: _Job, error: BaseException) -> None:
        self._running.pop(job, None)
        self._failed(error)
        job.future.set_exception(error)

    def close(self) -> None:
        """Cancel the queued jobs, let the running job end, and stop. Safe to call twice."""
        self.shutdown(wait=True, cancel_futures=True)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._closed = True
        if cancel_futures:
            with self._queue.mutex:
                for *_, job in self._queue.queue:
                    if job is not None:
                        job.future.cancel()
            for job in tuple(self._tokens):
                job.future.cancel()
        # sorts after every queued job
        self._queue.put((len(Priority), 0.0, next(self._order), None))
        if wait and threading.current_thread() is not self._thread:
            self._thread.join()
            self._downloads.shutdown()
        self._uploads.shutdown(wait=False)

    def _work(self, begin: Callable[[], None]) -> None:
        with suppress(RuntimeError):  # the first job hears of a lost device
            begin()
        while True:
            # The most urgent job is chosen only after the wait.
            self._wait_for_room()
            last = time.perf_counter()
            job = self._next()
            if job is None:
                while self._tokens:
                    self._run(self._tokens.popleft())
                return
            start = time.perf_counter()
            if not self._computes():
                self.idle_s += max(0.0, start - max(last, self._drained))
            if job.trains:
                self._budget.train(math.inf)
            self.breathe()
            self._run(job)
            if job.trains:
                self._budget.train(time.perf_counter())
            del job  # an idle worker must not keep the last micro-batch's graph alive

    def _next(self) -> _Job | None:
        """Wait for the next job, None at the end. Where a TOKEN job has waited long enough before
        any other job comes, the next job is the one that lets it in."""
        timeout = None
        if self._tokens:
            timeout = self._budget.wait_s(time.perf_counter())
        try:
            *_, job = self._queue.get(timeout=timeout)
        except Empty:
            return _Job(self._wake)
        return job

    def _wait_for_room(self) -> None:
        """Wait until the device has at most :data:`AHEAD` issued jobs left."""
        # The error of a lost device reaches the waiter of the job.
        with suppress(RuntimeError):
            while len(self._issued) > AHEAD:
                self._issued.popleft().wait()

    def _computes(self) -> bool:
        """Return True if the device still computes a job that was issued."""
        with suppress(RuntimeError):
            while self._issued:
                if not self._issued[0].done():
                    return True
                self._issued.popleft()
        return False
