"""The transport without a network: real gRPC servers, insecure, on loopback; all in one process,
unless they are told of another.

It has the same port as `service.Transport`. The caller's name is written in the metadata and
believed, so this is for tests and one-process demonstrations only. Faults are made with
:meth:`MemoryNet.kill`, :meth:`MemoryNet.cut` and :meth:`MemoryNet.mute`.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import grpc
import grpc.aio

from node.core.errors import PeerFault, WireError
from node.core.ids import PeerId
from node.core.patience import Patience
from node.transport.auth import LabelledChannel
from node.transport.port import PeerLink, translate

PEER_KEY = "tutti-peer"
_OPTIONS = (("grpc.max_receive_message_length", 64 << 20), ("grpc.so_reuseport", 0))
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.use_local_subchannel_pool", 1),
)


class MemoryNet:
    """All transports of one process that can see each other."""

    def __init__(self) -> None:
        self.transports: dict[PeerId, MemoryTransport] = {}
        self._elsewhere: dict[PeerId, str] = {}
        self._cut: set[tuple[PeerId, PeerId]] = set()
        self._muted: set[PeerId] = set()

    def transport(self, peer: PeerId | str) -> "MemoryTransport":
        """A new transport for ``peer``; replaces a dead one of the same name. Call its ``start()``
        after the servicers are added."""
        made = MemoryTransport(self, PeerId(peer))
        self.transports[made.peer_id] = made
        return made

    def elsewhere(self, peer: PeerId, address: str) -> None:
        """``peer`` is in another process, where its transport listens at ``address``."""
        self._elsewhere[peer] = address

    def address(self, peer: PeerId) -> str:
        """Where a peer listens; empty when it does not, or nobody knows it."""
        here = self.transports.get(peer)
        return self._elsewhere.get(peer, "") if here is None else here.address

    async def kill(self, peer: PeerId) -> None:
        """As SIGKILL: its server and its channels are gone, calls in flight fail at both ends."""
        await self.transports[peer].close()

    def cut(self, a: PeerId, b: PeerId) -> None:
        """New calls between the two fail at once, both ways."""
        self._cut |= {(a, b), (b, a)}

    def mend(self, a: PeerId, b: PeerId) -> None:
        """Undo :meth:`cut`."""
        self._cut -= {(a, b), (b, a)}

    def mute(self, peer: PeerId, muted: bool = True) -> None:
        """New calls to the peer are accepted and never answered: what a frozen process looks
        like."""
        (self._muted.add if muted else self._muted.discard)(peer)

    async def close(self) -> None:
        """End every transport."""
        for transport in list(self.transports.values()):
            await transport.close()

    def is_cut(self, a: PeerId, b: PeerId) -> bool:
        return (a, b) in self._cut

    def is_muted(self, peer: PeerId) -> bool:
        return peer in self._muted


class MemoryTransport:
    """One peer of a :class:`MemoryNet`."""

    def __init__(self, net: MemoryNet, peer: PeerId) -> None:
        self._net = net
        self.peer_id = peer
        self.address = ""
        """Where it listens; empty before it starts and after it has closed."""
        self._channels: dict[PeerId, tuple[str, LabelledChannel]] = {}
        self._retired: list[LabelledChannel] = []
        self._bytes: dict[PeerId, list[int]] = {}
        self._server: grpc.aio.Server | None = None
        self.faults: list[tuple[PeerId, str, float]] = []
        self.patience = Patience()

    @property
    def server(self) -> grpc.aio.Server:
        if self._server is None:  # made late: gRPC wants the loop that will run it
            self._server = grpc.aio.server(
                interceptors=[_Auth(self._net, self.peer_id)], options=_OPTIONS
            )
        return self._server

    async def start(self) -> None:
        """Begin to serve on a free loopback port."""
        ping = grpc.unary_unary_rpc_method_handler(_echo)
        self.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("tutti.v1.Link", {"Ping": ping}),)
        )
        port = self.server.add_insecure_port("127.0.0.1:0")
        await self.server.start()
        self.address = f"127.0.0.1:{port}"

    async def close(self) -> None:
        """Stop serving and close every channel; safe to call twice."""
        self.address = ""
        channels = [c for _, c in self._channels.values()] + self._retired
        self._channels.clear()
        self._retired.clear()
        for channel in channels:
            await channel.close()
        await self.server.stop(None)

    async def channel(self, peer: PeerId) -> grpc.aio.Channel:
        there = self._net.address(peer)
        if not self.address or not there or self._net.is_cut(self.peer_id, peer):
            raise PeerFault(peer, "cannot be reached")
        address, channel = self._channels.get(peer, ("", None))
        if channel is None or address != there:
            self.forget(peer)
            raw = grpc.aio.insecure_channel(there, options=_CHANNEL_OPTIONS)
            channel = LabelledChannel(raw, ((PEER_KEY, self.peer_id),))
            self._channels[peer] = there, channel
        return channel

    def caller(self, context: Any) -> PeerId:
        for key, value in context.invocation_metadata() or ():
            if key == PEER_KEY:
                return PeerId(str(value))
        raise PeerFault(PeerId("unknown"), "call without a name")

    def on_lost(self, callback: Callable[[PeerId], None]) -> None:
        """Nobody is called: who calls a lost peer is told by the call."""

    def forget(self, peer: PeerId) -> None:
        _, channel = self._channels.pop(peer, ("", None))
        if channel is not None:
            self._retired.append(channel)

    def has_met(self, peer: PeerId) -> bool:
        return peer in self._channels

    def doubt(self, peer: PeerId) -> None:
        """Nothing is dialled here."""

    def path(self, peer: PeerId) -> str:
        return "direct" if peer in self._channels else ""

    def rate_left(self, peer: PeerId) -> float:
        return 0.0

    def caps(self) -> tuple[float, float]:
        return 0.0, 0.0

    def leave(self, peer: PeerId, data: memoryview) -> bytes | None:
        return None

    def withdraw(self, peer: PeerId, places: Sequence[bytes]) -> None:
        """Nothing is left here."""

    def fetch(self, peer: PeerId, place: bytes, into: memoryview) -> int:
        raise WireError("no memory is shared here")

    def expel(
        self, revoked: Callable[[PeerId], bool], out: Callable[[PeerId], bool] | None = None
    ) -> None:
        """Nobody is put out here."""

    def fault(self, peer: PeerId, reason: str, weight: float = 1.0) -> None:
        self.faults.append((peer, reason, weight))

    def count(self, peer: PeerId, sent: int = 0, received: int = 0, plane: str = "bulk") -> None:
        total = self._bytes.setdefault(peer, [0, 0])
        total[0] += sent
        total[1] += received

    def peers(self) -> dict[PeerId, PeerLink]:
        known = self._channels.keys() | self._bytes.keys()
        return {p: PeerLink(self.path(p), 0.0, *self._bytes.get(p, (0, 0)), name=p) for p in known}

    async def ping(self, peer: PeerId, timeout: float = 5.0) -> float:
        channel = await self.channel(peer)
        began = time.monotonic()
        try:
            await channel.unary_unary("/tutti.v1.Link/Ping")(b"", timeout=timeout)
        except grpc.aio.AioRpcError as e:
            raise translate(peer, e) from e
        return time.monotonic() - began


class _Auth(grpc.aio.ServerInterceptor):
    """Makes the faults of a net true on the side of the called."""

    def __init__(self, net: MemoryNet, me: PeerId) -> None:
        self._net = net
        self._me = me

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        names = [
            PeerId(str(v))
            for k, v in handler_call_details.invocation_metadata or ()
            if k == PEER_KEY
        ]
        if self._net.is_muted(self._me):
            return grpc.stream_stream_rpc_method_handler(_silence)
        if not names:
            return grpc.stream_stream_rpc_method_handler(_unknown)
        if self._net.is_cut(names[0], self._me):
            return grpc.stream_stream_rpc_method_handler(_unreachable)
        return await continuation(handler_call_details)


async def _silence(requests: Any, context: grpc.aio.ServicerContext) -> None:
    await asyncio.Event().wait()


async def _unknown(requests: Any, context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNAUTHENTICATED, "who is calling?")


async def _unreachable(requests: Any, context: grpc.aio.ServicerContext) -> None:
    await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")


async def _echo(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
    return request
