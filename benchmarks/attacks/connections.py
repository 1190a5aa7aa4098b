"""TLS connections on which nobody ever shows a token."""

import asyncio
import contextlib
from functools import partial

from benchmarks.attacks.band import Attacker, Band
from benchmarks.attacks.http2 import Http2
from node.core.ids import PeerId

MOST = 511
"""Connections that the band holds at each victim."""
TLS_BYTES = 2048
"""Bytes that opening a connection takes."""
AGAIN_S = 1.0


async def silent(band: Band) -> None:
    """Hold :data:`MOST` connections at every victim; one that is closed is opened again."""
    await band.everywhere(partial(_many, band))


async def _many(band: Band, one: Attacker, victim: PeerId) -> None:
    each = -(-MOST // len(band.all))
    await asyncio.gather(*(_hold(band, one, band.targets[victim]) for _ in range(each)))


async def _hold(band: Band, one: Attacker, target: str) -> None:
    while not band.over:
        await one.pace(TLS_BYTES)
        band.calls += 1
        band.sent += TLS_BYTES
        connection = Http2(target, band.heard)
        try:
            await connection.connect()
        except (OSError, TimeoutError) as e:
            band.heard[f"TLS: {type(e).__name__}"] += 1
            await asyncio.sleep(AGAIN_S)
            continue
        with contextlib.suppress(OSError):
            await connection.ended_by_server()
        connection.close()
        band.heard["connection ended by the server"] += 1
        await asyncio.sleep(AGAIN_S)
