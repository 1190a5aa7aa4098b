"""TCP connections past libp2p: by a call back, over a relay, and with peers that know of none."""

import asyncio
import contextlib
import errno
import os
import shutil
import socket
from collections import Counter
from collections.abc import AsyncIterator
from unittest.mock import AsyncMock, Mock, call

import pytest

from node.core.errors import NetworkFault, PeerFault
from node.core.ids import PeerId
from node.core.tasks import Tasks
from node.core.version import BYPASS_SINCE, Protocols
from node.identity.faults import TokenBucket
from node.reach.settings import ReachSettings
from node.transport.traffic import read_io
from node.transport.ways import arrivals, punch, relay, tunnel
from node.transport.ways.arrivals import NO_TICKET, PLACES_EACH, TICKET_BYTES, WayListener
from node.transport.ways.bypass import ASKS_AT_ONCE, Bypass
from protos.reach_pb2 import BypassAsk
from tests.transport.conftest import fetch, introduce, until

pytestmark = pytest.mark.usefixtures("standing")
MUCH = 8 << 20
FAR_LESS = 1 << 20
"""Bytes that p2pd moves beside, while much goes past it."""


async def fetched(here, there) -> bool:
    """Return True if all bytes have come."""
    return await fetch(here, there.peer_id, MUCH) == bytes(MUCH)


def moved(*transports) -> int:
    """Bytes that the p2p daemons of these peers have read and written."""
    return sum(sum(read_io(t.p2p.pid) or (0, 0)) for t in transports)


def passes(here, there) -> bool:
    """Return True if the connection to the peer goes past libp2p."""
    line = here.lines.open.get(there.peer_id)
    return line is not None and line.bypass


async def reversed_pair(swarm, hidden, **options):
    """Two peers of which only the second one has dialled the other."""
    a = await swarm()
    b = await hidden(force_tunnel=True, **options)
    assert (await b.p2p.connect(a.p2p.addresses()[:1]))[a.p2p.addresses()[0]] == ""
    await a.p2p.look()
    return a, b


async def test_a_peer_that_nobody_can_dial_calls_back(swarm, hidden):
    a, b = await reversed_pair(swarm, hidden)
    assert await fetched(a, b)
    assert a.path(b.peer_id) == "reversed"
    await until(lambda: passes(a, b), 20)
    before = moved(a, b)
    assert await fetched(a, b)
    assert moved(a, b) - before < FAR_LESS, "libp2p carried it"
    assert a.path(b.peer_id) == "reversed"


async def test_a_call_under_way_goes_on_where_it_began(swarm, hidden):
    a, b = await reversed_pair(swarm, hidden)
    b.source.gate.clear()
    first = asyncio.ensure_future(fetch(a, b.peer_id, MUCH, 60.0))
    await until(lambda: passes(a, b), 20)
    b.source.gate.set()
    assert await first == bytes(MUCH)


async def test_a_relay_joins_sockets_of_two_peers(swarm, hidden, monkeypatch):
    hub = await swarm()
    a = await swarm()
    b = await hidden(hub, force_tunnel=True)
    a.learn(hub.peer_id, hub.p2p.addresses())
    a.learn(b.peer_id, [], relays=[hub.peer_id])
    assert await fetched(a, b)
    await until(lambda: passes(a, b), 20)
    turns = Counter[tuple[str, ...]]()

    async def take(pair, count) -> None:
        turns[pair] += count

    monkeypatch.setattr(hub.relay._share, "take", take)
    counted = hub._metrics.relayed_bytes_total._value.get()
    before = moved(a, b, hub)
    assert await fetched(a, b)
    assert moved(a, b, hub) - before < FAR_LESS, "libp2p carried it"
    assert hub._metrics.relayed_bytes_total._value.get() - counted > MUCH, "it counts as relayed"
    pair = tuple(sorted((a.peer_id, b.peer_id)))
    assert turns[pair] > MUCH, "it has waited for its turns under the relay's rate"
    assert (a.path(b.peer_id), a.peers()[b.peer_id].via) == ("relayed", hub.peer_id)
    circuits = hub.relay.circuits
    a.forget(b.peer_id)
    await a.lines.close()
    await until(lambda: hub.relay.circuits < circuits, 20)


async def test_a_relay_joins_no_sockets_beyond_the_circuits_of_a_peer(swarm, hidden):
    hub = await swarm(reach=ReachSettings(relay_circuits_each=3))
    a = await swarm()
    b = await hidden(hub, force_tunnel=True)
    a.learn(hub.peer_id, hub.p2p.addresses())
    a.learn(b.peer_id, [], relays=[hub.peer_id])
    assert await fetched(a, b)
    held = list[asyncio.StreamWriter]()
    with contextlib.suppress(PeerFault):
        while len(held) < 3:
            _, writer, _ = await a.relays._connect(hub.peer_id, b.peer_id, tunnel.STREAM)
            held.append(writer)
    with pytest.raises(PeerFault, match="circuits of this peer are open"):
        await a.lines._past(a.lines.open[b.peer_id])
    for writer in held:
        writer.close()


async def test_bytes_that_a_relay_alters_are_not_taken(swarm, hidden, monkeypatch):
    hub = await swarm()
    a = await swarm()
    b = await hidden(hub, force_tunnel=True)
    altered = list[int]()

    async def alter(left, right, pay, piece) -> None:
        loop = asyncio.get_running_loop()
        with left, right:
            while data := await loop.sock_recv(left, 1 << 16):
                altered.append(len(data))
                await loop.sock_sendall(right, bytes([data[0] ^ 1]) + data[1:])

    monkeypatch.setattr(relay, "join", alter)
    a.learn(hub.peer_id, hub.p2p.addresses())
    a.learn(b.peer_id, [], relays=[hub.peer_id])
    assert await fetched(a, b)
    await until(lambda: a.lines.tried(b.peer_id).get("bypass"), 20)
    assert altered
    assert not passes(a, b)
    assert await fetched(a, b), "the tunnel through libp2p goes on"


async def test_a_peer_of_an_older_protocol_is_reached_by_libp2p(swarm, hidden):
    old = Protocols(7, BYPASS_SINCE - 1)
    a, b = await reversed_pair(swarm, hidden, protocols=old)
    assert await fetched(a, b)
    a.lines.climb(1e9)
    assert "bypass" not in a.lines.tried(b.peer_id)
    assert not passes(a, b)


async def test_where_nothing_arrives_libp2p_goes_on_carrying(swarm, hidden, monkeypatch):
    a, b = await reversed_pair(swarm, hidden)

    async def refuse(*words) -> socket.socket:
        raise ConnectionRefusedError("connection refused")

    monkeypatch.setattr(arrivals, "dial", refuse)
    assert await fetched(a, b)
    await until(lambda: a.lines.tried(b.peer_id).get("bypass"), 20)
    assert "connection refused" in a.lines.tried(b.peer_id)["bypass"]
    assert await fetched(a, b)


async def test_a_stranger_and_a_peer_that_asks_too_often_are_not_called(swarm):
    a, b = introduce(await swarm(), await swarm())
    ask = BypassAsk(ticket=bytes(TICKET_BYTES), port=1)
    with pytest.raises(PeerFault, match="shake hands first"):
        await a._bypass._ask(b.peer_id, ask)
    await a.channel(b.peer_id)
    for bad in (BypassAsk(port=1), BypassAsk(ticket=bytes(TICKET_BYTES), port=1 << 16)):
        with pytest.raises(PeerFault, match="no ticket was given|no port was given"):
            await a._bypass._ask(b.peer_id, bad)
    reasons = list[str]()
    b._bypass._rate = TokenBucket(0.0, ASKS_AT_ONCE)
    for _ in range(int(ASKS_AT_ONCE) + 1):
        with pytest.raises(PeerFault) as refused:
            await a._bypass._ask(b.peer_id, ask)
        reasons.append(refused.value.reason)
    assert all("no connection to port 1" in why for why in reasons[:-1])
    assert reasons[-1] == "too soon after the last questions"


async def test_only_public_addresses_are_punched(swarm):
    a, b = introduce(await swarm(), await swarm())
    await a.channel(b.peer_id)
    ask = BypassAsk(ticket=bytes(TICKET_BYTES), addresses=["/ip4/192.168.1.1/tcp/4001"])
    with pytest.raises(PeerFault, match="no public address was given"):
        await a._bypass._ask(b.peer_id, ask)
    ask.addresses[:] = ["/ip4/11.0.0.1/tcp/4001"]
    with pytest.raises(PeerFault, match="hole punching is off here"):
        await a._bypass._ask(b.peer_id, ask)


@pytest.mark.parametrize("right", [True, False])
async def test_a_punched_socket_is_carried_if_it_shows_the_ticket(monkeypatch, right):
    ticket = bytes(range(TICKET_BYTES))
    here, there = socket.socketpair()
    here.setblocking(False)
    end = Mock(welcomes=lambda peer: True, carry=AsyncMock())
    one = Bypass(Mock(), WayListener(), end, AsyncMock(), lambda: 0, list, lambda: True)
    peer = PeerId("asker")

    @contextlib.asynccontextmanager
    async def observed() -> AsyncIterator[tuple[int, list[str]]]:
        yield 4001, ["/ip4/11.0.0.2/tcp/4001"]

    monkeypatch.setattr(one, "_observed", observed)
    monkeypatch.setattr(punch, "open_connection", AsyncMock(return_value=here))
    reader = asyncio.StreamReader()
    ask = BypassAsk(ticket=ticket, addresses=["/ip4/11.0.0.1/tcp/4001"]).SerializeToString()
    reader.feed_data(len(ask).to_bytes(4, "big") + ask)
    there.sendall(ticket if right else bytes(TICKET_BYTES))
    await one.serve(peer, reader, Mock(drain=AsyncMock()))
    assert end.carry.await_args_list == [call(peer, here)] * right
    assert here.fileno() == -1
    there.close()


@pytest.mark.parametrize("error", [errno.EAFNOSUPPORT, errno.EMFILE])
async def test_a_target_without_a_socket_for_it_is_one_that_does_not_open(monkeypatch, error):
    none = Mock(side_effect=OSError(error, os.strerror(error)))
    monkeypatch.setattr(punch, "socket", Mock(socket=none))
    failed = []
    tasks = Tasks("test", lambda name, why: failed.append(why))
    with pytest.raises(NetworkFault, match="none of 1 addresses opened a connection"):
        await punch.open_connection(4001, [("2600::1", 4001)], tasks)
    assert none.called
    assert not failed, "a failed task would end the daemon"


async def test_without_a_socket_for_its_tunnel_a_peer_cannot_be_reached(swarm):
    a = await swarm(started=False)
    shutil.rmtree(a.p2p.runtime)
    met = Mock(peer=PeerId("peer"))
    with pytest.raises(PeerFault, match="no socket for a tunnel: .*No such file"):
        await a.lines._through_socket(met, AsyncMock(), 5.0, False)


# ----------------------------------------------------------- arrivals


@pytest.fixture
async def mine() -> AsyncIterator[WayListener]:
    made = WayListener()
    made.start("127.0.0.1", 0)
    yield made
    await made.close()


async def closed(made: socket.socket) -> bool:
    """Return True when the other end has closed a connection."""
    async with asyncio.timeout(10):
        try:
            return await asyncio.get_running_loop().sock_recv(made, 1) == b""
        except ConnectionError:
            return True


async def test_a_ticket_brings_one_connection(mine):
    with mine.expect() as expected:
        with await arrivals.dial("127.0.0.1", mine.port, bytes([7] * TICKET_BYTES)) as other:
            assert await closed(other)
        with await arrivals.dial("127.0.0.1", mine.port, expected.ticket) as there:
            with await expected.arrival() as here:
                await arrivals.say(here, b"hello")
                assert await arrivals.read_exactly(there, 5) == b"hello"
            with await arrivals.dial("127.0.0.1", mine.port, expected.ticket) as again:
                assert await closed(again)


async def test_a_connection_that_nobody_waits_for_any_more_is_closed(mine):
    with mine.expect() as expected:
        there = await arrivals.dial("127.0.0.1", mine.port, expected.ticket)
        await until(expected.came.done, 10)
    assert await closed(there)
    there.close()
    with await arrivals.dial("127.0.0.1", mine.port, expected.ticket) as late:
        assert await closed(late)


async def test_connections_without_a_ticket_end_and_leave_places(mine, monkeypatch):
    monkeypatch.setattr(arrivals, "SHOW_S", 0.3)
    silent = [await asyncio.open_connection("127.0.0.1", mine.port) for _ in range(PLACES_EACH + 1)]
    with await arrivals.dial("127.0.0.1", mine.port, NO_TICKET) as one:
        assert await closed(one), "all places of its address are taken"
    for reader, writer in silent:
        assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()
    await until(lambda: not len(mine._places), 10)


async def test_a_connection_is_told_where_it_comes_from(mine):
    with socket.create_connection(("127.0.0.1", mine.port)) as made:
        made.setblocking(False)
        assert await arrivals.seen_from(made) == made.getsockname()
