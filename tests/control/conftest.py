"""A node to observe: a real p2pd in a process of its own, because py-libp2p and hivemind do not share one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator

import pytest

SERVER = r"""
import asyncio, json, struct, sys
from hivemind.p2p import P2P
from protos.ask_pb2 import Answer, Ask, PeerLine, PeersAnswer, PingAnswer

async def main():
    p2p = await P2P.create(host_maddrs=("/ip4/127.0.0.1/tcp/0",), nat_port_map=False, auto_nat=False)

    async def answer(info, reader, writer):
        (size,) = struct.unpack(">I", await reader.readexactly(4))
        asked = Ask.FromString(await reader.readexactly(size))
        kind = asked.WhichOneof("question")
        if kind == "peers":
            reply = Answer(peers=PeersAnswer(peers=[PeerLine(peer=info.peer_id.to_base58(), name="caller")] * 3000))
        else:
            reply = Answer(ping=PingAnswer(nonce=asked.ping.nonce, version="1", name="calm-otter"))
        raw = reply.SerializeToString()
        frame = struct.pack(">I", len(raw)) + raw
        if asked.ping.nonce == b"silence":
            await reader.read()
        frame = {b"cut": frame[:-1], b"huge": struct.pack(">I", 2**31), b"noise": struct.pack(">I", 3) + b"\xff\xff\xff"}.get(
            asked.ping.nonce, frame
        )
        writer.write(frame)
        await writer.drain()
        writer.close()

    await p2p.add_binary_stream_handler("/tutti/ask/1", answer)
    addresses = [str(a) + "/p2p/" + p2p.peer_id.to_base58() for a in await p2p.get_visible_maddrs()]
    addresses = [a if a.count("/p2p/") == 1 else a[: a.rindex("/p2p/")] for a in addresses]
    print(json.dumps(addresses), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await p2p.shutdown()

asyncio.run(main())
"""


@pytest.fixture(scope="session")
def observed_node() -> Iterator[str]:
    """The multiaddr of a node that answers questions. It ends when its standard input does."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())[0]
    finally:
        process.stdin.close()
        process.wait(20)
