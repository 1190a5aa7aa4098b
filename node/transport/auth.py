"""Who may call our gRPC server: the token in the metadata names the caller, before a byte of the
body is read."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
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
        self._too_many = (
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"{seats.per_peer} calls of this caller are open",
        )

    def caller(self, metadata: Any) -> PeerId | None:
        """The peer that the token in a call's metadata names; None for an unknown token."""
        shown = (value for key, value in metadata or () if key == TOKEN_KEY)
        return self._tokens.owner(str(next(shown, "")))

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
            self._traffic.into(handler.request_deserializer, any(streams)),
            self._traffic.out(handler.response_serializer, any(streams)),
        )

    def _count(self, inner: Any, peer: PeerId) -> Any:
        """``inner`` while ``peer`` holds a seat; a generator function or a coroutine function, as
        it was."""
        if inspect.isasyncgenfunction(inner):

            @functools.wraps(inner)
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

        @functools.wraps(inner)
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
                yield
        except TimeoutError:
            if not admitted.expired():
                raise
            await context.abort(*_EXPIRED)
        finally:
            self._seats.leave(peer)

    def _held_back(self, peer: PeerId, request: Any, context: Any) -> tuple[Any, Any]:
        """The messages of a call; where a cap is set, each waits for its turn."""
        if not self._traffic.capped:
            return request, context
        reads, sends = (
            functools.partial(self._traffic.may_read, peer),
            functools.partial(self._traffic.may_send, peer),
        )
        return Paced(request, reads) if hasattr(request, "__aiter__") else request, PacedStream(
            context, reads, sends
        )


@functools.lru_cache(maxsize=64)
def _turn_away(code: grpc.StatusCode, why: str) -> grpc.RpcMethodHandler:
    async def refuse(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(code, why)

    # Stream to stream whatever the method is: gRPC reads a unary request before the method runs, a
    # stream's only on demand.
    return grpc.stream_stream_rpc_method_handler(refuse)
