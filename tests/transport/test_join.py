"""Two sockets joined: bytes arrive whole and in order, whichever side hangs up first."""

import asyncio
import hashlib
import os
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from node.transport.ways import join as join_module
from node.transport.ways.join import TURNS, join

MUCH = 5 << 20
"""More bytes than all buffers on the way hold."""


@pytest.fixture(params=["kernel", "copies"])
def way(request, monkeypatch):
    """Where the kernel moves the bytes, and where it does not."""
    if request.param == "copies":
        monkeypatch.delattr(os, "splice", raising=False)
    elif not hasattr(os, "splice"):
        pytest.skip("this system has no splice")


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    return one, other


RUNS = pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
Run = Callable[[Coroutine[Any, Any, None]], None]


@RUNS
def test_bytes_cross_both_ways_and_the_ends_with_them(run: Run, way):
    data = os.urandom(MUCH)

    async def cross() -> None:
        near, left = socket.socketpair()
        right, far = tcp_pair()
        paid = list[int]()

        async def pay(count: int) -> None:
            paid.append(count)

        joined = asyncio.ensure_future(join(left, right, pay, 1 << 18))
        here = await asyncio.open_unix_connection(sock=near)
        there = await asyncio.open_connection(sock=far)
        here[1].write(data)
        here[1].write_eof()
        async with asyncio.timeout(30):
            assert await there[0].read(-1) == data
            there[1].write(hashlib.sha256(data).digest() + data)
            there[1].write_eof()
            assert await here[0].read(-1) == hashlib.sha256(data).digest() + data
            await joined
        assert sum(paid) == 2 * len(data) + 32
        assert max(paid) <= 1 << 18
        assert (left.fileno(), right.fileno()) == (-1, -1), "both are closed"
        here[1].close()
        there[1].close()

    run(cross())


@RUNS
@pytest.mark.skipif(not hasattr(os, "splice"), reason="this system has no splice")
def test_a_connection_that_is_quiet_holds_no_pipe(run: Run, monkeypatch):
    opened = set[int]()
    pipe2 = os.pipe2
    close = os.close

    def pipe(flags: int) -> tuple[int, int]:
        ends = pipe2(flags)
        opened.update(ends)
        return ends

    def closed(fd: int) -> None:
        opened.discard(fd)
        close(fd)

    monkeypatch.setattr(os, "pipe2", pipe)
    monkeypatch.setattr(os, "close", closed)

    async def cross() -> None:
        near, left = socket.socketpair()
        right, far = tcp_pair()
        joined = asyncio.ensure_future(join(left, right))
        loop = asyncio.get_running_loop()
        with near, far:
            near.setblocking(False)
            far.setblocking(False)
            async with asyncio.timeout(10):
                for source, sink in ((near, far), (far, near)):
                    await loop.sock_sendall(source, b"hello")
                    assert await loop.sock_recv(sink, 5) == b"hello"
                while opened:  # noqa: ASYNC110
                    await asyncio.sleep(0)
            assert not joined.done()
        await joined

    run(cross())


@RUNS
def test_when_one_end_breaks_the_other_one_ends(run: Run, way, monkeypatch):
    monkeypatch.setattr(join_module, "LINGER_S", 0.05)

    async def cut() -> None:
        near, left = socket.socketpair()
        right, far = tcp_pair()
        joined = asyncio.ensure_future(join(left, right))
        reader, writer = await asyncio.open_unix_connection(sock=near)
        writer.write(b"hello")
        far.close()
        async with asyncio.timeout(10):
            assert await reader.read(-1) == b""
            await joined
        writer.close()

    run(cut())


@RUNS
def test_a_cancelled_join_closes_both(run: Run, way):
    async def cancel() -> None:
        near, left = socket.socketpair()
        right, far = tcp_pair()
        joined = asyncio.ensure_future(join(left, right))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        joined.cancel()
        await asyncio.wait({joined})
        assert (left.fileno(), right.fileno()) == (-1, -1)
        assert near.recv(1) == far.recv(1) == b""
        near.close()
        far.close()

    run(cancel())


@RUNS
def test_bytes_that_are_there_already_do_not_hold_up_others(run: Run, way):
    data = os.urandom(100 * TURNS)

    async def cross() -> None:
        near, left = socket.socketpair()
        right, far = tcp_pair()
        near.sendall(data)
        for end in (near, far):
            end.shutdown(socket.SHUT_WR)
        joined = asyncio.ensure_future(join(left, right, piece=1))
        turns = 0
        while not joined.done():
            turns += 1
            await asyncio.sleep(0)
        assert turns >= len(data) // TURNS
        with near, far:
            assert far.recv(len(data), socket.MSG_WAITALL) == data

    run(cross())
