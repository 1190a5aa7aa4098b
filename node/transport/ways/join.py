"""Join of two connected sockets into one connection. Enters: sockets. Leaves: bytes, moved by the
kernel where it can (``os.splice``). Never: their meaning, which is TLS between others."""

import asyncio
import contextlib
import fcntl
import os
import socket
from collections.abc import Awaitable, Callable, Iterator

from node.core.tasks import Tasks

PIECE = 1 << 20
"""Upper bound on the bytes moved at once, and size of the kernel's pipe for each direction, in
bytes."""
TURNS = 16
"""Pieces that one direction moves before the rest of the event loop has its turn, if neither end is
ever waited for."""
LINGER_S = 5.0
"""Seconds for the second direction to end after the first one: gRPC ends both together."""

_FLAGS = getattr(os, "SPLICE_F_MOVE", 0) | getattr(os, "SPLICE_F_NONBLOCK", 0)

Pay = Callable[[int], Awaitable[None]]
"""Waits until this number of bytes may be sent on."""


async def join(
    left: socket.socket, right: socket.socket, pay: Pay | None = None, piece: int = PIECE
) -> None:
    """Carry bytes in both directions until both ends have ended, or one failed. Closes both
    sockets, also when cancelled. ``pay`` is awaited with the size of every piece, of at most
    ``piece`` bytes."""
    with left, right:
        left.setblocking(False)
        right.setblocking(False)
        tasks = Tasks("join")
        pumps = [
            tasks.spawn(_pump(left, right, pay, piece), "right"),
            tasks.spawn(_pump(right, left, pay, piece), "left"),
        ]
        try:
            _, running = await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
            if running:
                await asyncio.wait(running, timeout=LINGER_S)
        finally:
            await tasks.close()


async def _pump(source: socket.socket, sink: socket.socket, pay: Pay | None, piece: int) -> None:
    """Carry bytes one way until the source ends, then shut down the sink's direction."""
    try:
        if hasattr(os, "splice"):
            await _splice(source, sink, pay, piece)
        else:
            await _copy(source, sink, pay, piece)
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        # The other direction ends too: the same connection broke.
        with contextlib.suppress(OSError):
            source.shutdown(socket.SHUT_RD)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)


async def _splice(source: socket.socket, sink: socket.socket, pay: Pay | None, piece: int) -> None:
    """Move pages from one socket to the other through a pipe, without copying them here. While the
    source has nothing there is no pipe: a process has only so many descriptors, and most
    connections are quiet."""
    turns = 0
    while True:
        await _ready(source, False)
        with _pipe(piece) as (outlet, inlet):
            while held := _taken(source, inlet, piece):
                if pay is not None:
                    await pay(held)
                await _give(outlet, sink, held)
                turns = await _next_turn(turns)
            if held is not None:
                return


def _taken(source: socket.socket, inlet: int, piece: int) -> int | None:
    """Move up to ``piece`` bytes of a socket into a pipe: their number, 0 at the end, None if there
    are none now."""
    try:
        return os.splice(source.fileno(), inlet, piece, flags=_FLAGS)
    except BlockingIOError:
        return None


async def _give(outlet: int, sink: socket.socket, held: int) -> None:
    """Move the bytes that a pipe holds into a socket."""
    while held:
        try:
            held -= os.splice(outlet, sink.fileno(), held, flags=_FLAGS)
        except BlockingIOError:
            await _ready(sink, True)


async def _copy(source: socket.socket, sink: socket.socket, pay: Pay | None, piece: int) -> None:
    """Read and write the bytes, where the kernel has no ``splice``."""
    loop = asyncio.get_running_loop()
    turns = 0
    while data := await loop.sock_recv(source, piece):
        if pay is not None:
            await pay(len(data))
        await loop.sock_sendall(sink, data)
        turns = await _next_turn(turns)


async def _next_turn(turns: int) -> int:
    """Count a piece. Calls for a socket that is ready do not wait, so a sender that is faster than
    we are would hold the event loop for ever."""
    turns = (turns + 1) % TURNS
    if not turns:
        await asyncio.sleep(0)
    return turns


@contextlib.contextmanager
def _pipe(size: int) -> Iterator[tuple[int, int]]:
    """The outlet and the inlet of a pipe of this size; of the usual 64 KiB where a user without
    privileges has many large ones already."""
    outlet, inlet = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.fcntl(inlet, fcntl.F_SETPIPE_SZ, size)
        yield outlet, inlet
    finally:
        os.close(outlet)
        os.close(inlet)


async def _ready(end: socket.socket, writable: bool) -> None:
    """Wait until bytes can be read from a socket, or with ``writable`` written to it."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    add, remove = loop.add_reader, loop.remove_reader
    if writable:
        add, remove = loop.add_writer, loop.remove_writer
    fd = end.fileno()
    add(fd, _settle, ready)
    try:
        await ready
    finally:
        remove(fd)


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)
