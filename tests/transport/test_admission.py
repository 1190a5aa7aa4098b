"""A session must not outlive its admission: over TCP, through the tunnel, and in the middle of a
call."""

import math
import time

import grpc
import pytest

from node.core.errors import PeerFault, Refused
from node.core.ids import PeerId
from node.transport.handshake import Tokens
from protos import training_pb2, training_pb2_grpc
from tests.transport.conftest import introduce, stream, tell, until

A = PeerId("12D3KooWKPc4n25PiHREWBqubMEm5SbamK9PQJ7fzEaQV4RxqXrZ")


class Owner:
    """Admits everybody until ``until`` (Unix seconds), and nobody later."""

    def __init__(self) -> None:
        self.until = math.inf
        self.asked = 0

    def admit(self, peer, hello) -> float:
        self.asked += 1
        if self.until <= time.time():
            raise Refused("the admission token has expired", "ask for a new invite")
        return self.until


def told(channel):
    """Make a unary call over a line as it is: no handshake mends it."""
    return training_pb2_grpc.TrainingStub(channel.raw).Tell(
        training_pb2.Note(epoch=1), metadata=channel.label, timeout=30
    )


def test_a_token_speaks_for_its_peer_as_long_as_it_is_admitted():
    now = 1000.0
    tokens = Tokens(lambda: now)
    shown = tokens.issue(A).hex()
    assert (tokens.owner(shown), tokens.left(A)) == (None, 0.0)
    tokens.accept(A, 1060.0)
    assert (tokens.owner(shown), tokens.left(A), tokens.knows(A)) == (A, 60.0, True)
    now = 1060.0
    assert (tokens.owner(shown), tokens.left(A), tokens.knows(A)) == (None, 0.0, False)
    tokens.accept(A)
    assert (tokens.owner(shown), tokens.left(A)) == (A, math.inf), "the same token, admitted anew"


@pytest.mark.parametrize("tunnel", [False, True], ids=["direct", "tunnel"])
async def test_calls_end_with_the_admission(swarm, tunnel):
    owner = Owner()
    a, b = introduce(await swarm(), await swarm(admit=owner.admit, force_tunnel=tunnel))
    assert await tell(a, b.peer_id) == a.peer_id
    assert a.path(b.peer_id) == ("tunnel" if tunnel else "direct")
    channel = await a.channel(b.peer_id)
    asked = owner.asked
    owner.until = time.time() - 1
    b._tokens.accept(a.peer_id, owner.until)  # as if it had been admitted until a second ago
    with pytest.raises(grpc.aio.AioRpcError, match="StatusCode.UNAUTHENTICATED"):
        await told(channel)
    with pytest.raises(PeerFault, match="expired"):
        await tell(a, b.peer_id)
    assert owner.asked > asked, "it had to show its token again"
    stranger = await swarm()
    stranger.learn(b.peer_id, b.p2p.addresses())
    with pytest.raises(PeerFault):
        await tell(stranger, b.peer_id)
    owner.until = math.inf
    assert await tell(a, b.peer_id) == a.peer_id, "with a new token it is back"


async def test_a_call_in_progress_is_ended_when_the_admission_is(swarm):
    owner = Owner()
    a, b = introduce(await swarm(), await swarm(admit=owner.admit))
    b.source.gate.clear()
    b.parrot.gate.clear()
    channel = await a.channel(b.peer_id)
    b._tokens.accept(a.peer_id, time.time() + 4.0)
    pieces = await stream(a, b.peer_id)
    unary = told(channel)
    assert len((await pieces.read()).data) == 1 << 16
    for call in (pieces.read(), unary):
        with pytest.raises(grpc.aio.AioRpcError, match="(?s)StatusCode.UNAUTHENTICATED.*expired"):
            await call
    await until(lambda: not b._auth._running, 30)  # its place is free again


async def test_a_call_in_progress_is_ended_when_its_caller_is_revoked(swarm):
    a, b, other = introduce(await swarm(), await swarm(), await swarm())
    b.source.gate.clear()
    b.parrot.gate.clear()
    streams = [await stream(caller, b.peer_id) for caller in (a, other)]
    for pieces in streams:
        assert len((await pieces.read()).data) == 1 << 16
    unary = told(await a.channel(b.peer_id))
    await until(lambda: sum(c.peer == a.peer_id for c in b._auth._running) == 2, 10)
    b.expel(lambda peer: peer == a.peer_id)
    for call in (streams[0].read(), unary):
        with pytest.raises(grpc.aio.AioRpcError, match="StatusCode.UNAUTHENTICATED"):
            await call
    b.source.gate.set()
    assert len((await streams[1].read()).data) == 1 << 16, "nobody else's"


async def test_a_session_ends_with_the_invite_and_another_begins_with_another_invite(swarm):
    a, b = introduce(await swarm(), await swarm())
    b.source.gate.clear()
    pieces = await stream(a, b.peer_id)
    assert len((await pieces.read()).data) == 1 << 16
    b.expel(lambda peer: False, lambda peer: peer == a.peer_id)
    with pytest.raises(grpc.aio.AioRpcError, match="StatusCode.UNAUTHENTICATED"):
        await pieces.read()
    b.source.gate.set()
    a.forget(b.peer_id)
    pieces = await stream(a, b.peer_id)
    assert len((await pieces.read()).data) == 1 << 16


async def test_we_do_not_call_a_peer_whose_admission_has_ended(swarm):
    owner = Owner()
    a, b = introduce(await swarm(admit=owner.admit), await swarm())
    owner.until = time.time() + 60
    await a.channel(b.peer_id)
    line = a.lines.open.get(b.peer_id)
    assert line.met.until == owner.until
    assert await a.channel(b.peer_id) is line.channel
    object.__setattr__(line.met, "until", time.time() - 1)
    owner.until = time.time() - 1
    with pytest.raises(PeerFault, match="expired"):
        await a.channel(b.peer_id)
    assert a.path(b.peer_id) == ""
