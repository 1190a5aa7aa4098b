"""gRPC where no port can be dialled: the bytes of its connection, TLS and all, through a libp2p stream.

caller: gRPC channel → unix socket → Tunnel → libp2p stream … → TunnelEnd → the gRPC server's own port: callee
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from node.core.errors import PeerFault
from node.core.ids import PeerId
from node.transport.handshake import Streams
from node.transport.limits import Seats

STREAM = "/tutti/tunnel/1"
PIECE = 1 << 18
"""Bytes moved at once."""
BUFFER = 1 << 20
"""Bytes that may wait on their way out, each direction; above it the sender waits."""
LINGER_S = 5.0
"""After one direction has ended, the other gets this long to finish."""
CONNECTIONS_PER_PEER, CONNECTIONS = 8, 256


class Tunnel:
    """The caller's end: a unix socket under ``directory`` (0700), each connection to it a stream to ``peer``."""

    def __init__(self, streams: Streams, peer: PeerId, path: Path, timeout: float) -> None:
        self._streams, self._peer, self._path, self._timeout = streams, peer, path, timeout
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def target(self) -> str:
        """What gRPC dials."""
        return f"unix:{self._path}"

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._connected, self._path, limit=BUFFER)

    async def close(self) -> None:
        """End the listener and every connection. Safe to call twice."""
        if self._server is not None:
            self._server.close()
            self._server = None
            self._path.unlink(missing_ok=True)
        for writer in list(self._open):
            writer.transport.abort()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._open.add(writer)
        try:
            far_reader, far_writer = await self._streams.open_stream(self._peer, STREAM, self._timeout)
        except PeerFault:
            # gRPC sees its connection end and reports the peer as unavailable.
            writer.transport.abort()
            self._open.discard(writer)
            return
        try:
            await splice(reader, writer, far_reader, far_writer)
        finally:
            self._open.discard(writer)


class TunnelEnd:
    """The callee's end: hands the streams of peers that have met us to the gRPC server listening on ``host``."""

    def __init__(self, host: str, port: Callable[[], int], welcome: Callable[[PeerId], bool]) -> None:
        self._host, self._port, self._welcome = host, port, welcome
        self._seats = Seats(CONNECTIONS_PER_PEER, CONNECTIONS)

    async def serve(self, peer: PeerId, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Until one side has had enough. Strangers, and peers with too many tunnels, are hung up on."""
        if not self._welcome(peer) or not self._seats.take(peer):
            return
        try:
            near_reader, near_writer = await asyncio.open_connection(self._host, self._port(), limit=BUFFER)
            await splice(reader, writer, near_reader, near_writer)
        finally:
            self._seats.leave(peer)


async def splice(
    left_reader: asyncio.StreamReader,
    left_writer: asyncio.StreamWriter,
    right_reader: asyncio.StreamReader,
    right_writer: asyncio.StreamWriter,
) -> None:
    """Join two connections until both directions have ended; both are closed then, also when cancelled."""
    writers = left_writer, right_writer
    for writer in writers:
        writer.transport.set_write_buffer_limits(high=BUFFER)

    def abort() -> None:
        for writer in writers:
            writer.transport.abort()

    async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while piece := await source.read(PIECE):
                sink.write(piece)
                await sink.drain()
            if sink.can_write_eof():
                sink.write_eof()
            # An end that never answers our end must not hold sockets for ever.
            lingers.append(asyncio.get_running_loop().call_later(LINGER_S, abort))
        except OSError:
            abort()

    lingers: list[asyncio.TimerHandle] = []
    try:
        await asyncio.gather(pump(left_reader, right_writer), pump(right_reader, left_writer))
    finally:
        for timer in lingers:
            timer.cancel()
        for writer in writers:
            with contextlib.suppress(OSError):
                writer.close()
