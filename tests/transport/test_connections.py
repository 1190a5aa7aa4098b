"""Incoming connections: the choice of those that are ended."""

import asyncio
import contextlib
import socket
import subprocess
import sys

import psutil
import pytest

from node.core.ids import PeerId
from node.transport.connections import (
    IDLE_S,
    UNKNOWN_S,
    Connection,
    Connections,
    hang_up,
    incoming,
    remote_of,
)

MEMBER = PeerId("member")
STRANGER = PeerId("stranger")
NEWCOMER = PeerId("newcomer")


def connections(total: int = 8) -> Connections:
    return Connections(total, lambda peer: peer == MEMBER)


def several(count: int, host: str = "192.0.2.1", begin: int = 0) -> list[Connection]:
    return [Connection(100 + i, (host, 5000 + i)) for i in range(begin, begin + count)]


def name(connection: Connection) -> str:
    return f"ipv4:{connection.remote[0]}:{connection.remote[1]}"


def test_a_connection_that_shows_no_token_ends() -> None:
    some = connections()
    one, other = several(2)
    assert some.look([one, other], 0.0) == []
    some.called(name(one), STRANGER, 1.0)
    assert some.look([one, other], UNKNOWN_S) == []
    assert some.look([one, other], UNKNOWN_S + 0.1) == [other]


def test_an_idle_stranger_is_hung_up_on_and_a_member_is_not() -> None:
    some = connections()
    one, other = several(2)
    some.look([one, other], 0.0)
    some.called(name(one), STRANGER, 1.0)
    some.called(name(other), MEMBER, 1.0)
    assert some.look([one, other], 2.0) == []
    assert some.look([one, other], 1.1 + IDLE_S) == [one]


def test_strangers_share_half_and_a_newcomer_gets_in() -> None:
    some = connections()
    flood = several(6)
    assert some.look(flood, 0.0) == flood[4:], "half of eight"
    for connection in flood[:4]:
        some.called(name(connection), STRANGER, 0.1)
    (first,) = several(1, begin=10)
    some.called(name(first), NEWCOMER, 0.2)
    ended = some.look([*flood[:4], first], 0.3)
    assert len(ended) == 1
    assert ended[0] in flood
    members = several(4, begin=20)
    for connection in members:
        some.called(name(connection), MEMBER, 0.4)
    left = [c for c in (*flood[:4], first) if c not in ended]
    assert not {c.remote for c in some.look([*left, *members], 0.5)} & {c.remote for c in members}


def test_what_is_closed_makes_room() -> None:
    some = connections()
    assert some.look(several(4), 0.0) == []
    assert some.look(several(4, begin=4), 1.0) == []


@pytest.mark.parametrize(
    ("where", "remote"),
    [
        ("ipv4:192.0.2.1:5000", ("192.0.2.1", 5000)),
        ("ipv6:%5B::1%5D:5000", ("::1", 5000)),
        ("ipv6:%5B::ffff:192.0.2.1%5D:5000", ("192.0.2.1", 5000)),
        ("unix:/a", None),
        ("ipv4:192.0.2.1:²", None),
        ("", None),
    ],
)
def test_the_address_is_read_from_the_name_that_grpc_gives(where: str, remote) -> None:
    assert remote_of(where) == remote


CALLER = """
import socket, sys
there = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
print(there.getsockname()[1], flush=True)
sys.stdin.read()
"""


def test_only_connections_from_elsewhere_are_incoming() -> None:
    with contextlib.ExitStack() as all_of_them:
        server = all_of_them.enter_context(socket.create_server(("127.0.0.1", 0)))
        port = server.getsockname()[1]
        datagrams = all_of_them.enter_context(socket.socket(type=socket.SOCK_DGRAM))
        datagrams.connect(("127.0.0.1", port))
        for one in socket.socketpair():
            all_of_them.enter_context(one)
        caller = all_of_them.enter_context(
            subprocess.Popen(
                [sys.executable, "-c", CALLER, str(port)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
        accepted = all_of_them.enter_context(server.accept()[0])
        assert caller.stdout is not None
        remote = ("127.0.0.1", int(caller.stdout.readline()))
        assert incoming(port) == [Connection(accepted.fileno(), remote)]


async def test_the_kernel_knows_connections_and_they_can_be_hung_up() -> None:
    begun = asyncio.Event()
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        begun.set()
        with contextlib.suppress(OSError):
            await reader.read()
        ended.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    here = socket.create_connection(("127.0.0.1", port))
    await begun.wait()
    assert incoming(port) == [], "this process opened it itself"
    its_end = next(
        Connection(c.fd, c.raddr[:2])
        for c in psutil.Process().net_connections("tcp")
        if c.laddr.port == port and c.raddr
    )
    assert not hang_up(Connection(its_end.fd, ("127.0.0.1", 1))), "of something else by now"
    assert hang_up(its_end)
    await ended.wait()
    assert here.recv(1) == b""
    here.close()
    assert not hang_up(its_end)
    server.close()
