"""TLS connections on which nobody ever shows a token."""

import asyncio
import contextlib
from functools import partial

from benchmarks.strangers.band import Attacker, Band
from benchmarks.strangers.http2 import Http2, connected
from node.core.ids import PeerId

MOST = 511
"""Connections that the band holds at each of :data:`VICTIMS` victims."""
VICTIMS = 2
EVERY_S = 0.02
"""Seconds between two connections that one attacker opens: a handshake of TLS costs both sides
milliseconds."""
TLS_BYTES = 2048
"""Bytes that opening a connection takes."""
AGAIN_S = 1.0


async def silent(band: Band) -> None:
    """Hold :data:`MOST` connections at the first victims; one that is closed is opened again."""
    await band.each(partial(_many, band))


async def _many(band: Band, one: Attacker) -> None:
    turn = asyncio.Lock()
    each = -(-MOST // len(band.all))
    victims = one.victims[:VICTIMS] * each
    await asyncio.gather(*(_hold(band, one, turn, victim) for victim in victims))


async def _hold(band: Band, one: Attacker, turn: asyncio.Lock, victim: PeerId) -> None:
    while not band.over:
        async with turn:
            await one.pace(TLS_BYTES)
            await asyncio.sleep(EVERY_S)
        band.calls += 1
        band.sent += TLS_BYTES
        connection = Http2(band.targets[victim], band.heard)
        if await connected(connection, band.heard):
            with contextlib.suppress(OSError):
                await connection.ended_by_server()
            connection.close()
            band.heard["connection ended by the server"] += 1
        await asyncio.sleep(AGAIN_S)
