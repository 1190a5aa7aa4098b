"""Services that are taken from a running server."""

import asyncio

import pytest

from node.core.errors import PeerFault
from protos import state_pb2_grpc, training_pb2_grpc
from tests.transport.conftest import tell, until


async def test_services_come_and_go(swarm) -> None:
    a = await swarm()
    b = await swarm(peers=a.reachable.multiaddrs())
    lost: list[str] = []
    a.on_lost(lost.append)
    assert await tell(b, a.peer_id) == b.peer_id

    a.parrot.gate.clear()
    under_way = asyncio.create_task(tell(b, a.peer_id, 30.0))
    await until(lambda: any(c.method.endswith("/Tell") for c in a._auth._running), 60)
    a.vacate()
    with pytest.raises(PeerFault, match="given its stage up"):
        await under_way
    with pytest.raises(PeerFault, match="does not offer this call"):
        await tell(b, a.peer_id)
    # The peer is reached as before, and the connection stands.
    assert b.path(a.peer_id)
    assert await b.ping(a.peer_id) > 0
    assert not a.lines.on_lost

    a.parrot.gate.set()
    training_pb2_grpc.add_TrainingServicer_to_server(a.parrot, a.server)
    state_pb2_grpc.add_StateServicer_to_server(a.source, a.server)
    assert await tell(b, a.peer_id) == b.peer_id
