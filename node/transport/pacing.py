"""Messages of a gRPC stream that wait for their turns, where a cap says so. See
:mod:`node.transport.traffic`."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any


class Paced(AsyncIterator[Any]):
    """``messages``, each after ``turn(message)``. Unlike a generator it goes on after it was
    cancelled."""

    def __init__(
        self, messages: AsyncIterable[Any] | Iterable[Any], turn: Callable[[Any], Awaitable[None]]
    ) -> None:
        self._messages: Any = (
            aiter(messages) if isinstance(messages, AsyncIterable) else iter(messages)
        )
        self._turn = turn

    async def __anext__(self) -> Any:
        if isinstance(self._messages, Iterator):
            try:
                message = next(self._messages)
            except StopIteration:
                raise StopAsyncIteration from None
        else:
            message = await anext(self._messages)
        await self._turn(message)
        return message


class PacedStream:
    """A call or a servicer's context whose messages wait: ``read`` hands on after
    ``reads(message)``, ``write`` sends after ``sends(message)``. All else is ``raw``'s."""

    def __init__(
        self,
        raw: Any,
        reads: Callable[[Any], Awaitable[None]],
        sends: Callable[[Any], Awaitable[None]],
    ) -> None:
        self._raw, self._reads, self._sends = raw, reads, sends

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)

    async def read(self) -> Any:
        message = await self._raw.read()
        await self._reads(message)
        return message

    async def write(self, message: Any) -> None:
        await self._sends(message)
        await self._raw.write(message)

    def __aiter__(self) -> Paced:
        return Paced(self._raw, self._reads)
