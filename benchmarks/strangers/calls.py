"""Calls that take a place and never use it."""

import asyncio
import contextlib
import struct
from functools import partial

from benchmarks.strangers.band import Attacker, Band
from benchmarks.strangers.http2 import Http2, connected
from node.core.errors import PeerFault
from node.core.ids import PeerId
from node.transport.port import answers
from node.transport.settings import TransportSettings
from protos import averaging_pb2
from protos.tensor_pb2 import FP32, TensorHead

TELL = "/tutti.v1.Training/Tell"
EXCHANGE = "/tutti.averaging.v1.Averaging/Exchange"
BODY = 4 << 20
"""Bytes that an endless body says it has."""
PIECE = 64 << 10
UNSENT = 1024
"""Bytes of a body that never come."""
CALLS = TransportSettings.peer_streams
"""Open calls of one attacker at one victim, on one connection: a daemon's limit for all calls of a
peer. Its limit for one method is lower."""
CONNECTIONS = 4
"""Connections of one attacker to one victim, each with :data:`CALLS` calls. A daemon takes
:data:`~node.transport.connections.PER_PEER` of a peer, which would be thousands for a band."""
HEAD = 1 << 20
"""Bytes of the head of an exchange."""
HELD_S = 3600.0
"""Longest time for which a silent call is held: as long as the attack."""
AGAIN_S = 1.0


# ------------------------------------------------------------ bodies that never end


async def endless(band: Band) -> None:
    """Unary calls of which all but the last bytes of the body are sent."""
    await band.everywhere(partial(_bodies, band))


async def _bodies(band: Band, one: Attacker, victim: PeerId) -> None:
    while not band.over:
        try:
            met = await one.meet(victim)
        except PeerFault as e:
            band.refusal(e)
            await asyncio.sleep(AGAIN_S)
            continue
        connections = [Http2(band.targets[victim], band.heard) for _ in range(CONNECTIONS)]
        try:
            async with asyncio.TaskGroup() as group:
                for connection in connections:
                    group.create_task(_fill(band, one, connection, met.token))
        finally:
            for connection in connections:
                connection.close()
        await asyncio.sleep(AGAIN_S)


async def _fill(band: Band, one: Attacker, connection: Http2, token: str) -> None:
    """Keep :data:`CALLS` unfinished bodies open until the server closes the connection."""
    if not await connected(connection, band.heard):
        return
    with contextlib.suppress(OSError):
        began = 0
        while not (band.over or connection.closed):
            if began - len(connection.ended) >= CALLS:
                await asyncio.sleep(AGAIN_S)
                continue
            stream = await connection.begin(TELL, token)
            began += 1
            band.calls += 1
            await _send_most(band, one, connection, stream)


async def _send_most(band: Band, one: Attacker, connection: Http2, stream: int) -> None:
    """Send a body up to its last bytes, or up to the window of the call."""
    left = min(BODY, connection.stream_window) - UNSENT
    first = struct.pack(">BI", 0, BODY)
    while left > 0 and stream not in connection.ended:
        piece = first + bytes(min(PIECE, left) - len(first))
        first = b""
        left -= len(piece)
        await one.pace(len(piece))
        band.sent += len(piece)
        await connection.data(stream, piece)


# ------------------------------------------------------------ calls without a word


async def silent(band: Band) -> None:
    """Silent streaming calls, :data:`CALLS` of each attacker at each victim."""
    await band.everywhere(partial(_many, band, b""))


async def _many(band: Band, first: bytes, one: Attacker, victim: PeerId) -> None:
    await asyncio.gather(*(_hold(band, one, victim, first) for _ in range(CALLS)))


async def _hold(band: Band, one: Attacker, victim: PeerId, first: bytes) -> None:
    """Open an exchange with this first message again and again, and wait on it."""
    while not band.over:
        await one.pace(len(first) + 100)
        band.calls += 1
        band.sent += len(first)
        try:
            async with answers(victim, HELD_S):
                channel = await one.transport.channel(victim)
                call = channel.stream_stream(EXCHANGE)()
                if first:
                    await call.write(first)
                answer = await call.read()
                if not isinstance(answer, bytes):
                    raise PeerFault(victim, f"the call ended: {await call.details()}")
            refusal = averaging_pb2.Fresh.FromString(answer).refusal
            kind = averaging_pb2.RefusalKind.Name(refusal.kind)
            band.heard[f"{kind}: {refusal.text}"[:140]] += 1
            call.cancel()
        except PeerFault as e:
            band.refusal(e)
        await asyncio.sleep(AGAIN_S)


# ------------------------------------------------------------ heads of exchanges


async def heads(band: Band) -> None:
    """Heads of exchanges of 1 MiB, of a round that nobody has planned."""
    head = await asyncio.to_thread(_head)
    await band.everywhere(partial(_many, band, head))


def _head() -> bytes:
    tensor = TensorHead(name="model.layers.0.x", shape=[1], wire=FP32, nbytes=4)
    each = len(averaging_pb2.ContributionHead(tensors=[tensor]).SerializeToString())
    head = averaging_pb2.ContributionHead(
        epoch=1 << 20,
        term=1 << 20,
        plan_hash="a" * 64,
        ownership_hash="b" * 64,
        tokens=1,
        tensors=[tensor] * (HEAD // each - 64),
    )
    return averaging_pb2.Contribution(head=head).SerializeToString()
