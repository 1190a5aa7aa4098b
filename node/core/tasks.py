"""A task has a parent and a name. This is the only file that spawns."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Tasks:
    """A service's tasks. Closing it ends them all; an unexpected error in one is told to the parent
    once.

    ``on_error(name, error)`` is called for a task that raised (not for cancellation), and for an
    *eternal* task that returned: something that should run for ever and stopped is an error.
    """

    def __init__(
        self, owner: str, on_error: Callable[[str, BaseException], None] | None = None
    ) -> None:
        self.owner = owner
        self._on_error = on_error
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(
        self, coro: Coroutine[Any, Any, Any], name: str, *, eternal: bool = False
    ) -> asyncio.Task[Any]:
        """Run ``coro`` as a child named ``owner.name`` until it ends or the owner closes."""
        task = asyncio.get_running_loop().create_task(coro, name=f"{self.owner}.{name}")
        self._tasks.add(task)
        task.add_done_callback(lambda t: self._done(t, name, eternal))
        return task

    def _done(self, task: asyncio.Task[Any], name: str, eternal: bool) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is None and eternal:
            error = RuntimeError(f"{self.owner}.{name} ended, but it should run for ever")
        if error is not None and self._on_error is not None:
            self._on_error(f"{self.owner}.{name}", error)

    async def close(self) -> None:
        """Cancel every child and wait for it. Safe to call twice, and from a child (which is left
        to end by itself). If the caller is cancelled meanwhile, it waits no longer."""
        me = asyncio.current_task()
        children = [t for t in self._tasks if t is not me]
        for task in children:
            task.cancel()
        # Awaiting a child would make its cancellation look like one of this task, and the reverse.
        if children:
            await asyncio.wait(children)


def is_cancelled() -> bool:
    """Return True if somebody has cancelled the running task. Otherwise a CancelledError comes from
    a call that was ended with its channel."""
    me = asyncio.current_task()
    return me is not None and me.cancelling() > 0


async def together(*work: Coroutine[Any, Any, T]) -> list[T]:
    """Run all at once and return their results. None of them outlives this call: when one raises or
    the caller is cancelled, the others are cancelled and waited for.

    Raises the first exception that one of them raised.
    """
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in work]
        return [task.result() for task in tasks]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
