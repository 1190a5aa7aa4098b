"""The in-process transport keeps the promises of the port that engines are tested against."""

import grpc
import pytest

from node.core.errors import PeerFault
from node.core.ids import PeerId
from protos import training_pb2, training_pb2_grpc
from testbed.fakes.memory_net import MemoryNet
from tests.transport.conftest import Parrot, tell

A = PeerId("peer-a")
B = PeerId("peer-b")


async def start(net: MemoryNet, peer: PeerId) -> None:
    transport = net.transport(peer)
    training_pb2_grpc.add_TrainingServicer_to_server(Parrot(transport), transport.server)
    await transport.start()


@pytest.fixture
async def net():
    made = MemoryNet()
    for peer in (A, B):
        await start(made, peer)
    yield made
    await made.close()


async def test_the_called_knows_who_calls_and_channels_are_shared(net):
    assert await tell(net.transports[A], B) == A
    assert await tell(net.transports[B], A) == B
    assert await net.transports[A].channel(B) is await net.transports[A].channel(B)
    assert net.transports[A].path(B) == "direct"
    assert await net.transports[A].ping(B) > 0


async def test_a_killed_peer_cannot_be_called_and_its_successor_can(net):
    await tell(net.transports[A], B)
    stale = training_pb2_grpc.TrainingStub(await net.transports[A].channel(B))
    await net.kill(B)
    with pytest.raises(PeerFault):
        await tell(net.transports[A], B)
    with pytest.raises(grpc.aio.AioRpcError):
        await stale.Tell(training_pb2.Note(), timeout=5)
    await start(net, B)
    assert await tell(net.transports[A], B) == A


async def test_cut_refuses_at_once_and_mute_runs_into_the_timeout(net):
    stub = training_pb2_grpc.TrainingStub(await net.transports[A].channel(B))
    net.cut(A, B)
    with pytest.raises(PeerFault, match="cannot be reached"):
        await net.transports[A].channel(B)
    with pytest.raises(grpc.aio.AioRpcError, match="StatusCode.UNAVAILABLE"):
        await stub.Tell(training_pb2.Note(), timeout=5)
    net.mend(A, B)
    assert await tell(net.transports[A], B) == A
    net.mute(B)
    with pytest.raises(PeerFault, match="no answer in time"):
        await tell(net.transports[A], B, timeout=0.2)
    net.mute(B, False)
    assert await tell(net.transports[A], B) == A


async def test_a_call_on_a_closed_channel_is_a_lost_connection(net):
    stub = training_pb2_grpc.TrainingStub(await net.transports[A].channel(B))
    await net.kill(A)
    with pytest.raises(grpc.aio.AioRpcError, match="StatusCode.UNAVAILABLE"):
        await stub.Tell(training_pb2.Note(), timeout=5)
