"""TCP hole punching: the side that is asked opens a connection while the other side's p2pd dials.
Enters: addresses of the other side as others see it. Leaves: a connection handed to our own p2pd,
which proves the other side's identity. Never: a listener, or an address inside somebody's network.

Both SYNs leave from the libp2p ports. The router's mapping of these ports is known, so each side
opens its router for the other (simultaneous open, RFC 9293 section 3.5). p2pd dials on one side; on
the other it could only dial as well, and two that dial do not understand each other. So this file
opens the connection there and carries it to p2pd's listener.
"""

import asyncio
import socket
from collections.abc import Sequence

from node.core.addresses import Scope, scope
from node.core.errors import NetworkFault
from node.core.tasks import Tasks
from node.reach.interfaces import family_of
from node.transport.addresses import ip_of
from node.transport.ways.tunnel import BUFFER, splice

ADDRESSES = 4
"""Addresses of one peer that are tried."""
OPEN_S = 8.0
"""Seconds for the two sides to find each other: SYNs are repeated after 1, 3 and 7 s."""
LEAST_PORT = 1024
"""Routers map to no lower port; a peer that asks for one does not want to punch."""


def candidates(addresses: Sequence[str]) -> list[tuple[str, int]]:
    """(host, port) of the public TCP addresses among these multiaddrs. A name is none: it may stand
    for an address inside our network."""
    found = [place for address in addresses[:ADDRESSES] if (place := ip_of(address))]
    public = [(h, p) for h, p in found if p >= LEAST_PORT and scope(h) is Scope.PUBLIC]
    return list(dict.fromkeys(public))


async def open_connection(
    port: int, targets: Sequence[tuple[str, int]], tasks: Tasks
) -> socket.socket:
    """A TCP connection from our port ``port`` to the first of ``targets`` that opens one to us.

    Raises NetworkFault after ``OPEN_S`` seconds.
    """
    trying = {tasks.spawn(_one(port, target), "punch") for target in targets}
    made: list[socket.socket] = []
    try:
        async with asyncio.timeout(OPEN_S):
            while trying and not made:
                done, trying = await asyncio.wait(trying, return_when=asyncio.FIRST_COMPLETED)
                made += [found for one in done if (found := one.result()) is not None]
    except TimeoutError:
        pass
    finally:
        for one in trying:
            one.cancel()
    if not made:
        raise NetworkFault(
            f"none of {len(targets)} addresses opened a connection in {OPEN_S:g} s",
            "see tutti doctor net",
        )
    for extra in made[1:]:
        extra.close()
    return made[0]


async def hand_over(made: socket.socket, host: str, port: int) -> None:
    """Carry the connection to p2pd's listener at ``host:port`` until either ends. Raises
    OSError."""
    reader, writer = await asyncio.open_connection(sock=made, limit=BUFFER)
    try:
        near_reader, near_writer = await asyncio.open_connection(host, port, limit=BUFFER)
        await splice(reader, writer, near_reader, near_writer)
    finally:
        writer.close()


async def _one(port: int, target: tuple[str, int]) -> socket.socket | None:
    """None when it does not open. The port is shared with p2pd's listener, which shares it too."""
    try:
        made = socket.socket(family_of(target[0]))
    except OSError:  # a kernel without IPv6, or no descriptor is free
        return None
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        made.setblocking(False)
        made.bind(("", port))
        await asyncio.get_running_loop().sock_connect(made, target)
    except OSError:
        made.close()
        return None
    except BaseException:  # also cancelled
        made.close()
        raise
    return made
