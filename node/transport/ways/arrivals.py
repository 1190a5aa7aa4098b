"""The TCP listener for connections that were arranged over libp2p. Enters: connections of anybody.
Leaves: the sockets that showed a ticket of this peer, each to the task that expects it; to other
peers, on request, the address that their connection came from. Never: bytes that follow the ticket.

A ticket is 32 random bytes. This peer gives it to one proven peer over an encrypted libp2p stream,
for one connection, and waits :data:`ARRIVE_S` seconds for it. A connection shows its ticket within
:data:`SHOW_S` seconds or ends; until then it takes one of :data:`PLACES`, shared like all places.
"""

import asyncio
import contextlib
import secrets
import socket
from collections.abc import Iterator

from node.core.ids import PeerId
from node.core.tasks import Tasks
from node.identity.places import PlacesByPeer, block_of
from node.reach.interfaces import family_of, wildcards
from node.transport.addresses import ip_of, multiaddr

TICKET_BYTES = 32
NO_TICKET = bytes(TICKET_BYTES)
"""Shown instead of a ticket by a peer that asks for the address its connection comes from."""
SEEN_BYTES = 128
"""Upper bound on the bytes of that address, a multiaddr."""
ARRIVE_S = 5.0
"""Seconds for an expected connection to arrive."""
SHOW_S = 5.0
"""Seconds for a connection to show its ticket."""
PLACES = 256
"""Twice the number of connections that may be open without having shown a ticket."""
PLACES_EACH = 32
"""Number of connections without a ticket that may come from one address."""
BACKLOG = 128


class Expected:
    """A connection that is expected with ``ticket``."""

    def __init__(self, ticket: bytes) -> None:
        self.ticket = ticket
        self.came: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        self._taken = False

    async def arrival(self) -> socket.socket:
        """Wait for the connection; the caller then has to close it. Raises TimeoutError after
        :data:`ARRIVE_S` seconds."""
        async with asyncio.timeout(ARRIVE_S):
            made = await asyncio.shield(self.came)
        self._taken = True
        return made

    def end(self) -> None:
        """Close the connection if it arrived and nobody took it."""
        if self.came.done() and not self._taken:
            self.came.result().close()
        self.came.cancel()


class WayListener:
    """The listener of one peer."""

    def __init__(self) -> None:
        self.port = 0
        """The TCP port; 0 before :meth:`start`, and if nothing listens."""
        self._listener: socket.socket | None = None
        self._expected: dict[bytes, Expected] = {}
        self._places = PlacesByPeer[asyncio.Task[None]](
            "arrivals", PLACES, PLACES_EACH, lambda _: False
        )
        self._tasks = Tasks("arrivals")

    def start(self, host: str, port: int) -> None:
        """Listen at ``host:port``; port 0: any. Raises OSError."""
        listener = _listener(host, port)
        self._listener = listener
        self.port = listener.getsockname()[1]
        self._tasks.spawn(self._accept(listener), "accept", eternal=True)

    async def close(self) -> None:
        """Stop listening and end all connections without an owner. Safe to call twice."""
        await self._tasks.close()
        if self._listener is not None:
            self._listener.close()
            self._listener = None
        self.port = 0

    @contextlib.contextmanager
    def expect(self) -> Iterator[Expected]:
        """Expect one connection. Its ticket is void at the end of the context."""
        expected = Expected(secrets.token_bytes(TICKET_BYTES))
        self._expected[expected.ticket] = expected
        try:
            yield expected
        finally:
            self._expected.pop(expected.ticket, None)
            expected.end()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                made, at = await loop.sock_accept(listener)
            except OSError:
                # Out of descriptors, or a connection that ended before it was accepted.
                await asyncio.sleep(0.1)
                continue
            host = at[0].removeprefix("::ffff:").partition("%")[0]
            self._admit(made, host, at[1])

    def _admit(self, made: socket.socket, host: str, port: int) -> None:
        """Give a connection a place until it has shown its ticket."""
        task = self._tasks.spawn(self._look(made, host, port), "look")
        taken = self._places.take(task, PeerId(f"at {host}"), block_of(host))
        task.add_done_callback(self._places.leave)
        if not taken:
            task.cancel()
        if taken.evicted is not None:
            taken.evicted.cancel()
        # A task that is cancelled before its first step closes nothing.
        task.add_done_callback(lambda ended: made.close() if ended.cancelled() else None)

    async def _look(self, made: socket.socket, host: str, port: int) -> None:
        """Hand a connection to the owner of its ticket, or close it."""
        loop = asyncio.get_running_loop()
        kept = False
        try:
            made.setblocking(False)
            async with asyncio.timeout(SHOW_S):
                ticket = await read_exactly(made, TICKET_BYTES)
                if ticket == NO_TICKET:
                    await say(made, multiaddr(host, port).encode())
                    # The router keeps the mapping of its port while the connection is open.
                    await loop.sock_recv(made, 1)
            expected = self._expected.pop(ticket, None)
            if expected is not None:
                expected.came.set_result(made)
                kept = True
        except (OSError, TimeoutError, EOFError):
            pass
        finally:
            if not kept:
                made.close()


async def dial(host: str, port: int, ticket: bytes, timeout: float = ARRIVE_S) -> socket.socket:
    """Connect to the arrivals of a peer and show the ticket. Raises OSError, and TimeoutError after
    ``timeout`` seconds."""
    made = socket.socket(family_of(host))
    try:
        made.setblocking(False)
        async with asyncio.timeout(timeout):
            await asyncio.get_running_loop().sock_connect(made, (host, port))
            await say(made, ticket)
    except BaseException:  # also cancelled
        made.close()
        raise
    return made


async def seen_from(made: socket.socket) -> tuple[str, int] | None:
    """Ask a peer's arrivals for the address and port from which this connection comes; None if the
    answer makes no sense. Raises OSError, TimeoutError."""
    async with asyncio.timeout(SHOW_S):
        await say(made, NO_TICKET)
        said = await asyncio.get_running_loop().sock_recv(made, SEEN_BYTES)
    return ip_of(said.decode("ascii", "replace"))


async def read_exactly(made: socket.socket, count: int) -> bytes:
    """Read exactly ``count`` bytes. Raises OSError, and EOFError if the connection ends before."""
    loop = asyncio.get_running_loop()
    got = bytearray()
    while len(got) < count:
        piece = await loop.sock_recv(made, count - len(got))
        if not piece:
            raise EOFError("the connection ended before its ticket")
        got += piece
    return bytes(got)


async def say(made: socket.socket, data: bytes) -> None:
    """Send a few bytes. Raises OSError."""
    await asyncio.get_running_loop().sock_sendall(made, data)


def _listener(host: str, port: int) -> socket.socket:
    """A listening socket; an empty ``host``: all addresses of both families, where there are
    both."""
    both = not host and "::" in wildcards()
    if both:
        host = "::"
    made = socket.create_server(
        (host, port), family=family_of(host), backlog=BACKLOG, dualstack_ipv6=both
    )
    made.setblocking(False)
    return made
