"""Calls between peers, at both ends. A token in the metadata names the caller. A channel adds it to
every call; by it and by the table of limits the server decides, before it reads the message.

gRPC's asyncio interceptors of clients put a queue and a task between a stream and its caller; a
label on the metadata needs neither. So the label is added where a call begins, and the call object
is gRPC's own (where a cap holds streams back, a thin cover of it).
"""

import asyncio
import contextlib
import inspect
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Generator
from dataclasses import dataclass
from functools import lru_cache, partial, partialmethod, wraps
from typing import Any

import grpc
import grpc.aio

from node.core.errors import OversizedMessage, WireError
from node.core.ids import PeerId
from node.identity.faults import TokenBucket, until_you_are_heard
from node.identity.places import PlacesByPeer, block_of
from node.identity.refusals import Refusals
from node.transport.connections import remote_of
from node.transport.handshake import Tokens
from node.transport.limits import FAVOUR, KIB, RPCS, Limit, SenderKind, limit_of, short
from node.transport.port import printable
from node.transport.traffic import Paced, PacedStream, Traffic
from node.wire.bounds import lenient, strict
from protos.training_pb2 import NoteReply

TOKEN_KEY = "tutti-token"

LONGEST_S = 1e6
"""Seconds until the end of admission above which a call is not watched: it ends earlier anyway."""
_EXPIRED = grpc.StatusCode.UNAUTHENTICATED, "admission expired; repeat the handshake"
SMALL = 64 * KIB
"""Bytes up to which a message needs no place of its own."""
LARGE_AT_ONCE = 32
"""Twice the number of large messages that strangers may send at once. gRPC holds up to 4 MiB of
each while it comes."""
_PLACE_LOST = (
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    "the place is needed for a peer with fewer calls",
)


@dataclass(eq=False)
class _Call:
    """A call under way. ``where``: gRPC's name for the caller's end of the connection. ``ends``:
    the reason for which it is ended, when it is."""

    peer: PeerId
    method: str
    where: str
    block: str
    admitted: asyncio.Timeout
    ends: tuple[grpc.StatusCode, str] = _EXPIRED


@dataclass(frozen=True)
class Callers:
    """This peer's knowledge of its callers. ``banned(peer)``: seconds for which the peer is still
    refused, 0 for none. ``established(peer)``: it is a member of the plan in force, or a colleague.
    ``leads(peer)``: this peer has taken it for its leader, and sent it a heartbeat. ``fault(peer,
    why, weight)`` counts a fault."""

    banned: Callable[[PeerId], float] = lambda peer: 0.0
    established: Callable[[PeerId], bool] = lambda peer: False
    leads: Callable[[PeerId], bool] = lambda peer: True
    fault: Callable[[PeerId, str, float], None] = lambda peer, why, weight: None


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """The place at which the table of limits (:mod:`node.transport.limits`) is enforced.

    Refused are, in this order: methods without a row (UNIMPLEMENTED), unknown tokens
    (UNAUTHENTICATED), banned peers (PERMISSION_DENIED), calls too often or beyond the places
    (RESOURCE_EXHAUSTED), messages that do not come in time (DEADLINE_EXCEEDED), are too large or
    from a sender that may not send them (INVALID_ARGUMENT). No message is parsed before that. Calls
    of a peer end when its admission does (UNAUTHENTICATED), and calls of strangers also when a
    stranger with fewer calls needs a place. ``traffic`` counts what passes, and holds it back.
    At most ``most`` calls are served at once, ``per_peer`` of one peer.
    ``slack()``: seconds by which this process is late. ``on_call(where, peer)`` is told of each
    call that gets a place; ``where`` is gRPC's name for the caller's end of the connection.
    """

    def __init__(
        self,
        tokens: Tokens,
        most: int,
        per_peer: int,
        traffic: Traffic,
        callers: Callers,
        refusals: Refusals,
        slack: Callable[[], float] = lambda: 0.0,
        on_call: Callable[[str, PeerId], None] = lambda where, peer: None,
    ) -> None:
        self.rows: dict[str, Limit] = dict(RPCS)
        """The limits by method. Programs with services of their own add rows."""
        self._tokens = tokens
        self._places = PlacesByPeer[_Call]("calls", most, per_peer, callers.established)
        self._large = PlacesByPeer[_Call]("large messages", LARGE_AT_ONCE, per_peer, by_turns=True)
        self._traffic = traffic
        self._callers = callers
        self._refusals = refusals
        self._slack = slack
        self._on_call = on_call
        self._running: set[_Call] = set()
        self._open: Counter[tuple[PeerId, str]] = Counter()
        self._rates: dict[tuple[str, bool], TokenBucket] = {}
        """Rate of each method's calls, for strangers (False) and for established peers (True)."""

    def caller(self, metadata: Any) -> PeerId | None:
        """The peer that the token in a call's metadata names; None for an unknown token."""
        shown = (value for key, value in metadata or () if key == TOKEN_KEY)
        return self._tokens.owner(str(next(shown, "")))

    def running(self) -> list[tuple[str, PeerId]]:
        """For each call under way gRPC's name for the caller's end of the connection, and the
        caller."""
        return [(call.where, call.peer) for call in self._running]

    def end(
        self,
        whose: Callable[[PeerId], bool],
        why: tuple[grpc.StatusCode, str] | None = None,
    ) -> None:
        """End the running calls of these peers with a status: ``why``, or None for the status of an
        admission that has run out."""
        for call in self._running:
            if whose(call.peer):
                _end(call, why or _EXPIRED)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """See grpc.aio.ServerInterceptor."""
        method = handler_call_details.method
        row = self.rows.get(method)
        if row is None:
            return _turn_away(grpc.StatusCode.UNIMPLEMENTED, "no such method")
        peer = self.caller(handler_call_details.invocation_metadata)
        if peer is None:
            self._refusals.count("token", None)
            return _turn_away(grpc.StatusCode.UNAUTHENTICATED, "unknown token; handshake first")
        if (left := self._callers.banned(peer)) > 0:
            self._refusals.count("ban", peer)
            return _turn_away(grpc.StatusCode.PERMISSION_DENIED, until_you_are_heard(left))
        rate = self._rate(method, row, self._callers.established(peer))
        if not rate.allow(peer, time.monotonic()):
            self._refusals.count("rate", peer)
            calls = f"{rate.burst:g} calls of {short(method)} at once, {rate.per_s:g} a second then"
            why = f"more than {calls}"
            return _turn_away(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
        handler: Any = await continuation(handler_call_details)
        if handler is None:
            return handler
        kind = _kind(handler.request_streaming, handler.response_streaming)
        inner = getattr(handler, kind)
        read = self._traffic.into(
            self._checked(peer, method, strict(handler.request_deserializer)),
            handler.request_streaming,
        )
        write = self._traffic.out(handler.response_serializer, handler.response_streaming)
        served = self._serve(inner, peer, method, None if handler.request_streaming else read)
        # gRPC reads the message of a unary call before the handler runs, and as long as it takes;
        # as a stream it is read when this handler asks for it.
        kind = _kind(True, handler.response_streaming)
        deserialise = read if handler.request_streaming else None
        return getattr(grpc, f"{kind}_rpc_method_handler")(served, deserialise, write)

    def _rate(self, method: str, row: Limit, established: bool) -> TokenBucket:
        """The calls that a peer may make of a method."""
        found = self._rates.get((method, established))
        if found is None:
            times = FAVOUR if established else 1.0
            found = TokenBucket(times * row.per_s, times * row.burst)
            self._rates[method, established] = found
        return found

    def _serve(
        self, inner: Any, peer: PeerId, method: str, read: Callable[[bytes], Any] | None
    ) -> Any:
        """``inner`` while ``peer`` holds a place; a generator function or a coroutine function, as
        it was. ``read`` parses the message of a call that has one."""
        if inspect.isasyncgenfunction(inner):

            @wraps(inner)
            async def generate(requests: Any, context: Any) -> Any:
                async with self._seated(peer, method, context) as call:
                    request = await self._message(call, requests, context, read)
                    if isinstance(request, _Instead):
                        return
                    answers = inner(*self._held_back(peer, request, context))
                    try:
                        async for answer in answers:
                            await self._traffic.may_send(peer, answer)
                            yield answer
                    finally:
                        await answers.aclose()

            return generate

        @wraps(inner)
        async def run(requests: Any, context: Any) -> Any:
            async with self._seated(peer, method, context) as call:
                request = await self._message(call, requests, context, read)
                if isinstance(request, _Instead):
                    return request.answer
                return await inner(*self._held_back(peer, request, context))

        return run

    async def _message(
        self,
        call: _Call,
        requests: Any,
        context: Any,
        read: Callable[[bytes], Any] | None,
    ) -> Any:
        """The message of a call that has one, in its time; of a stream the messages to come."""
        await self._hold(call, context)
        if read is None:
            return requests
        row = self.rows[call.method]
        raw: Any = None
        try:
            async with asyncio.timeout(row.within_s + self._slack()):
                raw = await context.read()
        except TimeoutError:
            self._refusals.count("late", call.peer)
            why = f"the message of {short(call.method)} did not come in time"
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, why)
        finally:
            self._large.leave(call)
        if not isinstance(raw, bytes):
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "a call without its message")
        return read(raw)

    async def _hold(self, call: _Call, context: Any) -> None:
        """Take a place for a large message of a stranger, which gRPC holds while it comes, or abort
        the call."""
        if self.rows[call.method].size <= SMALL or self._callers.established(call.peer):
            return
        taken = self._large.take(call, call.peer, call.block, time.monotonic())
        if taken.evicted is not None:
            self._refusals.count("place", taken.evicted.peer)
            _end(taken.evicted, _PLACE_LOST)
        if not taken:
            self._refusals.count("place", call.peer)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, taken.refusal)

    def _checked(
        self, peer: PeerId, method: str, parse: Callable[[bytes], Any] | None
    ) -> Callable[[bytes], Any]:
        """``parse`` for messages within their limit. Raises WireError for another one."""

        def checked(raw: bytes) -> Any:
            name, row = limit_of(method, self.rows[method], raw)
            if row.sender is SenderKind.LEADER and not self._callers.leads(peer):
                self._refusals.count("sender", peer)
                self._callers.fault(peer, f"{name} of a peer that does not lead", row.breach)
                return _Instead(NoteReply(reason="this peer follows another leader"))
            if len(raw) > row.size:
                self._refusals.count("size", peer)
                raise OversizedMessage(name, len(raw), row.size)
            if parse:
                return parse(raw)
            return raw

        return checked

    @contextlib.asynccontextmanager
    async def _seated(self, peer: PeerId, method: str, context: Any) -> AsyncIterator[_Call]:
        """While a place is held; the call ends when the caller's admission does, which may have
        been while its message came."""
        if not (left := self._tokens.left(peer)):
            await context.abort(*_EXPIRED)
        admitted = asyncio.timeout(left if left < LONGEST_S else None)
        where = context.peer()
        call = _Call(peer, method, where, self._block(where, peer), admitted)
        await self._take(call, context)
        try:
            try:
                async with call.admitted:
                    yield call
            finally:
                # Before an abort, which waits for the caller to read it.
                self._release(call)
        except TimeoutError:
            if not call.admitted.expired():
                raise
            await context.abort(*call.ends)
        except WireError as e:
            # Slightly too large may be another version of this program. Far too large is an attack.
            times = e.times if isinstance(e, OversizedMessage) else 1.0
            self._callers.fault(peer, str(e), times * self.rows[method].breach)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, printable(str(e)))

    def _release(self, call: _Call) -> None:
        """Give back all that a call holds."""
        self._running.discard(call)
        self._places.leave(call)
        self._large.leave(call)
        self._open[call.peer, call.method] -= 1
        if not self._open[call.peer, call.method]:
            del self._open[call.peer, call.method]

    async def _take(self, call: _Call, context: Any) -> None:
        """Hold a place for the call, or abort it."""
        peer = call.peer
        method = call.method
        most = self.rows[method].at_once
        if self._callers.established(peer):
            most = self._places.per_peer
        refusal = ""
        if self._open[peer, method] >= most:
            refusal = f"{most} calls of {short(method)} of this peer are open"
        else:
            taken = self._places.take(call, peer, call.block)
            refusal = taken.refusal
            if taken.evicted is not None:
                self._refusals.count("place", taken.evicted.peer)
                _end(taken.evicted, _PLACE_LOST)
        if refusal:
            self._refusals.count("place", peer)
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, refusal)
        self._open[peer, method] += 1
        self._running.add(call)

    def _block(self, where: str, peer: PeerId) -> str:
        """The address block of a caller. Callers through a tunnel come from this machine, and share
        a block."""
        self._on_call(where, peer)
        remote = remote_of(where)
        if remote is not None:
            return block_of(remote[0])
        return where

    def _held_back(self, peer: PeerId, request: Any, context: Any) -> tuple[Any, Any]:
        """The messages of a call; where a cap is set, each waits for its turn."""
        if not self._traffic.capped:
            return request, context
        reads = partial(self._traffic.may_read, peer)
        sends = partial(self._traffic.may_send, peer)
        paced = PacedStream(context, reads, sends)
        return Paced(request, reads) if hasattr(request, "__aiter__") else request, paced


@dataclass(frozen=True)
class _Instead:
    """An answer to give instead of asking the servicer."""

    answer: Any


def _end(call: _Call, why: tuple[grpc.StatusCode, str]) -> None:
    """End a call from outside, with this status."""
    if not call.admitted.expired():
        call.ends = why
        call.admitted.reschedule(0.0)


def _kind(requests: bool, answers: bool) -> str:
    """The name that gRPC has for calls with streams of requests, and of answers."""
    return "_".join("stream" if streamed else "unary" for streamed in (requests, answers))


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
        self.raw = raw
        self.label = label
        self.fresh = fresh
        self.on_stream = on_stream
        self.traffic = traffic or Traffic()
        self.peer = peer or PeerId("")
        self.used = time.monotonic()
        self._open = 0
        self._made: dict[tuple[str, Any], Any] = {}

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
        made = self._made.get((method, request_serializer))
        if made is not None:
            return made
        traffic = self.traffic
        stream = kind != "unary_unary"
        inner = getattr(self.raw, kind)(
            method,
            traffic.out(request_serializer, kind.startswith("stream")),
            traffic.into(lenient(response_deserializer), kind.endswith("stream")),
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
            self.used = time.monotonic()
            self._open += 1
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
            self._made[method, request_serializer] = begin
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
        self._call = call
        self._again = again
        self._channel = channel

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
