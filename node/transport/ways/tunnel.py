"""gRPC where no port can be dialled: the bytes of its connection, TLS and all, through a libp2p
stream.

caller: gRPC channel → unix socket → Tunnel → libp2p stream … → TunnelEnd → the gRPC server's own
port: callee

The same ends serve connections past libp2p (:mod:`node.transport.ways.bypass`), over a socket
instead of the stream.
"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from node.core.errors import PeerFault
from node.core.home import socket_target
from node.core.ids import PeerId, short
from node.core.tasks import Tasks
from node.identity.places import PlacesByPeer
from node.reach.interfaces import family_of
from node.transport.ways.join import Pay, join

STREAM = "/tutti/tunnel/1"
PIECE = 1 << 18
"""Bytes moved at once."""
BUFFER = 1 << 20
"""Bytes that may wait on their way out of a tunnel, each direction."""
LINGER_S = 1.0
"""Time for the last bytes of a connection to arrive at its other end."""
CONNECTIONS_PER_PEER = 8
"""Tunnels of one peer that are carried here."""
CONNECTIONS = 256
"""Tunnels of all peers. Half of them is for established peers."""

Carry = Callable[[socket.socket], Awaitable[None]]
"""Carries a connection to its other end until it ends. Raises PeerFault if it cannot."""


class Tunnel:
    """The caller's end: a unix socket at ``path``, in a directory 0700, each connection to which is
    given to ``carry``."""

    def __init__(self, peer: PeerId, path: Path, carry: Carry) -> None:
        self._path = path
        self._carry = carry
        self.target = socket_target(path)
        """Target for gRPC to dial."""
        self.fault = ""
        """The reason why the last connection was not carried."""
        self._listener = socket.socket(socket.AF_UNIX)
        self._tasks = Tasks(f"tunnel-{short(peer)}")

    async def start(self) -> None:
        """Listen."""
        self._listener.setblocking(False)
        self._listener.bind(str(self._path))
        self._listener.listen()
        self._tasks.spawn(self._accept(), "accept")

    async def close(self) -> None:
        """End the listener and every connection. Safe to call twice."""
        await self._tasks.close()
        self._listener.close()
        self._path.unlink(missing_ok=True)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            made, _ = await loop.sock_accept(self._listener)
            self._tasks.spawn(self._serve(made), "connection")

    async def _serve(self, made: socket.socket) -> None:
        with made:
            try:
                await self._carry(made)
            except PeerFault as e:
                # gRPC sees its connection end and reports the peer as unavailable.
                self.fault = e.reason


async def carry_over(
    open_stream: Callable[[], Awaitable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]],
    pay: Pay | None,
    near: socket.socket,
) -> None:
    """Carry a connection over a stream that ``open_stream`` opens, or raises PeerFault. ``pay`` as
    :func:`splice`'s."""
    far_reader, far_writer = await open_stream()
    try:
        near_reader, near_writer = await asyncio.open_unix_connection(sock=near, limit=BUFFER)
        await splice(near_reader, near_writer, far_reader, far_writer, pay)
    finally:
        far_writer.transport.abort()


@dataclass(eq=False)
class _Carried:
    """A tunnel of a peer that is carried here. ``alive`` ends it when it loses its place."""

    peer: PeerId
    alive: asyncio.Timeout = field(default_factory=lambda: asyncio.timeout(None))

    def end(self) -> None:
        """End it soon, from outside."""
        if not self.alive.expired():
            self.alive.reschedule(0.0)


class TunnelEnd:
    """The callee's end: hands the streams of peers that have met us to the gRPC server listening on
    ``host``. ``pay`` as :func:`splice`'s.

    Half of the places is for ``established`` peers. Strangers share the rest by address block
    (``block(peer)``) and by key; one with many loses its newest tunnel to one with fewer.
    """

    def __init__(
        self,
        host: str,
        port: Callable[[], int],
        welcome: Callable[[PeerId], bool],
        pay: Pay | None = None,
        *,
        established: Callable[[PeerId], bool] = lambda peer: False,
        block: Callable[[PeerId], str] = lambda peer: "",
    ) -> None:
        self._host = host
        self._port = port
        self._welcome = welcome
        self._pay = pay
        self._block = block
        self._places = PlacesByPeer[_Carried](
            "tunnels", CONNECTIONS, CONNECTIONS_PER_PEER, established
        )
        self.on_refusal: Callable[[PeerId], None] = lambda peer: None
        """Told of each peer that found no place, or lost one."""

    def welcomes(self, peer: PeerId) -> bool:
        """Return True if another tunnel of ``peer`` would be carried now."""
        return self._welcome(peer) and self._places.has_room(peer, self._block(peer))

    async def serve(
        self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Carry a tunnel of ``peer`` until one side ends it, or it loses its place. Strangers, and
        peers without a place, are hung up on."""

        async def to_server() -> None:
            near_reader, near_writer = await asyncio.open_connection(
                self._host, self._port(), limit=BUFFER
            )
            await splice(reader, writer, near_reader, near_writer, self._pay)

        await self._hold(peer, to_server)

    async def carry(self, peer: PeerId, far: socket.socket) -> None:
        """Carry a tunnel that comes over a socket; as :meth:`serve`. Closes the socket."""

        async def to_server() -> None:
            with socket.socket(family_of(self._host)) as near:
                near.setblocking(False)
                where = self._host, self._port()
                await asyncio.get_running_loop().sock_connect(near, where)
                await join(near, far)

        with far:
            await self._hold(peer, to_server)

    async def _hold(self, peer: PeerId, to_server: Callable[[], Awaitable[None]]) -> None:
        """Give a tunnel of ``peer`` a place while ``to_server`` carries it."""
        if not self._welcome(peer):
            return
        carried = _Carried(peer)
        taken = self._places.take(carried, peer, self._block(peer))
        if not taken:
            self.on_refusal(peer)
            return
        if taken.evicted is not None:
            self.on_refusal(taken.evicted.peer)
            taken.evicted.end()
        try:
            async with carried.alive:
                await to_server()
        except TimeoutError:
            if not carried.alive.expired():
                raise
        finally:
            self._places.leave(carried)


async def splice(
    left_reader: asyncio.StreamReader,
    left_writer: asyncio.StreamWriter,
    right_reader: asyncio.StreamReader,
    right_writer: asyncio.StreamWriter,
    pay: Pay | None = None,
    buffer: int = BUFFER,
) -> None:
    """Join two connections until either ends; both are closed then, also when cancelled. ``pay`` is
    awaited with the size of every piece. Above ``buffer`` bytes on their way out of one direction
    its sender waits.

    p2pd knows no half-close: it turns the end of one direction into a reset of both, and the reset
    loses all bytes still on their way. So an end is passed on only LINGER_S after it was seen, when
    the last bytes have arrived.
    """
    writers = left_writer, right_writer
    over = False

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        nonlocal over
        try:
            _check_open(sink)
            sink.transport.set_write_buffer_limits(high=buffer)
            while piece := await source.read(PIECE):
                if pay is not None:
                    await pay(len(piece))
                _check_open(sink)
                sink.write(piece)
                await sink.drain()
            if not over:
                over = True
                await asyncio.sleep(LINGER_S)
        except OSError:
            over = True
        finally:
            for writer in writers:
                writer.transport.abort()

    await asyncio.gather(pump(left_reader, right_writer), pump(right_reader, left_writer))


def _check_open(writer: asyncio.StreamWriter) -> None:
    """Raises OSError for a connection that has ended. asyncio drops bytes written to an ended
    connection, and uvloop, on which daemons run, raises RuntimeError."""
    if writer.is_closing():
        raise ConnectionResetError("the connection has ended")
