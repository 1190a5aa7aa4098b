"""The tunnel's ends: admission, and bytes that arrive whole and in order whichever side hangs up
first."""

import asyncio
import hashlib
import os
import socket
import struct
from contextlib import suppress
from functools import partial

import pytest
import uvloop

from node.core.errors import PeerFault
from node.core.ids import PeerId
from node.transport.ways import tunnel
from node.transport.ways.punch import hand_over
from node.transport.ways.tunnel import CONNECTIONS_PER_PEER, Tunnel, TunnelEnd, carry_over, splice
from tests.transport.conftest import introduce, tell

A = PeerId("a")
B = PeerId("b")
MEMBER = PeerId("member")


async def streams_of(end: socket.socket):
    return await asyncio.open_unix_connection(sock=end)


class Wire:
    """Streams that lead straight into a TunnelEnd."""

    def __init__(self, end: TunnelEnd | None) -> None:
        self.end = end
        self.serving = set()

    async def open_stream(self, peer, name, timeout=1.0, limit=0):
        assert name == tunnel.STREAM
        if self.end is None:
            raise PeerFault(peer, "cannot be reached")
        near, far = socket.socketpair()
        self.serving.add(asyncio.ensure_future(self._serve(peer, *await streams_of(far))))
        return await streams_of(near)

    async def _serve(self, peer, reader, writer):
        """Serve a stream, and close it as p2pd's client does."""
        assert self.end is not None
        try:
            await self.end.serve(peer, reader, writer)
        finally:
            writer.close()


@pytest.fixture
async def echo():
    """A server that sends back the hash of the bytes it got, then the bytes; yields (address, its
    connections)."""
    connections: list[asyncio.StreamWriter] = []

    async def serve(reader, writer) -> None:
        connections.append(writer)
        with suppress(asyncio.IncompleteReadError):  # a tunnel that ends before it says anything
            length = int.from_bytes(await reader.readexactly(4), "big")
            data = await reader.readexactly(length)
            writer.write(hashlib.sha256(data).digest() + data)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1], connections
    server.close()


async def test_tunnel_data_and_answers_arrive_before_the_end(echo, tmp_path, monkeypatch):
    monkeypatch.setattr(tunnel, "LINGER_S", 0.05)
    wire = Wire(TunnelEnd("127.0.0.1", lambda: echo[0], lambda peer: True))
    open_stream = partial(wire.open_stream, A, tunnel.STREAM)
    made = Tunnel(A, tmp_path / "t.sock", partial(carry_over, open_stream, None))
    await made.start()
    data = os.urandom(3 << 20)  # more than every buffer on the way, so that the sender has to wait
    reader, writer = await asyncio.open_unix_connection(made.target.removeprefix("unix:"))
    writer.write(len(data).to_bytes(4, "big") + data)
    await writer.drain()
    assert await asyncio.wait_for(reader.read(-1), 10) == hashlib.sha256(data).digest() + data
    await asyncio.wait_for(asyncio.gather(*wire.serving), 10)
    writer.close()
    await made.close()
    assert not list(tmp_path.iterdir())


async def test_strangers_and_excess_tunnels_are_closed(echo):
    port, connections = echo
    closed = Wire(TunnelEnd("127.0.0.1", lambda: port, lambda peer: False))
    await closed.open_stream(A, tunnel.STREAM)
    await asyncio.wait_for(asyncio.gather(*closed.serving), 10)
    assert connections == [], "a stranger's bytes do not even reach the server"
    wire = Wire(TunnelEnd("127.0.0.1", lambda: port, lambda peer: True))
    opened = [await wire.open_stream(A, tunnel.STREAM) for _ in range(CONNECTIONS_PER_PEER + 1)]
    done, held = await asyncio.wait(wire.serving, return_when=asyncio.FIRST_COMPLETED, timeout=10)
    assert (len(done), len(held)) == (1, CONNECTIONS_PER_PEER)
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    assert [await asyncio.wait_for(reader.read(), 10) for reader, _ in opened] == [b""] * len(
        opened
    )


@pytest.fixture
async def crowd(echo, monkeypatch):
    """Eight keys of one address block that hold the places of strangers; yields (the end, a
    function that opens one more tunnel of a peer over a stream or a socket, the readers of the
    eight, the peers that were refused or lost a place)."""
    monkeypatch.setattr(tunnel, "CONNECTIONS", 16)
    refused: list[PeerId] = []
    end = TunnelEnd(
        "127.0.0.1",
        lambda: echo[0],
        lambda peer: True,
        established=lambda peer: peer == MEMBER,
        block=lambda peer: peer.partition("-")[0],
    )
    end.on_refusal = refused.append
    wire = Wire(end)
    flights = set()
    writers: list[asyncio.StreamWriter] = []

    async def opened(peer: PeerId, way: str = "stream") -> asyncio.StreamReader:
        if way == "stream":
            reader, writer = await wire.open_stream(peer, tunnel.STREAM)
        else:
            near, far = socket.socketpair()
            flights.add(asyncio.ensure_future(end.carry(peer, far)))
            reader, writer = await streams_of(near)
        writers.append(writer)
        return reader

    held = [await opened(PeerId(f"crowd-{n}")) for n in range(8)]
    await echoes(echo, 8)
    yield end, opened, held, refused
    for task in (*wire.serving, *flights):
        task.cancel()
    await asyncio.gather(*wire.serving, *flights, return_exceptions=True)
    for writer in writers:
        writer.close()


async def echoes(echo, count: int) -> None:
    """Wait until the server has had this many connections."""
    async with asyncio.timeout(10):
        while len(echo[1]) < count:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("way", ["stream", "socket"])
async def test_strangers_leave_half_of_the_tunnels_to_established_peers(echo, crowd, way):
    end, opened, _, refused = crowd
    ninth = PeerId("crowd-8")
    assert not end.welcomes(ninth)
    assert await asyncio.wait_for((await opened(ninth, way)).read(), 10) == b""
    assert refused == [ninth]
    assert end.welcomes(MEMBER)
    for _ in range(8):
        await opened(MEMBER, way)
    await echoes(echo, 16)
    assert refused == [ninth], "nobody had to give way"


@pytest.mark.parametrize("way", ["stream", "socket"])
async def test_a_newcomer_takes_the_tunnel_of_a_crowd(echo, crowd, way):
    end, opened, held, refused = crowd
    newcomer = PeerId("newcomer-0")
    assert end.welcomes(newcomer)
    last = await opened(newcomer, way)
    await echoes(echo, 9)
    ended, _ = await asyncio.wait(
        [asyncio.ensure_future(reader.read()) for reader in (*held, last)],
        timeout=10,
        return_when=asyncio.FIRST_COMPLETED,
    )
    assert [task.result() for task in ended] == [b""]
    assert refused == ["crowd-0"]
    assert not last.at_eof()
    assert len(end._places) == 8


async def test_a_tunnel_that_gives_way_over_a_socket_is_closed(echo, monkeypatch):
    monkeypatch.setattr(tunnel, "CONNECTIONS", 4)
    end = TunnelEnd("127.0.0.1", lambda: echo[0], lambda peer: True, block=lambda peer: peer)
    tasks = set()
    ends: list[socket.socket] = []
    for peer in (A, A, B):
        near, far = socket.socketpair()
        ends.append(near)
        tasks.add(asyncio.ensure_future(end.carry(peer, far)))
        await asyncio.sleep(0)
    done, held = await asyncio.wait(tasks, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    assert [task.exception() for task in done] == [None]
    assert len(held) == 2
    ends[1].settimeout(10)
    assert ends[1].recv(1) == b""
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    for near in ends:
        near.close()


async def test_members_of_the_run_have_tunnels_where_a_stranger_holds_its_share(swarm):
    a, b, c = introduce(*[await swarm(force_tunnel=True) for _ in range(3)])
    b._tunnel_end._places.total = 2
    assert await tell(a, b.peer_id) == a.peer_id
    b.established = lambda peer: peer == c.peer_id
    assert await tell(c, b.peer_id) == c.peer_id
    assert await tell(a, b.peer_id) == a.peer_id
    assert (b._tunnel_end._places.strangers, len(b._tunnel_end._places)) == (1, 2)


async def test_a_tunnel_to_nobody_ends_its_connection(tmp_path):
    nobody = partial(Wire(None).open_stream, A, tunnel.STREAM)
    made = Tunnel(A, tmp_path / "t.sock", partial(carry_over, nobody, None))
    await made.start()
    reader, _ = await asyncio.open_unix_connection(str(tmp_path / "t.sock"))
    assert await asyncio.wait_for(reader.read(), 10) == b""
    assert made.fault == "cannot be reached"
    await made.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_piece_that_waits_when_its_way_ends_is_dropped(run, monkeypatch):
    """uvloop, on which daemons run, raises RuntimeError where asyncio drops the bytes."""
    monkeypatch.setattr(tunnel, "LINGER_S", 0.01)

    async def wait_while_the_other_end_goes() -> None:
        left, near = socket.socketpair()
        far, right = socket.socketpair()
        streams = *await streams_of(near), *await streams_of(far)

        async def pay(count: int) -> None:
            right.close()
            await streams[3].wait_closed()

        left.sendall(b"piece")
        async with asyncio.timeout(10):
            await splice(*streams, pay)
        left.close()

    run(wait_while_the_other_end_goes())


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_punched_connection_may_end_before_it_is_carried(run):
    async def reset_at_once() -> None:
        ours = socket.socket()
        ours.setblocking(False)
        ended = asyncio.Event()

        async def slow(reader, writer) -> None:
            with suppress(OSError):
                assert await reader.read() == b""
            ended.set()

        with socket.create_server(("127.0.0.1", 0)) as other:
            server = await asyncio.start_server(slow, "127.0.0.1", 0)
            await asyncio.get_running_loop().sock_connect(ours, other.getsockname())
            theirs, _ = other.accept()
            # Closing with this option resets the connection.
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            theirs.close()
            async with asyncio.timeout(10):
                with suppress(OSError):
                    await hand_over(ours, *server.sockets[0].getsockname())
                await ended.wait()
            server.close()

    run(reset_at_once())
