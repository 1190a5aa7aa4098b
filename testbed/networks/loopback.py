"""Many nodes of a DHT in one process: hivemind's P2P over TCP sockets on loopback, without p2pd.

A :class:`LoopbackP2P` takes the place of ``hivemind.p2p.P2P`` under ``Directory`` and ``DHTNode``,
for requests with one answer. Every two nodes that speak share one connection, as in libp2p. A
peer's address is a function of its PeerId, so no address is ever looked up, and the name a caller
gives is believed.
"""

import asyncio
import hashlib
import struct
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import node.core.bare  # noqa: F401  first: hivemind without its averager and optimizer

# isort: split
from hivemind.p2p import P2PContext, PeerID
from hivemind.p2p.p2p_daemon_bindings.utils import P2PHandlerError

from node.core.ids import PeerId

FIRST_PORT = 21_000
"""Below the ports that Linux takes for outgoing connections."""
_HEAD = struct.Struct(">IBI")
"""Bytes that follow, kind of frame, number of the call."""
_HELLO, _ASK, _ANSWER, _FAILED = range(4)
_Served = Callable[[bytes, PeerID], Awaitable[bytes]]


def address_of(peer: PeerId) -> tuple[str, int]:
    """The host and port of a peer, drawn from all of 127.0.0.0/8 and 256 ports by a hash."""
    drawn = hashlib.sha256(peer.encode()).digest()
    return f"127.{drawn[0]}.{drawn[1]}.{1 + drawn[2] % 254}", FIRST_PORT + drawn[3]


def multiaddr_of(peer: PeerId) -> str:
    """The multiaddr of a peer, which ends in its PeerId."""
    host, port = address_of(peer)
    return f"/ip4/{host}/tcp/{port}/p2p/{peer}"


class LoopbackP2P:
    """One node's sockets. A node that :meth:`fall_silent` keeps its connections and never answers
    again, as a machine that lost its power; one that is closed refuses connections."""

    def __init__(self, peer: PeerId) -> None:
        self.peer_id = PeerID.from_base58(peer)
        self.silent = False
        self.links: dict[PeerId, _Link] = {}
        """Connections, by the peer at the other end."""
        self._client = self
        """hivemind dials through its client, which is this node too."""
        self._handlers: dict[str, _Served] = {}
        self._dials: dict[PeerId, asyncio.Task[_Link]] = {}
        self._serving = set[asyncio.Task[None]]()
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen at the address of this node."""
        host, port = address_of(PeerId(self.peer_id.to_base58()))
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _Link(self), host, port)

    async def shutdown(self) -> None:
        """End all connections and stop listening."""
        for task in (*self._dials.values(), *self._serving):
            task.cancel()
        if self._server is not None:
            self._server.close()
        for link in list(self.links.values()):
            link.end()

    def fall_silent(self) -> None:
        """Answer nothing from now on, and keep all connections."""
        self.silent = True

    async def connect(self, peer: PeerID, addresses: Sequence[Any]) -> None:
        """Connect to a peer, at its own address. Raises OSError."""
        await self._link(peer)

    async def add_protobuf_handler(
        self, name: str, handler: Any, request_type: Any, **options: bool
    ) -> None:
        """Answer the requests of a name."""

        async def served(request: bytes, caller: PeerID) -> bytes:
            context = P2PContext(name, self.peer_id, caller)
            answer = await handler(request_type.FromString(request), context)
            return answer.SerializeToString()

        self._handlers[name] = served

    async def remove_protobuf_handler(self, name: str, **options: bool) -> None:
        """Answer the requests of a name no longer."""
        self._handlers.pop(name, None)

    async def call_protobuf_handler(
        self, peer: PeerID, name: str, request: Any, answer_type: Any
    ) -> Any:
        """Ask a peer, and wait for its answer. Raises OSError if it cannot be reached or its
        connection ends, P2PHandlerError if its handler failed."""
        link = await self._link(peer)
        return answer_type.FromString(await link.ask(name, request.SerializeToString()))

    async def _link(self, peer: PeerID) -> "_Link":
        """The connection to a peer, dialled once if there is none."""
        name = PeerId(peer.to_base58())
        if (link := self.links.get(name)) is not None:
            return link
        dial = self._dials.get(name)
        if dial is None:
            dial = asyncio.create_task(self._dial(peer))
            self._dials[name] = dial
            dial.add_done_callback(lambda task: self._dialled(name, task))
        return await asyncio.shield(dial)

    async def _dial(self, peer: PeerID) -> "_Link":
        host, port = address_of(PeerId(peer.to_base58()))
        loop = asyncio.get_running_loop()
        _, link = await loop.create_connection(lambda: _Link(self, peer), host, port)
        return link

    def _dialled(self, peer: PeerId, task: asyncio.Task["_Link"]) -> None:
        self._dials.pop(peer, None)
        if not task.cancelled():
            task.exception()  # whoever waits has it too

    def serve(self, link: "_Link", call: int, body: bytes) -> None:
        """Answer a request that came over a connection."""
        task = asyncio.create_task(self._serve(link, call, body))
        self._serving.add(task)
        task.add_done_callback(self._serving.discard)

    async def _serve(self, link: "_Link", call: int, body: bytes) -> None:
        name = body[1 : 1 + body[0]].decode()
        handler = self._handlers.get(name)
        if handler is None or link.peer is None:
            link.send(_FAILED, call, f"no handler {name}".encode())
            return
        try:
            link.send(_ANSWER, call, await handler(body[1 + body[0] :], link.peer))
        except Exception as e:  # noqa: BLE001  p2pd too tells the caller whatever a handler raises
            link.send(_FAILED, call, repr(e).encode())


class _Link(asyncio.Protocol):
    """A connection. ``peer``: the peer that was dialled; None: the other side says who it is."""

    def __init__(self, node: LoopbackP2P, peer: PeerID | None = None) -> None:
        self.peer = peer
        self._node = node
        self._asked: dict[int, asyncio.Future[bytes]] = {}
        self._calls = 0
        self._received = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self.peer is not None:
            self.send(_HELLO, 0, self._node.peer_id.to_bytes())
            self._node.links[PeerId(self.peer.to_base58())] = self

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self.peer is not None:
            name = PeerId(self.peer.to_base58())
            if self._node.links.get(name) is self:
                del self._node.links[name]
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(ConnectionResetError("the peer is gone"))

    def data_received(self, data: bytes) -> None:
        if self._node.silent:
            return
        self._received += data
        begin = 0
        while len(self._received) - begin >= _HEAD.size:
            size, kind, call = _HEAD.unpack_from(self._received, begin)
            end = begin + _HEAD.size + size
            if len(self._received) < end:
                break
            self._take(kind, call, bytes(self._received[begin + _HEAD.size : end]))
            begin = end
        del self._received[:begin]

    def _take(self, kind: int, call: int, body: bytes) -> None:
        if kind == _HELLO:
            self.peer = PeerID(body)
            self._node.links.setdefault(PeerId(self.peer.to_base58()), self)
        elif kind == _ASK:
            self._node.serve(self, call, body)
        elif (answer := self._asked.get(call)) is not None and not answer.done():
            if kind == _ANSWER:
                answer.set_result(body)
            else:
                answer.set_exception(P2PHandlerError(body.decode()))

    def send(self, kind: int, call: int, body: bytes) -> None:
        """Send a frame, unless the connection has ended or this node is silent."""
        if self._transport is not None and not self._node.silent:
            self._transport.write(_HEAD.pack(len(body), kind, call) + body)

    async def ask(self, name: str, request: bytes) -> bytes:
        """Send a request, and wait for the answer. Raises OSError, P2PHandlerError."""
        if self._transport is None:
            raise ConnectionResetError("the peer is gone")
        self._calls += 1
        call = self._calls
        answer = asyncio.get_running_loop().create_future()
        self._asked[call] = answer
        try:
            self.send(_ASK, call, bytes((len(name),)) + name.encode() + request)
            return await answer
        finally:
            del self._asked[call]

    def end(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()
