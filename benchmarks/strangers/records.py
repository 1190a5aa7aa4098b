"""Records of hundreds of keys in the directory."""

import asyncio
import time

from benchmarks.strangers.band import Attacker, Band
from node.core.clock import SystemClock
from node.core.version import VERSION
from node.dht.directory import Directory
from node.dht.record import PeerBody
from node.dht.record_store import Author
from node.dht.settings import DirectorySettings
from node.dht.topics import PEERS, key_of
from node.identity.keys import Identity

WRITERS = 512
"""Keys of the band that post records, at a time."""
ROUND_S = 2.0
LIFE = 29.0
"""Life of a record, in the usual lives of one: just below the longest that is taken."""
MOST = 1 << 20
"""Writers that the attackers' own directories remember."""
ATTACH_S = 20.0


async def flood(band: Band) -> None:
    """Every attacker posts records of its share of :data:`WRITERS` keys, and of fresh keys after
    that."""
    await band.each(lambda one: _flood(band, one))


async def _flood(band: Band, one: Attacker) -> None:
    settings = DirectorySettings(max_peers=MOST)
    clock = SystemClock()
    directory = Directory(one.identity, settings, clock, band.manifest.run_id, one.journal)
    join = [maddr for maddrs in band.addresses.values() for maddr in maddrs]
    async with asyncio.timeout(ATTACH_S):
        await directory.attach(one.transport.p2p.p2p, join)
        while not directory.neighbours:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    node = directory._node  # pyright: ignore[reportPrivateUsage]
    if node is None:
        return
    run_id = band.manifest.run_id
    body = PeerBody(1, "stage", "training", 0, "stranger", VERSION, speed=1.0).pack()
    while not band.over:
        for _ in range(-(-WRITERS // len(band.all))):
            writer = Identity.ephemeral()
            now = time.time()
            record, expires = Author(writer, run_id, settings).seal(body, now, times=LIFE)
            await one.pace(len(record) * len(band.addresses))
            band.calls += 1
            band.sent += len(record) * len(band.addresses)
            stored = await node.store(
                key_of(run_id, PEERS),
                record,
                expires,
                subkey=str(writer.peer_id),
                exclude_self=True,
            )
            band.heard["" if stored else "no peer stored the record"] += 1
        await asyncio.sleep(ROUND_S)
