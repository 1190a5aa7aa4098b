"""A knock at the addresses of a peer, before p2pd dials them. p2pd leaves an address alone for five
seconds after it has failed, and a peer that is about to start refuses until then."""

import asyncio
import contextlib
from collections.abc import Sequence

KNOCK_S = 1.0
"""Longest wait for addresses to take or refuse a connection. What takes longer is p2pd's to find
out."""


async def refused(addresses: Sequence[str]) -> bool:
    """Return True if all multiaddrs, at least one, are plain TCP and refuse a connection now."""
    with contextlib.suppress(OSError, TimeoutError):
        async with asyncio.timeout(KNOCK_S):
            for address in addresses:
                where = _tcp(address)
                if where is None:
                    return False
                with contextlib.suppress(ConnectionRefusedError):
                    _, writer = await asyncio.open_connection(*where)
                    writer.close()
                    return False
            return bool(addresses)
    return False


def _tcp(address: str) -> tuple[str, int] | None:
    """Host and port of a multiaddr that is nothing but TCP; None for another, such as that of a
    relay."""
    match address.partition("/p2p/")[0].split("/"):
        case ["", _, host, "tcp", port] if "/p2p-circuit" not in address:
            return host, int(port)
    return None
