"""Virtual time: one queue of callbacks for the whole swarm, and for each process in it an asyncio
event loop and a device.

Time stands still while a callback runs and jumps to the next one that is due. A process that stands
still (SIGSTOP) gets its callbacks when it goes on; callbacks of a dead process never run. Work for
asyncio's threads runs at once, in the loop: blocking work takes the time that the device or the
disk says it takes.
"""

import asyncio
import gc
import heapq
import random
import sys
import warnings
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from contextvars import Context
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakSet

from node.model.lanes import Lanes
from node.pipeline.device import DeviceThread, Priority

STOP_EVERY = 64
"""Callbacks between two looks at whether to stop."""


@dataclass(slots=True, eq=False)
class TimerHandle:
    """A callback that is due. ``lost``: called instead when its process is dead."""

    loop: "ProcessLoop | None"
    callback: Callable[..., object] | None
    args: tuple[Any, ...]
    lost: Callable[[], object] | None = None

    def cancel(self) -> None:
        """Drop the callback; it will not be called."""
        self.callback = None
        self.args = ()
        self.lost = None


class VirtualTime:
    """The queue. ``rng``: source of randomness; :meth:`halt` ends :meth:`run`, which raises the
    error of the halt."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.events = 0
        self.error: BaseException | None = None
        self.loops: list[ProcessLoop] = []
        _worlds.append(self)
        self._number = 0
        self._later: list[tuple[float, int, TimerHandle]] = []
        self._ready: deque[TimerHandle] = deque()

    def push(
        self,
        seconds: float,
        do: Callable[..., object],
        *args: Any,
        loop: "ProcessLoop | None" = None,
        lost: Callable[[], object] | None = None,
    ) -> TimerHandle:
        """Call ``do`` after ``seconds`` of virtual time, in the process of ``loop``, or in no
        process."""
        handle = TimerHandle(loop, do, args, lost)
        if seconds > 0:
            self._number += 1
            heapq.heappush(self._later, (self.now + seconds, self._number, handle))
        else:
            self._ready.append(handle)
        return handle

    def close(self) -> None:
        """End everything, and free what its coroutines hold."""
        for loop in self.loops:
            events._set_running_loop(loop)
            ended: set[asyncio.Task[Any]] = set()
            while left := loop.living() - ended:  # some begin others as they end
                for task in left:
                    coro: Any = task.get_coro()
                    for _ in range(2):  # the first time, some want to wait for others to end
                        with suppress(RuntimeError):
                            coro.close()
                ended |= left
            events._set_running_loop(None)
        self.loops.clear()

    def halt(self, error: BaseException) -> None:
        """Stop the world. The first error counts."""
        self.error = self.error or error

    def run(self, until: float, stop: Callable[[], bool] | None = None) -> None:
        """Go on until that time, until nothing is left to happen, until halted or until ``stop()``,
        which is asked now and then."""
        ready = self._ready
        later = self._later
        current = None
        with quiet():
            try:
                while self.error is None:
                    if ready:
                        handle = ready.popleft()
                    elif later and later[0][0] <= until:
                        when, _, handle = heapq.heappop(later)
                        if when > self.now:
                            self.now = when
                    else:
                        break
                    callback = handle.callback
                    if callback is None:
                        continue
                    loop = handle.loop
                    if loop is not None:
                        if loop.dead:
                            if handle.lost is not None:
                                handle.lost()
                            continue
                        if loop.frozen:
                            loop.inbox.append(handle)
                            continue
                        if loop is not current:
                            events._set_running_loop(loop)
                            current = loop
                    self.events += 1
                    callback(*handle.args)
                    if stop is not None and not self.events % STOP_EVERY and stop():
                        return
            finally:
                events._set_running_loop(None)
        if self.error is not None:
            raise self.error
        self.now = max(self.now, until)


class ProcessLoop(asyncio.AbstractEventLoop):
    """The event loop of one process: from its start to its end."""

    def __init__(self, world: VirtualTime) -> None:
        self.world = world
        world.loops.append(self)
        self.dead = self.frozen = False
        self.inbox: list[TimerHandle] = []
        self._tasks: WeakSet[asyncio.Task[Any]] = WeakSet()
        self.unfinished: set[asyncio.Task[Any]] = set()
        """Unfinished tasks of a dead process: they end with the world, and are not collected as
        garbage before."""
        self.blocked: Callable[[], float] = lambda: 0.0
        """Seconds for which the call that a thread has just made would have blocked it."""

    # ----------------------------------------------------------- what asyncio asks of a loop

    def time(self) -> float:
        return self.world.now

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> Any:
        handle = TimerHandle(self, callback, args)
        self.world._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> Any:
        return self.world.push(delay, callback, *args, loop=self)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> Any:
        return self.world.push(when - self.world.now, callback, *args, loop=self)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, Any] | Coroutine[Any, Any, Any],
        *,
        name: str | None = None,
        context: Context | None = None,
    ) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name)  # type: ignore[arg-type]
        self._tasks.add(task)
        return task

    def living(self) -> set[asyncio.Task[Any]]:
        """Its tasks that are not done; asyncio itself would go through the tasks of all loops."""
        return {task for task in self._tasks if not task.done()}

    def run_in_executor(
        self, executor: Executor | None, func: Callable[..., Any], *args: Any
    ) -> Any:
        """Run ``func`` on a device at the device's times, else at once; its result then comes when
        the disk is done."""
        if isinstance(executor, DeviceThread):
            return executor.submit(func, *args)
        future: asyncio.Future[Any] = asyncio.Future(loop=self)
        tell = ran(future, func, *args)
        seconds = self.blocked()
        if seconds > 0:
            self.call_later(seconds, tell)
        else:
            tell()
        return future

    def get_debug(self) -> bool:
        return False

    def is_closed(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Ignored: tasks of a killed process end with it, and errors of other tasks reach whatever
        spawned them."""

    # ----------------------------------------------------------- what happens to a process

    def kill(self) -> None:
        """End the process: nothing of it runs any more."""
        self.dead = True
        self.frozen = False
        self.unfinished = self.living()
        for handle in self.inbox:
            if handle.lost is not None:
                handle.lost()
        self.inbox.clear()

    def thaw(self) -> None:
        """Let the process go on: everything that was due meanwhile happens now, in order."""
        self.frozen = False
        self.world._ready.extend(self.inbox)
        self.inbox.clear()


def ran(future: asyncio.Future[Any], func: Callable[..., Any], *args: Any) -> Callable[[], object]:
    """Call ``func`` now. Returns a callback that sets its result or error in ``future``."""
    try:
        ends = partial(future.set_result, func(*args))
    except Exception as error:  # noqa: BLE001 - the waiter gets it whole, as from a thread
        ends = partial(future.set_exception, error)
    return lambda: future.done() or ends()


class Inline(Executor):
    """Runs every function at once."""


_buried = count(1)
_worlds: list[VirtualTime] = []
"""Worlds that are not buried yet: garbage should be collected only from ended worlds."""


def bury(every: int = 1) -> None:
    """End everything that still waits in the present worlds. Memory is collected only every
    ``every`` calls, because a collection looks through all objects of the process."""
    with quiet():
        for world in _worlds:
            world.close()
        _worlds.clear()
        if next(_buried) % every == 0:
            gc.collect()


@contextmanager
def quiet() -> Iterator[None]:
    """No garbage is collected while the swarm runs, so that nothing depends on when; and what the
    coroutines of killed processes say when they are dropped is for nobody."""
    hook = sys.unraisablehook
    collects = gc.isenabled()
    sys.unraisablehook = lambda _: None
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # coroutines that never began
            yield
    finally:
        sys.unraisablehook = hook
        if collects:
            gc.enable()


def _through(fn: Callable[[], Any], finish: Callable[[Any], Any]) -> Any:
    return finish(fn())


class SimDevice(DeviceThread):
    """The only compute device of a simulated peer: jobs one after the other, by their priority and
    turn. A job runs when its turn comes, and is done when the virtual time that it has spent is
    over. ``slowness`` stretches every job; ``busy_s``: seconds it has worked."""

    def __init__(self, loop: ProcessLoop, slowness: float = 1.0) -> None:
        self._loop = loop
        self.lanes = Lanes(self.now)
        self.slowness = slowness
        self.busy_s = 0.0
        self._made_at = loop.time()
        self._jobs: list[tuple[int, float, int, asyncio.Future[Any], Callable[[], Any]]] = []
        self._counter = count()
        self._busy = False
        self._spent = 0.0
        self._running = {}

    @property
    def idle_s(self) -> float:  # type: ignore[override]
        return self._loop.time() - self._made_at - self.busy_s

    def now(self) -> float:
        return self._loop.time() + self._spent

    def spend(self, seconds: float) -> None:
        """Let the job that runs take ``seconds`` longer."""
        self._spent += seconds * self.slowness

    def enqueue(
        self,
        priority: Priority,
        fn: Callable[[], Any],
        finish: Callable[[Any], Any] | None = None,
        *,
        turn: float = 0.0,
    ) -> Any:
        if finish is not None:
            fn = partial(_through, fn, finish)
        future = self._loop.create_future()
        heapq.heappush(self._jobs, (int(priority), turn, next(self._counter), future, fn))
        if not self._busy:
            self._next()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        for *_, future, _ in self._jobs:
            future.cancel()
        self._jobs.clear()

    def _next(self) -> None:
        while self._jobs and not self._busy:
            *_, future, fn = heapq.heappop(self._jobs)
            if future.cancelled():
                continue
            self._spent = 0.0
            tell = ran(future, fn)
            took = self._spent
            self._spent = 0.0
            if took > 0:
                self._busy = True
                self._start(took, tell)
            else:
                tell()

    def _start(self, took: float, tell: Callable[[], object]) -> None:
        """The job that has just run takes ``took`` seconds."""
        self.busy_s += took
        self._loop.call_later(took, self._done, tell)

    def _done(self, tell: Callable[[], object]) -> None:
        self._busy = False
        tell()
        self._next()
