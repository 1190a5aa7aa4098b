"""A stranger that breaks things: `vandal.py MULTIADDR STREAM…` throws garbage at each libp2p stream
of a node.

It is a process of its own, because hivemind must not be imported beside the tests. Prints one line
a stream when done.
"""

import asyncio
import contextlib
import os
import sys

from node.core.errors import PeerFault
from node.core.ids import PeerId
from node.identity.keys import Identity
from node.telemetry.events import Journal
from node.transport.p2p import P2pDaemon
from node.transport.settings import TransportSettings

FILTH = (
    b"",
    b"\x00",
    b"\xff" * 4,  # a length of 4 GiB
    b"\x7f\xff\xff\xff" + b"x" * 100_000,
    b"\x00\x00\x00\x05hello",
    b"\x00\x00\x00\x02\x0a\xff",  # a protobuf field that ends too early
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    os.urandom(300_000),
)


async def main(address: str, streams: list[str]) -> None:
    node = P2pDaemon(Identity.ephemeral(), TransportSettings(host="127.0.0.1"), Journal())
    await node.start([address])
    peer = PeerId(address.rpartition("/p2p/")[2])
    try:
        for name in streams:
            for filth in FILTH:
                with contextlib.suppress(OSError, EOFError, TimeoutError, PeerFault):
                    reader, writer = await node.open_stream(peer, name, 10.0)
                    writer.write(filth)
                    async with asyncio.timeout(0.5):
                        await writer.drain()
                        await reader.read(1 << 16)
                    writer.close()
            print(f"{name} has had {len(FILTH)} kinds of garbage", flush=True)
    finally:
        await node.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2:]))
