"""A knock at the addresses of a peer before p2pd dials them. After a failure p2pd leaves an address
alone for five seconds, and a peer that is about to start refuses until then."""

import asyncio
import contextlib
import ipaddress
from collections.abc import Sequence

KNOCK_S = 1.0
"""Longest wait, in seconds, until an address takes or refuses a connection."""


async def refused(addresses: Sequence[str]) -> bool:
    """Return True if there are multiaddrs and each is plain TCP of an IP address that refuses a
    connection now. Raises nothing: a peer may claim any text as its address."""
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
    """IP address and port of a plain TCP multiaddr. None for any other text, such as a name, whose
    look-up may take long, or the address of a relay."""
    match address.partition("/p2p/")[0].split("/"):
        case ["", "ip4" | "ip6", host, "tcp", port] if "/p2p-circuit" not in address:
            with contextlib.suppress(ValueError):
                where = str(ipaddress.ip_address(host)), int(port)
                if 0 < where[1] < 1 << 16:
                    return where
    return None
