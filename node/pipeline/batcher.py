"""Work of the same kind that waits for the device at the same time, done in one pass."""

import asyncio
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Generic, TypeVar

from node.pipeline.device import DeviceThread, Priority

In = TypeVar("In")
Out = TypeVar("Out")
Waiting = deque[tuple[In, Future[Any]]]
"""Items that wait for a pass, in order of arrival, and where their results go."""


class Batcher(Generic[In, Out]):
    """Collects items while the device is busy and computes all waiting items of one priority
    together, on the device thread.

    ``compute`` returns a result, or an error, for each item, in their order. If it raises, the
    items are computed one by one, so that one of them cannot spoil the others. The total ``size``
    of the items of a pass is at most ``most``, unless one item alone is larger.
    """

    def __init__(
        self,
        device: DeviceThread,
        compute: Callable[[Sequence[In]], Sequence[Out | Exception]],
        size: Callable[[In], int],
        most: int,
    ) -> None:
        self._device = device
        self._compute = compute
        self._size = size
        self._most = most
        self._waiting: defaultdict[Priority, Waiting[In]] = defaultdict(deque)

    async def run(self, item: In, priority: Priority) -> Out:
        """The result for ``item``, at the latest when a job of ``priority`` would have its turn;
        raises its error, and CancelledError where the device is closed before."""
        result: Future[Any] = Future()
        waiting = self._waiting[priority]
        waiting.append((item, result))
        # A job for each item: those that find nothing left do nothing.
        job = self._device.enqueue(priority, partial(self._pass, waiting))
        job.add_done_callback(lambda job: job.cancelled() and result.cancel())
        return await asyncio.wrap_future(result)

    def _pass(self, waiting: Waiting[In]) -> None:
        batch = self._next(waiting)
        if not batch:
            return
        items = [item for item, _ in batch]
        failed: Exception | None = None
        try:
            found = list(self._compute(items))
        except Exception as error:  # noqa: BLE001 - the waiter gets it
            failed = error
            found = [error]
            if len(items) != 1:
                found = [self._alone(item) for item in items]
        for (_, result), value in zip(batch, found, strict=True):
            if isinstance(value, Exception):
                result.set_exception(value)
            else:
                result.set_result(value)
        if failed is not None:
            raise failed  # the device thread reports jobs that fail: its device may be lost

    def _next(self, waiting: Waiting[In]) -> list[tuple[In, Future[Any]]]:
        """The items of the next pass, those that nobody waits for any more left out."""
        batch: list[tuple[In, Future[Any]]] = []
        room = self._most
        while waiting:
            item, result = waiting[0]
            room -= self._size(item)
            if batch and room < 0:
                break
            waiting.popleft()
            if result.set_running_or_notify_cancel():
                batch.append((item, result))
        return batch

    def _alone(self, item: In) -> Out | Exception:
        try:
            return self._compute([item])[0]
        except Exception as error:  # noqa: BLE001 - the waiter gets it
            return error
