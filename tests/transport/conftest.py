"""Peers on loopback: in this process, and as processes of their own."""

import asyncio
import contextlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import grpc
import pytest

from node.core.clock import SystemClock
from node.core.errors import WireError
from node.core.ids import PeerId
from node.core.version import PROTOCOLS
from node.identity.keys import Identity
from node.reach.interfaces import free_port
from node.reach.standing import Standing
from node.telemetry.events import Journal
from node.telemetry.metrics import Metrics
from node.transport.handshake import Facts
from node.transport.limits import Limit
from node.transport.port import TransportPort, translate
from node.transport.service import Transport
from node.transport.settings import TransportSettings
from node.transport.ways import relays as relays_module
from node.transport.ways.reachable import Reachable
from protos import state_pb2, state_pb2_grpc, training_pb2, training_pb2_grpc

HERE = Path(__file__).parent
RUN = "a" * 64


class Parrot(training_pb2_grpc.TrainingServicer):
    """Answers with the caller's PeerId when `gate` is open, and keeps the metadata it got."""

    def __init__(self, transport: TransportPort) -> None:
        self.transport = transport
        self.shown = {}
        self.gate = asyncio.Event()
        self.gate.set()

    async def Tell(self, request, context):
        await self.gate.wait()
        self.shown = dict(context.invocation_metadata())
        return training_pb2.NoteReply(accepted=True, reason=self.transport.caller(context))


class Source(state_pb2_grpc.StateServicer):
    """Sends the requested number of bytes in pieces of 64 KiB; waits for `gate` after each
    piece."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()

    async def Fetch(self, request, context):
        for offset in range(0, request.length, 1 << 16):
            yield state_pb2.StateChunk(offset=offset, data=bytes(1 << 16))
            await self.gate.wait()


class Shelf:
    """Leaves bytes for a caller in shared memory, and returns bytes that a caller has left."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        methods = {}
        for name, method in (("Leave", self.leave), ("Take", self.take)):
            methods[name] = grpc.unary_unary_rpc_method_handler(method)
            transport.serve_also(f"/test.Shelf/{name}", Limit(4 << 20, 64, 1000, 1000))
        transport.server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("test.Shelf", methods),)
        )

    async def leave(self, request: bytes, context) -> bytes:
        """Leave the bytes of the request; the answer is their place, empty for none."""
        peer = self._transport.caller(context)
        return self._transport.leave(peer, memoryview(request)) or b""

    async def take(self, request: bytes, context) -> bytes:
        """Answer with the bytes at a place; empty if they are not there."""
        into = bytearray(1 << 20)
        try:
            length = self._transport.fetch(
                self._transport.caller(context), request, memoryview(into)
            )
        except WireError:
            return b""
        return bytes(into[:length])


def make_transport(
    run=RUN,
    admit=lambda peer, hello: math.inf,
    identity=None,
    protocols=PROTOCOLS,
    reach=None,
    **settings,
) -> Transport:
    """Return a Transport on loopback that serves a Parrot and a Source."""
    transport = Transport(
        identity or Identity.ephemeral(),
        TransportSettings(**{"host": "127.0.0.1", **settings}),
        Journal(clock=SystemClock()),
        Metrics(),
        lambda: Facts(run, "test", "0", b"admission", protocols),
        admit,
        reach=reach,
    )
    transport.parrot = Parrot(transport)
    transport.source = Source()
    Shelf(transport)
    training_pb2_grpc.add_TrainingServicer_to_server(transport.parrot, transport.server)
    state_pb2_grpc.add_StateServicer_to_server(transport.source, transport.server)
    return transport


@pytest.fixture
async def swarm():
    """Factory of transports, with the options of :func:`make_transport`: `make(started=True,
    peers=(), **options)`. All are closed after the test."""
    made: list[Transport] = []

    async def make(started=True, peers=(), **options) -> Transport:
        made.append(make_transport(**options))
        if started:
            await made[-1].start(peers)
        return made[-1]

    yield make
    for transport in made:
        await transport.close()


CLOSED: set[int] = set()
"""Peers on loopback that believe that nobody can dial them."""


@pytest.fixture
def standing(monkeypatch):
    """Peers on loopback can all be dialled; those in CLOSED believe that they cannot."""
    CLOSED.clear()
    monkeypatch.setattr(
        Reachable,
        "standing",
        property(lambda self: Standing.CLOSED if id(self) in CLOSED else Standing.OPEN),
    )
    monkeypatch.setattr(relays_module, "LOOK_S", 0.1)


@pytest.fixture
def hidden(swarm, standing):
    """Factory of hidden peers: `make(relays…)` returns a peer whose address nobody knows, with a
    reservation at each relay."""

    async def make(*relays, **settings):
        # The announced address has no listener, so that p2pd's own search for peers does not find
        # the peer either.
        port = free_port(["127.0.0.1"])
        peer = await swarm(p2p_port=port, announce=(f"127.0.0.9:{port}",), **settings)
        CLOSED.add(id(peer.reachable))
        for relay in relays:
            assert await peer.p2p.connect(relay.p2p.addresses()[:1]) == {
                relay.p2p.addresses()[0]: ""
            }
            peer.learn(relay.peer_id, relay.p2p.addresses(), room=9)
        async with asyncio.timeout(20):
            while len(peer.relays.held) < min(2, len(relays)):
                await peer.p2p.look()
                await asyncio.sleep(0.05)
        return peer

    return make


async def tell(source: TransportPort, peer: PeerId, timeout: float = 10.0) -> str:
    """Return the PeerId that `peer` takes `source` for."""
    try:
        stub = training_pb2_grpc.TrainingStub(await source.channel(peer))
        return (await stub.Tell(training_pb2.Note(epoch=1), timeout=timeout)).reason
    except grpc.aio.AioRpcError as e:
        raise translate(peer, e) from e


async def stream(source: TransportPort, peer: PeerId, length: int = 1 << 17, timeout=20.0):
    """Call `peer` for `length` bytes, which come in pieces of 64 KiB."""
    stub = state_pb2_grpc.StateStub(await source.channel(peer))
    return stub.Fetch(state_pb2.FetchRequest(length=length), timeout=timeout)


async def fetch(source: TransportPort, peer: PeerId, length: int, timeout=20.0) -> bytes:
    """Fetch `length` bytes from `peer`."""
    return b"".join([c.data async for c in await stream(source, peer, length, timeout)])


async def until(condition: Callable[[], object], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - the condition may be in another process
            await asyncio.sleep(0.05)


def introduce(*transports: Transport) -> tuple[Transport, ...]:
    """Return the transports after each has learnt the others' addresses."""
    for one in transports:
        for other in transports:
            one.learn(other.peer_id, other.p2p.addresses())
    return transports


class PeerProcess:
    """A running tests/transport/peer_process.py."""

    def __init__(self, **settings) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "peer_process.py"), json.dumps(settings)],
            stdin=-1,
            stdout=-1,
            env={**os.environ, "PYTHONPATH": str(HERE.parent.parent)},
        )
        self.facts = {}

    async def ready(self) -> dict:
        """The facts that the process prints when it serves."""
        self.facts = json.loads(await asyncio.to_thread(self.process.stdout.readline))
        return self.facts

    async def end(self) -> int:
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            return await asyncio.to_thread(self.process.wait, 60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise


@pytest.fixture
async def processes():
    """Factory of peers as processes: `start(**settings)` returns a PeerProcess; all are ended
    afterwards."""
    made: list[PeerProcess] = []

    def start(**settings) -> PeerProcess:
        made.append(PeerProcess(**settings))
        return made[-1]

    yield start
    for peer in made:
        if peer.process.poll() is None:
            await peer.end()
