"""A channel that says who is calling, without the price of client interceptors.

gRPC's asyncio interceptors put a queue and a task between a stream and its caller; a label on the
metadata needs neither. So the label is added where a call begins, and the call object is gRPC's own
(where a cap holds streams back, a thin cover of it).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Generator
from functools import partial, partialmethod
from typing import Any

import grpc
import grpc.aio

from node.core.ids import PeerId
from node.transport.traffic import Paced, PacedStream, Traffic


class LabelledChannel(grpc.aio.Channel):
    """``raw`` with ``label`` added to the metadata of every call.

    ``fresh`` (optional) makes a new channel to the same peer. It is used once by a unary call that
    the peer refused as UNAUTHENTICATED: it never reached a servicer, so repeating it is safe.
    ``on_stream`` sees every streaming call, for the owner to watch how it ends. ``traffic`` counts
    what goes to ``peer`` and comes from it, and holds it back. ``used`` (monotonic): when the last
    call began or ended.
    """

    def __init__(
        self,
        raw: grpc.aio.Channel,
        label: tuple[tuple[str, str], ...],
        fresh: Callable[[], Awaitable[LabelledChannel]] | None = None,
        on_stream: Callable[[Any], None] | None = None,
        traffic: Traffic | None = None,
        peer: PeerId | None = None,
    ) -> None:
        self.raw, self.label, self.fresh, self.on_stream = raw, label, fresh, on_stream
        self.traffic = traffic or Traffic()
        self.peer = peer or PeerId("")
        self.used = time.monotonic()
        self._open = 0
        self._made: dict[str, Any] = {}

    def idle_s(self, now: float) -> float:
        """Seconds since the last call; 0 while one is open."""
        return 0.0 if self._open else now - self.used

    def _ended(self, _: Any) -> None:
        self._open -= 1
        self.used = time.monotonic()

    def _labelled(
        self,
        kind: str,
        method: str,
        request_serializer: Any = None,
        response_deserializer: Any = None,
        _registered_method: bool | None = False,
    ) -> Callable[..., Any]:
        made = self._made.get(method)
        if made is not None:
            return made
        traffic, stream = self.traffic, kind != "unary_unary"
        inner = getattr(self.raw, kind)(
            method,
            traffic.out(request_serializer, stream),
            traffic.into(response_deserializer, stream),
            _registered_method=_registered_method,
        )

        def begin(request: Any = None, *, metadata: Any = None, **options: Any) -> Any:
            label = (*self.label, *metadata) if metadata else self.label
            paced = traffic.capped and stream
            if paced and kind.startswith("stream") and request is not None:
                request = Paced(request, partial(traffic.may_send, self.peer))
            given = () if request is None and kind.startswith("stream") else (request,)
            try:
                call = inner(*given, metadata=label, **options)
            except grpc.aio.UsageError as e:
                # Whoever closed the channel meanwhile ended this peer's calls: to the caller that
                # is a lost connection.
                raise grpc.aio.AioRpcError(
                    grpc.StatusCode.UNAVAILABLE,
                    grpc.aio.Metadata(),
                    grpc.aio.Metadata(),
                    f"channel closed: {e}",
                ) from e
            self.used, self._open = time.monotonic(), self._open + 1
            call.add_done_callback(self._ended)
            if not stream:
                if self.fresh is None:
                    return call
                return _UnaryCall(
                    call,
                    lambda other: other.unary_unary(
                        method, request_serializer, response_deserializer, _registered_method
                    )(request, **options),
                    self,
                )
            if self.on_stream is not None:
                self.on_stream(call)
            if not paced or not kind.endswith("stream"):
                return call
            return PacedStream(
                call, partial(traffic.may_read, self.peer), partial(traffic.may_send, self.peer)
            )

        if _registered_method:
            # Generated stubs come by again for every call with the same serialisers; others may
            # bring new ones.
            self._made[method] = begin
        return begin

    unary_unary: Any = partialmethod(_labelled, "unary_unary")
    unary_stream: Any = partialmethod(_labelled, "unary_stream")
    stream_unary: Any = partialmethod(_labelled, "stream_unary")
    stream_stream: Any = partialmethod(_labelled, "stream_stream")

    async def __aenter__(self) -> LabelledChannel:
        return self

    async def __aexit__(self, *exc: object) -> None:
        """The transport owns the channel and shares it: a caller's ``async with`` must not end it
        for the others."""

    async def close(self, grace: float | None = None) -> None:
        await self.raw.close(grace)

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        return self.raw.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        await self.raw.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        await self.raw.channel_ready()


class _UnaryCall:
    """A unary call that asks for a fresh channel once if its label is refused. Everything else is
    gRPC's call."""

    def __init__(
        self, call: Any, again: Callable[[LabelledChannel], Any], channel: LabelledChannel
    ) -> None:
        self._call, self._again, self._channel = call, again, channel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    def __await__(self) -> Generator[Any, None, Any]:
        return self._answer().__await__()

    async def _answer(self) -> Any:
        try:
            return await self._call
        except grpc.aio.AioRpcError as e:
            if e.code() is not grpc.StatusCode.UNAUTHENTICATED or self._channel.fresh is None:
                raise
        fresh = await self._channel.fresh()
        self._call = self._again(
            LabelledChannel(fresh.raw, fresh.label, traffic=fresh.traffic, peer=fresh.peer)
        )
        return await self._call
