"""gRPC's messages counted as they are serialised, and held back where a cap says so. See
:mod:`node.transport.traffic`."""

from __future__ import annotations

from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Iterator
from typing import Any

from node.core.ids import PeerId
from node.transport.traffic import BULK, Traffic

Coder = Callable[[Any], Any] | None
"""A serialiser or a deserialiser of messages; None: they are bytes."""


class ByteMeter:
    """``traffic`` at the places where messages leave and come. Streams wait where there is a cap;
    calls of one message each way count and never wait."""

    def __init__(self, traffic: Traffic) -> None:
        self.traffic = traffic
        self.waits = traffic.capped

    def out(self, serialise: Coder, stream: bool) -> Callable[[Any], bytes]:
        """``serialise``, counting what it makes."""
        count = self.traffic.count_sent

        def told(message: Any) -> bytes:
            data = serialise(message) if serialise else message
            count(len(data), stream and len(data) >= BULK)
            return data

        return told

    def into(self, deserialise: Coder, stream: bool) -> Callable[[bytes], Any]:
        """``deserialise``, counting what comes."""
        count = self.traffic.count_received

        def told(data: bytes) -> Any:
            count(len(data), stream and len(data) >= BULK)
            return deserialise(data) if deserialise else data

        return told

    async def sends(self, peer: PeerId, message: Any) -> None:
        """Wait until ``message`` may go to ``peer``."""
        await self.traffic.may_send(peer, size_of(message))

    async def reads(self, peer: PeerId, message: Any) -> None:
        """Wait until ``message``, which has come from ``peer``, may be handed on."""
        await self.traffic.may_read(peer, size_of(message))


def size_of(message: Any) -> int:
    """Bytes of a message that was not serialised yet; 0 for none."""
    if isinstance(message, bytes):
        return len(message)
    return message.ByteSize() if hasattr(message, "ByteSize") else 0


class Paced:
    """``messages``, each after ``turn(message)``. Unlike a generator it goes on after it was
    cancelled."""

    def __init__(
        self, messages: AsyncIterable[Any] | Iterable[Any], turn: Callable[[Any], Awaitable[None]]
    ) -> None:
        self._messages: Any = (
            aiter(messages) if isinstance(messages, AsyncIterable) else iter(messages)
        )
        self._turn = turn

    def __aiter__(self) -> Paced:
        return self

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
