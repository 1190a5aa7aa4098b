"""Peers that leave without notice: killed, frozen, or behind a wire that carries nothing any
more."""

import asyncio
import contextlib
import math
import os
import signal
import socket
import time

import grpc
import pytest

from node.core.errors import PeerFault
from node.reach.interfaces import free_port
from node.transport.settings import LEAST_KEEPALIVE_S
from tests.transport.conftest import fetch


class Proxy:
    """A TCP proxy on loopback, ``rate`` bytes a second each way, that can swallow one way without
    closing anything. ``ended`` is set when the server hangs up."""

    def __init__(self, port: int, rate: float = math.inf) -> None:
        self._to = port
        self.port = 0
        self._rate = rate
        self.swallow_replies = self.swallow_requests = False
        self.ended = asyncio.Event()
        self._tasks: set[asyncio.Task] = set()
        self._held: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        near = self._shallow()
        near.bind(("127.0.0.1", 0))
        self._server = await asyncio.start_server(self._carry, sock=near)
        self.port = near.getsockname()[1]

    def _shallow(self) -> socket.socket:
        """A socket with small buffers: a wire has no megabytes of buffer."""
        made = socket.socket()
        for direction in (socket.SO_RCVBUF, socket.SO_SNDBUF):
            made.setsockopt(socket.SOL_SOCKET, direction, 1 << 16)
        return made

    async def close(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._held:
            writer.close()

    async def _carry(self, reader, writer) -> None:
        far = self._shallow()
        far.setblocking(False)
        await asyncio.get_running_loop().sock_connect(far, ("127.0.0.1", self._to))
        far_reader, far_writer = await asyncio.open_connection(sock=far)
        there = asyncio.ensure_future(self._pump(reader, far_writer, lambda: self.swallow_requests))
        back = asyncio.ensure_future(self._pump(far_reader, writer, lambda: self.swallow_replies))
        back.add_done_callback(lambda _: self.ended.set())
        self._tasks |= {there, back}
        self._held.append(far_writer)  # otherwise it is closed with the task that used it

    async def _pump(self, source, sink, silenced) -> None:
        due = time.monotonic()
        try:
            while piece := await source.read(1 << 14):
                if not silenced():
                    sink.write(piece)
                    await sink.drain()
                due = max(due, time.monotonic() - 0.05) + len(piece) / self._rate
                if (early := due - time.monotonic()) > 0.01:
                    await asyncio.sleep(early)
        except OSError:
            pass
        finally:
            if not silenced():
                sink.close()


@contextlib.asynccontextmanager
async def proxied(swarm, rate: float = math.inf, **settings):
    """Two peers and the proxy through which the first calls the second, which knows its
    addresses."""
    port = free_port(["127.0.0.1"])
    proxy = Proxy(port, rate)
    await proxy.start()
    a = await swarm(**settings)
    b = await swarm(grpc_port=port, announce=(f"127.0.0.1:{proxy.port}",), **settings)
    a.learn(b.peer_id, b.p2p.addresses())
    yield a, b, proxy
    await proxy.close()


async def lost(transport, peer) -> asyncio.Event:
    """Connect `transport` to `peer`; returns an event that is set when the connection is lost."""
    gone = asyncio.Event()
    transport.on_lost(lambda who: gone.set() if who == peer else None)
    await transport.channel(peer)
    assert transport.path(peer)
    return gone


KNOBS = {"keepalive_s": 1.0, "keepalive_timeout_s": 1.0}
BOUND_S = 30.0
"""Bound of every wait in s: a busy machine takes longer than the sum of the settings."""


async def test_every_connected_peer_notices_a_killed_process(swarm, processes):
    process = processes()
    facts = await process.ready()
    watchers = [await swarm(), await swarm()]
    for one in watchers:
        one.learn(facts["peer"], facts["multiaddrs"])
    events = [await lost(one, facts["peer"]) for one in watchers]
    process.process.kill()
    for gone in events:
        await asyncio.wait_for(gone.wait(), BOUND_S)
    assert [one.path(facts["peer"]) for one in watchers] == ["", ""]


async def test_a_break_is_told_though_a_failed_call_has_dropped_the_line(swarm, processes):
    """Services drop the connection of a call that failed, and may be quicker than a watcher."""
    process = processes()
    facts = await process.ready()
    a = await swarm()
    peer = facts["peer"]
    a.learn(peer, facts["multiaddrs"])
    gone = await lost(a, peer)
    channel = await a.channel(peer)
    process.process.kill()
    end = time.monotonic() + BOUND_S
    while channel.get_state() is grpc.ChannelConnectivity.READY and time.monotonic() < end:
        time.sleep(0.01)  # noqa: ASYNC251 - so that who watches the line does not run
    assert not gone.is_set()
    a.forget(peer)
    assert gone.is_set()
    with pytest.raises(PeerFault):
        await asyncio.wait_for(a.channel(peer), BOUND_S)


@pytest.mark.parametrize("tunnel", [False, True], ids=["direct", "tunnel"])
async def test_a_frozen_process_is_noticed_and_found_when_it_wakes(swarm, processes, tunnel):
    process = processes(force_tunnel=tunnel, **KNOBS)
    facts = await process.ready()
    a = await swarm(**KNOBS)
    peer = facts["peer"]
    a.learn(peer, facts["multiaddrs"])
    gone = await lost(a, peer)
    os.kill(process.process.pid, signal.SIGSTOP)
    try:
        await asyncio.wait_for(gone.wait(), BOUND_S)
        with pytest.raises(PeerFault):
            await a.ping(peer)
    finally:
        os.kill(process.process.pid, signal.SIGCONT)
    async with asyncio.timeout(BOUND_S):
        while not a.path(peer):
            with contextlib.suppress(PeerFault):
                await a.ping(peer)
    assert await a.ping(peer) > 0


async def test_a_line_without_calls_stays_up_whatever_is_probed(swarm):
    """A server that expected probes as rare as its own, or only during calls, would hang up on the
    fourth."""
    a = await swarm(keepalive_s=LEAST_KEEPALIVE_S, keepalive_timeout_s=BOUND_S)
    b = await swarm(keepalive_s=3600.0, keepalive_timeout_s=BOUND_S)
    a.learn(b.peer_id, b.p2p.addresses())
    gone = await lost(a, b.peer_id)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(gone.wait(), 8 * LEAST_KEEPALIVE_S)
    assert a.path(b.peer_id) == "direct"


async def test_a_server_hangs_up_on_a_client_that_vanished(swarm):
    """Otherwise connections of vanished peers would use up the server's limit."""
    knobs = {"keepalive_s": 0.5, "keepalive_timeout_s": 1.0, "relayed_timeout_s": 1.0}
    async with proxied(swarm, **knobs) as (a, b, proxy):
        await lost(a, b.peer_id)
        assert a.path(b.peer_id) == "direct"
        proxy.swallow_requests = proxy.swallow_replies = True
        await asyncio.wait_for(proxy.ended.wait(), 30)


async def test_a_one_way_connection_is_noticed_and_replaced(swarm):
    async with proxied(swarm, **KNOBS, dial_timeout_s=3.0) as (a, b, proxy):
        gone = await lost(a, b.peer_id)
        assert a.path(b.peer_id) == "direct"
        proxy.swallow_requests = True
        await asyncio.wait_for(gone.wait(), BOUND_S)
        async with asyncio.timeout(60):
            while not a.path(b.peer_id):
                with contextlib.suppress(PeerFault):
                    await a.ping(b.peer_id)
        assert a.path(b.peer_id) == "tunnel", "the peer lives, and the other way leads on"


async def test_a_slow_link_under_load_is_not_taken_for_a_silent_one(swarm):
    """In the middle of a transfer, answers to gRPC's own bandwidth probes take longer than a silent
    link may be silent."""
    async with proxied(swarm, rate=1.5e6, keepalive_timeout_s=1.5) as (a, b, _):
        gone = await lost(a, b.peer_id)
        fetched = await asyncio.gather(*(fetch(a, b.peer_id, 2 << 20, 60) for _ in range(3)))
        assert [len(data) for data in fetched] == [2 << 20] * 3
        assert not gone.is_set()
        assert a.path(b.peer_id) == "direct"
