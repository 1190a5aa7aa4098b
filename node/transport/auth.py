"""Who calls: a token in the metadata names the caller. A channel adds it to every call; the server
knows by it who may call, before a byte of the body is read.

gRPC's asyncio interceptors of clients put a queue and a task between a stream and its caller; a
label on the metadata needs neither. So the label is added where a call begins, and the call object
is gRPC's own (where a cap holds streams back, a thin cover of it).
"""

import asyncio
import contextlib
import inspect
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from functools import lru_cache, partial, partialmethod, wraps
from typing import Any

import grpc
import grpc.aio

from node.core.ids import PeerId
from node.identity.faults import until_heard
from node.transport.handshake import Tokens
from node.transport.traffic import Paced, PacedStream, Seats, Traffic

TOKEN_KEY = "tutti-token"

LONGEST_S = 1e6
"""A call is not watched for an end of admission that is further away: no call lasts so long."""
_EXPIRED = grpc.StatusCode.UNAUTHENTICATED, "admission expired; repeat the handshake"


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Refuses unknown tokens (UNAUTHENTICATED), banned peers (PERMISSION_DENIED) and a peer's call
    too many (RESOURCE_EXHAUSTED), and ends the calls of a peer whose admission runs out
    (UNAUTHENTICATED). ``banned(peer)`` is the seconds a peer has left outside, 0 for none;
    ``traffic`` counts what passes, and holds it back."""

    def __init__(
        self,
        tokens: Tokens,
        seats: Seats,
        banned: Callable[[PeerId], float],
        traffic: Traffic,
    ) -> None:
        self._tokens, self._seats, self._banned, self._traffic = tokens, seats, banned, traffic
        self._running: dict[asyncio.Timeout, PeerId] = {}
        self._too_many = (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"{seats.per_peer} calls of this caller are open",
        )

    def caller(self, metadata: Any) -> PeerId | None:
        """The peer that the token in a call's metadata names; None for an unknown token."""
        shown = (value for key, value in metadata or () if key == TOKEN_KEY)
        return self._tokens.owner(str(next(shown, "")))

    def end(self, whose: Callable[[PeerId], bool]) -> None:
        """End the running calls of these peers, as when their admission runs out."""
        for admitted, peer in self._running.items():
            if whose(peer) and not admitted.expired():
                admitted.reschedule(0.0)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        peer = self.caller(handler_call_details.invocation_metadata)
        if peer is None:
            return _turn_away(grpc.StatusCode.UNAUTHENTICATED, "unknown token; handshake first")
        if (left := self._banned(peer)) > 0:
            return _turn_away(grpc.StatusCode.PERMISSION_DENIED, f"you: {until_heard(left)}")
        if not self._seats.free(peer):
            return _turn_away(*self._too_many)
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler
        streams = handler.request_streaming, handler.response_streaming
        kind = "_".join("stream" if streamed else "unary" for streamed in streams)
        return getattr(grpc, f"{kind}_rpc_method_handler")(
            self._count(getattr(handler, kind), peer),
            self._traffic.into(handler.request_deserializer, handler.request_streaming),
            self._traffic.out(handler.response_serializer, handler.response_streaming),
        )

    def _count(self, inner: Any, peer: PeerId) -> Any:
        """``inner`` while ``peer`` holds a seat; a generator function or a coroutine function, as
        it was."""
        if inspect.isasyncgenfunction(inner):

            @wraps(inner)
            async def generate(request: Any, context: Any) -> Any:
                async with self._seated(peer, context):
                    answers = inner(*self._held_back(peer, request, context))
                    try:
                        async for answer in answers:
                            await self._traffic.may_send(peer, answer)
                            yield answer
                    finally:
                        await answers.aclose()

            return generate

        @wraps(inner)
        async def run(request: Any, context: Any) -> Any:
            async with self._seated(peer, context):
                return await inner(*self._held_back(peer, request, context))

        return run

    @contextlib.asynccontextmanager
    async def _seated(self, peer: PeerId, context: Any) -> AsyncIterator[None]:
        """While a seat is held; the call ends when the caller's admission does, which may have been
        while its body came."""
        if not (left := self._tokens.left(peer)):
            await context.abort(*_EXPIRED)
        if not self._seats.take(peer):
            await context.abort(*self._too_many)
        admitted = asyncio.timeout(left if left < LONGEST_S else None)
        try:
            async with admitted:
                self._running[admitted] = peer
                yield
        except TimeoutError:
            if not admitted.expired():
                raise
            await context.abort(*_EXPIRED)
        finally:
            self._running.pop(admitted, None)
            self._seats.leave(peer)

    def _held_back(self, peer: PeerId, request: Any, context: Any) -> tuple[Any, Any]:
        """The messages of a call; where a cap is set, each waits for its turn."""
        if not self._traffic.capped:
            return request, context
        reads, sends = (
            partial(self._traffic.may_read, peer),
            partial(self._traffic.may_send, peer),
        )
        return Paced(request, reads) if hasattr(request, "__aiter__") else request, PacedStream(
            context, reads, sends
        )


@lru_cache(maxsize=64)
def _turn_away(code: grpc.StatusCode, why: str) -> grpc.RpcMethodHandler:
    async def refuse(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(code, why)

    # Stream to stream whatever the method is: gRPC reads a unary request before the method runs, a
    # stream's only on demand.
    return grpc.stream_stream_rpc_method_handler(refuse)


# ----------------------------------------------------------- the caller's side


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
        fresh: "Callable[[], Awaitable[LabelledChannel]] | None" = None,
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
            traffic.out(request_serializer, kind.startswith("stream")),
            traffic.into(response_deserializer, kind.endswith("stream")),
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

    async def __aenter__(self) -> "LabelledChannel":
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
