"""The client's side of HTTP/2 (RFC 9113), for gRPC calls that never end."""

import asyncio
import re
import ssl
import struct
from collections import Counter
from functools import cache

from node.transport.auth import TOKEN_KEY

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
END_HEADERS, ACK = 0x4, 0x1
FRAME_BYTES = 16384
"""Bytes of a frame that every HTTP/2 server takes."""
HEAD_BYTES = 9
INITIAL_WINDOW = 65535
CONNECT_S = 5.0
CLOSED = "connection closed"


@cache
def tls() -> ssl.SSLContext:
    """A client's side of TLS that trusts every certificate: an attacker has nothing to lose."""
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    made.check_hostname = False
    made.verify_mode = ssl.CERT_NONE
    made.set_alpn_protocols(["h2"])
    return made


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """One frame, RFC 9113 section 4.1."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def literal(name: str, value: str) -> bytes:
    """A header field that is not indexed, with a new name, without Huffman coding (RFC 7541,
    section 6.2.2). Name and value have at most 126 bytes."""
    return b"\x00" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()


class Http2:
    """One connection to a gRPC server. ``heard`` counts how the server ends calls, and why."""

    def __init__(self, target: str, heard: Counter[str]) -> None:
        host, _, port = target.rpartition(":")
        self._host = host.strip("[]")
        self._port = int(port)
        self._heard = heard
        self._next = 1
        self._window = INITIAL_WINDOW
        self._stream_window = INITIAL_WINDOW
        self._room = asyncio.Event()
        self.ended: set[int] = set()
        """Streams that the server has ended."""
        self.closed = False
        self._writer: asyncio.StreamWriter | None = None
        self._listening: asyncio.Task[None] | None = None

    async def connect(self) -> None:
        """Open the connection and begin to listen. Raises OSError or TimeoutError."""
        async with asyncio.timeout(CONNECT_S):
            reader, self._writer = await asyncio.open_connection(
                self._host, self._port, ssl=tls(), server_hostname="tutti"
            )
        self._writer.write(PREFACE + frame(SETTINGS, 0, 0))
        self._listening = asyncio.create_task(self._listen(reader, self._writer), name="http2")

    async def begin(self, method: str, token: str) -> int:
        """Begin a gRPC call; its number. Nothing of its body is sent."""
        number = self._next
        self._next += 2
        fields = {
            ":method": "POST",
            ":scheme": "https",
            ":path": method,
            ":authority": "tutti",
            "te": "trailers",
            "content-type": "application/grpc",
            TOKEN_KEY: token,
        }
        block = b"".join(literal(name, value) for name, value in fields.items())
        await self._write(frame(HEADERS, END_HEADERS, number, block))
        return number

    async def data(self, stream: int, payload: bytes) -> None:
        """Send a piece of a body, as soon as the server lets it in."""
        for at in range(0, len(payload), FRAME_BYTES):
            piece = payload[at : at + FRAME_BYTES]
            while self._window < len(piece) and not self.closed:
                self._room.clear()
                await self._room.wait()
            self._window -= len(piece)
            await self._write(frame(DATA, 0, stream, piece))

    @property
    def stream_window(self) -> int:
        """Bytes of one call that the server takes before it reads them."""
        return self._stream_window

    async def ended_by_server(self) -> None:
        """Wait until the server closes the connection."""
        if self._listening is not None:
            await asyncio.wait({self._listening})

    def close(self) -> None:
        """Hang up."""
        if self._listening is not None:
            self._listening.cancel()
        if self._writer is not None:
            self._writer.close()

    async def _write(self, raw: bytes) -> None:
        if self.closed or self._writer is None:
            raise ConnectionResetError(CLOSED)
        try:
            self._writer.write(raw)
            await self._writer.drain()
        except RuntimeError as e:  # what uvloop raises for a connection that has ended
            raise ConnectionResetError(CLOSED) from e

    async def _listen(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readexactly(HEAD_BYTES)
                length = int.from_bytes(head[:3], "big")
                kind, flags, stream = struct.unpack(">BBI", head[3:])
                payload = await reader.readexactly(length)
                if kind in (SETTINGS, PING) and not flags & ACK:
                    # An acknowledgement of settings is empty.
                    writer.write(frame(kind, ACK, 0, payload if kind == PING else b""))
                self._take(kind, flags, stream, payload)
        except (OSError, EOFError, RuntimeError):
            pass
        finally:
            self.closed = True
            self._room.set()

    def _take(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == SETTINGS and not flags & ACK:
            for at in range(0, len(payload), 6):
                name, value = struct.unpack(">HI", payload[at : at + 6])
                if name == 4:  # SETTINGS_INITIAL_WINDOW_SIZE
                    self._stream_window = value
        elif kind == WINDOW_UPDATE and stream == 0:
            self._window += int.from_bytes(payload, "big")
            self._room.set()
        elif kind in (HEADERS, RST_STREAM) and stream not in self.ended:
            self.ended.add(stream)
            self._heard[self._reason(kind, payload)] += 1
        elif kind == GOAWAY:
            said = printable_parts(payload[8:]) or "without a word"
            self._heard[f"GOAWAY: {said}"[:140]] += 1

    def _reason(self, kind: int, payload: bytes) -> str:
        if kind == RST_STREAM:
            return f"RST_STREAM: code {int.from_bytes(payload, 'big')}"
        return f"call ended: {printable_parts(payload)}"[:140]


def printable_parts(raw: bytes) -> str:
    """The readable text in a header block: gRPC writes its reasons without Huffman coding."""
    return " ".join(part.decode() for part in re.findall(rb"[ -~]{6,}", raw))


async def connected(connection: Http2, heard: Counter[str]) -> bool:
    """Connect; False where the server does not let this connection in, which is counted."""
    try:
        await connection.connect()
    except (OSError, TimeoutError) as e:
        heard[f"TLS: {type(e).__name__}: {e}"[:140]] += 1
        return False
    return True
