"""One question to a gRPC server on a unix socket, without gRPC: importing that takes longer than
asking.

HTTP/2 as RFC 9113 has it, as much as one unary call needs. Headers are sent as plain literals and
those that come are not read: a server sends a message only with success, so a message is the answer
and anything else is :class:`Unanswered`.
"""

from __future__ import annotations

import socket
import struct
import time
from pathlib import Path

MAX_ANSWER = 8 << 20
"""Bytes of an answer."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING, _GOAWAY, _WINDOW = 0, 1, 3, 4, 6, 7, 8
_END_STREAM, _ACK, _END_HEADERS, _PADDED = 1, 1, 4, 8
_INITIAL_WINDOW = 4
_MAX_FRAME = 1 << 14


class Unanswered(Exception):
    """The server refused or hung up; why is for a whole client to find out."""


def unary(path: Path, method: str, request: bytes, timeout_s: float) -> bytes:
    """The answer to ``request``, both serialised, of ``method`` ("/package.Service/Name"). Raises
    Unanswered, and TimeoutError after ``timeout_s``."""
    end = time.monotonic() + timeout_s
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as line:
            line.settimeout(timeout_s)
            line.connect(str(path))
            line.sendall(_question(method, request))
            return _answer(line, end)
    except TimeoutError:
        raise
    except OSError as e:
        raise Unanswered(str(e)) from e


def _question(method: str, request: bytes) -> bytes:
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": method,
        ":authority": "localhost",
        "te": "trailers",
        "content-type": "application/grpc",
    }
    # A literal without indexing: a zero, then name and value, each behind its length, which is
    # below 127.
    block = b"".join(
        b"\0" + b"".join(bytes([len(t)]) + t.encode() for t in pair) for pair in fields.items()
    )
    message = struct.pack(">BI", 0, len(request)) + request
    if len(message) > _MAX_FRAME:
        raise Unanswered(f"a question of {len(request)} bytes")
    return b"".join(
        [
            _PREFACE,
            _frame(_SETTINGS, 0, 0, struct.pack(">HI", _INITIAL_WINDOW, MAX_ANSWER)),
            _frame(_WINDOW, 0, 0, struct.pack(">I", MAX_ANSWER)),
            _frame(_HEADERS, _END_HEADERS, 1, block),
            _frame(_DATA, _END_STREAM, 1, message),
        ]
    )


def _frame(kind: int, flags: int, stream: int, body: bytes) -> bytes:
    return struct.pack(">I", len(body))[1:] + struct.pack(">BBI", kind, flags, stream) + body


def _answer(line: socket.socket, end: float) -> bytes:
    found = bytearray()
    while True:
        head = _exactly(line, 9, end)
        size, kind, flags = int.from_bytes(head[:3], "big"), head[3], head[4]
        if size > MAX_ANSWER:
            raise Unanswered(f"a frame of {size} bytes")
        body = _exactly(line, size, end)
        if kind == _SETTINGS and not flags & _ACK:
            line.sendall(_frame(_SETTINGS, _ACK, 0, b""))
        elif kind == _PING and not flags & _ACK:
            line.sendall(_frame(_PING, _ACK, 0, body))
        elif kind in (_RESET, _GOAWAY):
            raise Unanswered("hung up")
        elif kind == _DATA:
            if flags & _PADDED:
                body = body[1 : len(body) - body[0]] if body else b""
            found += body
            if len(found) >= 5:
                compressed, length = struct.unpack(">BI", found[:5])
                if compressed or length > MAX_ANSWER:
                    raise Unanswered(f"an answer of {length} bytes")
                if len(found) >= 5 + length:
                    return bytes(found[5 : 5 + length])
        if kind in (_DATA, _HEADERS) and flags & _END_STREAM:
            raise Unanswered("ended without an answer")


def _exactly(line: socket.socket, count: int, end: float) -> bytes:
    buffer = bytearray()
    while len(buffer) < count:
        left = end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        line.settimeout(left)
        piece = line.recv(count - len(buffer))
        if not piece:
            raise Unanswered("hung up")
        buffer += piece
    return bytes(buffer)
