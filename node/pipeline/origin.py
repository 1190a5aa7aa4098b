"""The micro-batches that begin and end at this peer."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator

from torch import Tensor

from node.core.errors import LocalFault
from node.core.journey import Path
from node.pipeline import events as ev
from node.pipeline.events import Key, MicroBatchDone
from node.pipeline.hops.changes import Changes
from node.pipeline.hops.deadlines import Deadlines
from node.pipeline.hops.driver import MachineDriver
from node.pipeline.hops.planned import PlannedWork
from node.pipeline.hops.ports import PipelineHost
from node.pipeline.hops.stash import Stash
from node.pipeline.visit_buffers import VisitBuffers

BatchOf = Callable[[Path], Awaitable[Callable[[], tuple[Tensor, Tensor]]]]
"""Waits for the text of a path, and returns a function that makes (tokens, targets) from it, on any
thread."""


class LaunchWindow:
    """Number of micro-batches that an origin has under way at once: ``most``, and fewer while its
    first stage has no room for so many. Pure.

    Room is shared with other origins, and nobody knows how much of it there will be. So the window
    becomes one smaller for each micro-batch that all peers turned away, and one larger after as
    many as it has were let in at once: the additive increase of congestion avoidance (Jacobson,
    "Congestion avoidance and control", SIGCOMM 1988).
    """

    def __init__(self, most: int) -> None:
        self._most = float(max(1, most))
        self._width = self._most
        self._turned = set[int]()

    @property
    def width(self) -> int:
        """Micro-batches that may be under way, at least one."""
        return int(self._width)

    def turned_away(self, index: int) -> None:
        """No peer of the first stage has room for this micro-batch now; it is offered again."""
        if index not in self._turned:
            self._turned.add(index)
            self._width = max(1.0, self._width - 1.0)

    def ended(self, index: int) -> None:
        """This micro-batch is no longer under way."""
        if index not in self._turned:
            self._width = min(self._most, self._width + 1.0 / self._width)
        self._turned.discard(index)


class Origin:
    """Micro-batches of an ends peer: at most ``in_flight`` are under way, fewer where they would
    wait for memory (:class:`LaunchWindow`), and each is reported exactly once."""

    def __init__(
        self,
        host: PipelineHost,
        driver: MachineDriver,
        stash: Stash,
        planned: PlannedWork,
        deadlines: Deadlines,
        *,
        in_flight: int,
    ) -> None:
        self._host = host
        self._driver = driver
        self._stash = stash
        self._planned = planned
        self._deadlines = deadlines
        self._in_flight = in_flight
        self.window = LaunchWindow(in_flight)
        self._places = Changes()
        """Signal that a micro-batch has ended."""
        self._results: dict[int, asyncio.Future[MicroBatchDone]] = {}

    async def run(
        self,
        paths: Iterable[Path],
        batch_of: BatchOf,
        on_result: Callable[[MicroBatchDone], None],
    ) -> None:
        """Send a micro-batch along every path, within the launch window. Each is reported exactly
        once.

        ``batch_of`` waits until the text of a path is there, at most for the time of the path, and
        returns the function that makes (tokens, targets), int64 [B, T], on the device thread.
        ``on_result`` is called on the loop. Returns when all have ended, counted or not; if it is
        cancelled, micro-batches under way are dropped without a report.
        """
        queue = iter(paths)
        under_way = set[int]()
        walkers = [
            self._host.tasks.spawn(self._walk(queue, under_way, batch_of, on_result), f"window {i}")
            for i in range(max(1, self._in_flight))
        ]
        try:
            await asyncio.gather(*walkers)
        finally:
            for walker in walkers:
                walker.cancel()

    async def _walk(
        self,
        queue: Iterator[Path],
        under_way: set[int],
        batch_of: BatchOf,
        on_result: Callable[[MicroBatchDone], None],
    ) -> None:
        while True:
            while len(under_way) >= self.window.width:
                await self._places.event.wait()
            path = next(queue, None)
            if path is None:
                return
            under_way.add(path.index)
            try:
                on_result(await self._one(path, batch_of))
            finally:
                under_way.discard(path.index)
                self.window.ended(path.index)
                self._places.notify()

    async def _one(self, path: Path, batch_of: BatchOf) -> MicroBatchDone:
        clock = self._host.clock
        machine = self._driver.machine
        index = path.index
        late = self._deadlines.time_left(path)
        try:
            if late <= 0:
                raise TimeoutError("the time of its epoch was over")
            async with asyncio.timeout(late):
                batch = await batch_of(path)
        except (TimeoutError, LocalFault) as e:
            why = str(e) or f"its text did not come in {late:.1f} s"
            self._host.telemetry.emit("micro-batch-dropped", why, "warning", index=index)
            return MicroBatchDone(index, False)
        left = self._deadlines.time_left(path)
        plan = None if machine.closed else machine.plan
        if plan is None or machine.paths.get(index) != path or index in self._results:
            return MicroBatchDone(index, False)  # its plan is closed, or no longer in force
        result = self._results[index] = asyncio.get_running_loop().create_future()
        key = Key(plan.epoch, index, 0)
        work = VisitBuffers(
            clock.now() + left,
            self._planned.shape_of(index),
            self._host.me,
            batch=batch,
            wires=self._planned.wires_of(key),
        )
        self._stash.put(key, work, self._planned.cost(index))
        self._driver.handle(ev.Start(index))
        try:
            await asyncio.wait((result,), timeout=max(0.0, left))
        except asyncio.CancelledError:
            # Nobody waits for this micro-batch any more, so its end is not reported.
            if self._results.get(index) is result:
                del self._results[index]
            raise
        finally:
            if not result.done() and machine.plan is plan:
                self._driver.handle(ev.Drop(index, f"not finished in {left:.1f} s"))
            if self._results.get(index) is result:
                del self._results[index]
        if result.done():
            return result.result()
        return MicroBatchDone(index, False)

    def forget(self) -> None:
        """Forget the micro-batches of the former plan; the next plan may use the same numbers."""
        self._results.clear()

    def finished(self, key: Key) -> None:
        """End a micro-batch: its gradient has returned to this origin."""
        head = self.at_last(key)
        if head is not None:
            self._end(MicroBatchDone(key.index, True, head.loss_sum, head.tokens))

    def dropped(self, index: int, reason: str) -> None:
        if self._end(MicroBatchDone(index, False)):
            self._host.telemetry.emit("micro-batch-dropped", reason, "warning", index=index)

    def at_last(self, key: Key) -> VisitBuffers | None:
        """Buffers that this origin holds at the end of the journey of ``key``, or None."""
        path = self._driver.machine.paths.get(key.index)
        if path is None:
            return None
        return self._stash.get(key._replace(position=len(path.hops) + 1))

    def _end(self, done: MicroBatchDone) -> bool:
        result = self._results.get(done.index)
        if result is None or result.done():
            return False
        result.set_result(done)
        return True
