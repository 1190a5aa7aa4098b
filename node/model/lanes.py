"""Lanes of a device: copies to it, computations and copies from it, each on a queue of its own, so
that none waits for another without need. Enters: host tensors and results of computations. Never:
the choice of the next job, which the device thread makes.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Thread, current_thread
from typing import Any, ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from node.wire.tensors import to_host

P = ParamSpec("P")
T = TypeVar("T")


class Mark(Protocol):
    """A point in the order of a device's computations, after all that were issued before it."""

    def wait(self) -> None:
        """Wait until the computations before this point are done."""

    def done(self) -> bool:
        """Return True if the computations before this point are done."""
        ...

    def since(self, earlier: Any) -> float:
        """Seconds that the device took from an ``earlier`` mark to this one. Both must be done."""
        ...


@dataclass(frozen=True, slots=True)
class Moment:
    """Mark of a synchronous device: its computations end before their call returns. ``at``: time of
    the mark, in seconds of the clock."""

    at: float

    def wait(self) -> None:
        """Return at once: the computations are done."""

    def done(self) -> bool:
        return True

    def since(self, earlier: "Moment") -> float:
        return self.at - earlier.at


class Lanes:
    """Synchronous lanes: every copy and every computation is done when its call returns. On the CPU
    no tensor is copied at all. ``clock`` returns the seconds by which computations are timed."""

    beside = False
    """True if copies run concurrently with computations, on threads of their own."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock

    def compute(self, work: Callable[[], T]) -> T:
        """Issue computations; the device may still run them when this returns."""
        return work()

    def mark(self) -> Mark:
        """The point after everything that was issued so far."""
        return Moment(self._clock())

    def up(self, host: Tensor) -> Tensor:
        """Copy a tensor to the device, in the same format. A synchronous lane returns the host
        tensor: the computation copies it."""
        return host

    def uploading(self) -> AbstractContextManager[object]:
        """The context in which to call :meth:`up` and to inspect the copied tensors."""
        return nullcontext()

    def down(self, made: Tensor, after: Mark) -> Tensor:
        """Copy a tensor to the host, once the computations before ``after`` are done."""
        return to_host(made)


class CudaMark:
    """A mark of a CUDA stream: an event that was recorded on the stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait(self) -> None:
        self.event.synchronize()

    def done(self) -> bool:
        return self.event.query()

    def since(self, earlier: "CudaMark") -> float:
        return earlier.event.elapsed_time(self.event) / 1000


class CudaLanes(Lanes):
    """Lanes of a CUDA device: one stream for copies up, one for copies down, and the stream that
    computes.

    Host tensors are page-locked. torch keeps freed page-locked blocks for the next tensor of their
    size, and reuses a block only when the copies from and to it are over. An output stays in its
    block until the next hop is DONE with it; a ring of fixed buffers could not promise that.
    """

    beside = True

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._computing = torch.cuda.default_stream(device)
        self._up = torch.cuda.Stream(device)
        self._down = torch.cuda.Stream(device)

    def mark(self) -> CudaMark:
        # blocking: a waiting thread sleeps, and leaves the interpreter to other threads.
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(self._computing)
        return CudaMark(event)

    def up(self, host: Tensor) -> Tensor:
        there = host.to(self._device, non_blocking=True)
        # The memory was allocated on the upload stream, and the computing stream reads it.
        there.record_stream(self._computing)
        return there

    def uploading(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._up)

    def down(self, made: Tensor, after: Mark) -> Tensor:
        if isinstance(after, CudaMark):
            self._down.wait_event(after.event)
        with torch.cuda.stream(self._down):
            host = to_host(made, wait=False)
            came = torch.cuda.Event(blocking=True)
            came.record(self._down)
        came.synchronize()
        return host


def lanes_of(device: torch.device) -> Lanes:
    """The lanes of a device: concurrent on a CUDA GPU, synchronous elsewhere."""
    if device.type == "cuda":
        return CudaLanes(device)
    return Lanes()


class LaneThread:
    """One thread that runs calls in order of arrival. It starts with the first call. It is a daemon
    thread and does not delay the end of the process: a copy from a lost device may never return.
    ``begin`` is called on the thread before the first call."""

    def __init__(self, name: str, begin: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self._begin = begin
        self._calls = SimpleQueue[Callable[[], None] | None]()
        self._thread: Thread | None = None
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call. Raises RuntimeError after :meth:`shutdown`."""
        if self._closed:
            raise RuntimeError(f"{self._name} is closed")
        future: Future[T] = Future()
        self.post(partial(_carry_out, future, partial(fn, *args, **kwargs)))
        return future

    def post(self, call: Callable[[], None]) -> None:
        """Queue a call without a future. The call must not raise."""
        if self._thread is None:
            self._thread = Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        self._calls.put(call)

    def shutdown(self, *, wait: bool = True) -> None:
        """Run the queued calls, then end the thread. Safe to call twice."""
        if self._thread is not None and not self._closed:
            self._calls.put(None)
        self._closed = True
        if self._thread is None:
            return
        if wait and current_thread() is not self._thread:
            self._thread.join()

    def _work(self) -> None:
        with suppress(RuntimeError):  # the first call hears of a lost device
            self._begin()
        while (call := self._calls.get()) is not None:
            call()
            del call  # an idle thread must not keep the last tensor alive


def _carry_out(future: Future[T], call: Callable[[], T]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = call()
    except BaseException as error:  # noqa: BLE001 - the waiter gets it
        future.set_exception(error)
    else:
        future.set_result(result)
