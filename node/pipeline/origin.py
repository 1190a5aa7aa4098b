"""The ends' own micro-batches: a window of them under way, each reported exactly once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

from node.core.journey import Path
from node.pipeline.events import Drop, Key, Start
from node.pipeline.hops.base import PipelineBase
from node.pipeline.visit_buffers import VisitBuffers

BatchOf = Callable[[Path], Awaitable[Callable[[], tuple[Tensor, Tensor]]]]
"""Waits for the text of a path; what it gives makes (tokens, targets) of it, on any thread."""


@dataclass(frozen=True, slots=True)
class MicroBatchDone:
    """How a micro-batch ended. ``loss_sum`` in nats over its ``tokens``; both 0 when it is not
    counted."""

    index: int
    counted: bool
    loss_sum: float = 0.0
    tokens: int = 0


class Origin:
    """Starts micro-batches and reports how they end."""

    def __init__(self, pipeline: PipelineBase) -> None:
        self._pipeline = pipeline
        self._results: dict[int, asyncio.Future[MicroBatchDone]] = {}

    async def run(
        self,
        paths: Iterable[Path],
        batch_of: BatchOf,
        on_result: Callable[[MicroBatchDone], None],
    ) -> None:
        """See ``Pipeline.run``."""
        queue = iter(paths)
        walkers = [
            self._pipeline.tasks.spawn(self._walk(queue, batch_of, on_result), f"window {i}")
            for i in range(max(1, self._pipeline.limits.in_flight))
        ]
        try:
            await asyncio.gather(*walkers)
        finally:
            for walker in walkers:
                walker.cancel()

    async def _walk(
        self,
        queue: Iterator[Path],
        batch_of: BatchOf,
        on_result: Callable[[MicroBatchDone], None],
    ) -> None:
        for path in queue:
            on_result(await self._one(path, batch_of))

    async def _one(self, path: Path, batch_of: BatchOf) -> MicroBatchDone:
        pipeline, index = self._pipeline, path.index
        late = pipeline.time_left(path)
        try:
            async with asyncio.timeout(max(0.0, late)):
                batch = await batch_of(path)
        except TimeoutError:
            why = f"its text did not come in {late:.1f} s"
            pipeline.telemetry.emit("micro-batch-dropped", why, "warning", index=index)
            return MicroBatchDone(index, False)
        plan, left = pipeline.machine.plan, pipeline.time_left(path)
        if plan is None or pipeline.machine.paths.get(index) != path or index in self._results:
            return MicroBatchDone(index, False)  # of a plan that is not in force any more
        result = self._results[index] = asyncio.get_running_loop().create_future()
        work = VisitBuffers(pipeline.clock.now() + left, pipeline.shape_of(index), batch=batch)
        pipeline.stash.put(Key(plan.epoch, index, 0), work, pipeline.cost(index))
        pipeline.handle(Start(index))
        try:
            await asyncio.wait((result,), timeout=max(0.0, left))
        except asyncio.CancelledError:
            # Nobody waits for it any more, so its end is not reported.
            if self._results.get(index) is result:
                del self._results[index]
            raise
        finally:
            if not result.done() and pipeline.machine.plan is plan:
                pipeline.handle(Drop(index, f"not finished in {left:.1f} s"))
            if self._results.get(index) is result:
                del self._results[index]
        return result.result() if result.done() else MicroBatchDone(index, False)

    def forget(self) -> None:
        """Another plan is in force: its micro-batches may have the same numbers."""
        self._results.clear()

    def finished(self, index: int) -> None:
        """The gradient came home."""
        plan = self._pipeline.machine.plan
        head = None if plan is None else self.at_last(Key(plan.epoch, index, 0))
        if head is not None:
            self._end(MicroBatchDone(index, True, head.loss_sum, head.tokens))

    def dropped(self, index: int, reason: str) -> None:
        if self._end(MicroBatchDone(index, False)):
            self._pipeline.telemetry.emit("micro-batch-dropped", reason, "warning", index=index)

    def at_last(self, key: Key) -> VisitBuffers | None:
        """What this origin holds at the end of the journey of ``key``."""
        path = self._pipeline.machine.paths.get(key.index)
        return (
            None
            if path is None
            else self._pipeline.stash.get(Key(key.epoch, key.index, len(path.hops) + 1))
        )

    def _end(self, done: MicroBatchDone) -> bool:
        result = self._results.get(done.index)
        if result is None or result.done():
            return False
        result.set_result(done)
        return True
