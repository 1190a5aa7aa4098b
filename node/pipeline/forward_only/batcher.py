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
PATIENCE = 0.5
"""Share of the time of a pass for which an item waits for others."""
PATIENCE_S = 0.05
"""Most seconds for which it waits."""
SMALL = 9
"""Size up to which items come one for each text: a token, and a draft of the next ones."""
GAIN = 0.25
"""Weight of the newest pass in the average time of a pass."""


class Batcher(Generic[In, Out]):
    """Computes all items of one priority that wait for the device together, on the device
    thread.

    ``compute`` returns a result, or an error, for each item, in their order. If it raises, the
    items are computed one by one, so that one of them cannot spoil the others. The total ``size``
    of the items of a pass is at most ``most``, unless one item alone is larger.

    ``company(priority)``: number of items up to :data:`SMALL` that should be in one pass, such as
    the next tokens of several texts. Such an item waits for others until they are that many, but
    only for a part of the time that a pass takes. Items that were in one pass stay together.
    """

    def __init__(
        self,
        device: DeviceThread,
        compute: Callable[[Sequence[In]], Sequence[Out | Exception]],
        size: Callable[[In], int],
        most: int,
        company: Callable[[Priority], int] = lambda priority: 1,
    ) -> None:
        self._device = device
        self._compute = compute
        self._size = size
        self._most = most
        self._company = company
        self._waiting: defaultdict[Priority, Waiting[In]] = defaultdict(deque)
        self._gathering: defaultdict[Priority, list[Future[Any]]] = defaultdict(list)
        """Results of items for which no job is queued yet."""
        self._timers: dict[Priority, asyncio.TimerHandle] = {}
        self._pass_s = 0.0
        """Average seconds of a pass over small items; written by the device thread."""

    async def run(self, item: In, priority: Priority) -> Out:
        """The result for ``item``. Raises its error, and CancelledError where the device is closed
        before."""
        result: Future[Any] = Future()
        waiting = self._waiting[priority]
        waiting.append((item, result))
        self._gathering[priority].append(result)
        patience_s = min(PATIENCE * self._pass_s, PATIENCE_S)
        small = self._size(item) <= SMALL
        if not small or len(waiting) >= self._company(priority) or not patience_s:
            self._release(priority)
        elif priority not in self._timers:
            loop = asyncio.get_running_loop()
            self._timers[priority] = loop.call_later(patience_s, self._release, priority)
        return await asyncio.wrap_future(result)

    def _release(self, priority: Priority) -> None:
        """Queue a job for each item that has none: those that find nothing left do nothing."""
        timer = self._timers.pop(priority, None)
        if timer is not None:
            timer.cancel()
        step = partial(self._pass, self._waiting[priority])
        for result in self._gathering.pop(priority, ()):
            try:
                job = self._device.enqueue(priority, step)
            except RuntimeError:  # the device is closed
                result.cancel()
            else:
                job.add_done_callback(partial(_cancel_with, result))

    def _pass(self, waiting: Waiting[In]) -> None:
        batch = self._next(waiting)
        if not batch:
            return
        items = [item for item, _ in batch]
        failed: Exception | None = None
        began = self._device.now()
        try:
            found = list(self._compute(items))
        except Exception as error:  # noqa: BLE001 - the waiter gets it
            failed = error
            found = [error]
            if len(items) != 1:
                found = [self._alone(item) for item in items]
        if all(self._size(item) <= SMALL for item in items):
            took_s = self._device.now() - began
            self._pass_s += (GAIN if self._pass_s else 1.0) * (took_s - self._pass_s)
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


def _cancel_with(result: Future[Any], job: Future[Any]) -> None:
    if job.cancelled():
        result.cancel()
