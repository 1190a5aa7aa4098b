"""Two peers that cannot dial each other, and the relays between them: honest ones, evil ones, and
none."""

import asyncio
import contextlib
import hashlib
import math
import os
import signal
from unittest.mock import Mock

import grpc
import pytest

from node.core.errors import PeerFault, Refused
from node.identity.keys import Identity
from node.reach.settings import ReachSettings
from node.transport.ways import relays as relays_module
from testbed.networks.evil_relay import corrupt
from tests.transport.conftest import CLOSED, RUN, fetch, stream, until

pytestmark = pytest.mark.usefixtures("standing")


def introduce(peer, other, *relays) -> None:
    """Tell `peer` what the directory would: the relays' addresses, and `other` behind them."""
    for relay in relays:
        peer.learn(relay.peer_id, relay.p2p.addresses())
    peer.learn(other.peer_id, [], relays=[r.peer_id for r in relays])


async def fetched(peer, other, length: int = 1 << 20) -> str:
    """Digest of `length` bytes that `other` sends."""
    return hashlib.sha256(await fetch(peer, other.peer_id, length)).hexdigest()


ZEROS = hashlib.sha256(bytes(1 << 20)).hexdigest()


async def test_a_hidden_peer_is_reached_through_a_relay_both_ways(swarm, hidden):
    relay = await swarm()
    a = await swarm()
    b = await hidden(relay)
    introduce(a, b, relay)
    assert await fetched(a, b) == ZEROS
    assert (a.path(b.peer_id), a.peers()[b.peer_id].via) == ("relayed", relay.peer_id)
    assert relay.relay.circuits >= 1
    assert relay.relay.clients == 1
    # After the handshake b can call back, over the addresses that a announces.
    b.learn(a.peer_id, a.p2p.addresses())
    assert await fetched(b, a) == ZEROS
    assert b.path(a.peer_id) == "direct"


async def test_a_better_way_replaces_the_relay_without_ending_calls(swarm, hidden):
    relay = await swarm()
    a = await swarm()
    b = await hidden(relay, force_tunnel=True)
    introduce(a, b, relay)
    b.source.gate.clear()
    call = await stream(a, b.peer_id)
    await call.read()
    assert a.path(b.peer_id) == "relayed"
    assert (await b.p2p.connect([a.p2p.addresses()[0]]))[a.p2p.addresses()[0]] == ""
    await until(lambda: a.path(b.peer_id) == "reversed", 20)
    b.source.gate.set()
    assert len((await call.read()).data) == 1 << 16, "the call in flight went on"


async def test_when_a_relay_dies_the_other_one_carries_on(swarm, hidden):
    first = await swarm()
    second = await swarm()
    a = await swarm()
    b = await hidden(first, second)
    introduce(a, b, first, second)
    assert await fetched(a, b) == ZEROS
    used, other = (first, second) if a.peers()[b.peer_id].via == first.peer_id else (second, first)
    lost = asyncio.Event()
    a.on_lost(lambda peer: lost.set())
    await used.close()
    await asyncio.wait_for(lost.wait(), 60)
    async with asyncio.timeout(60):
        while True:
            # A redial may begin at the relay that is gone.
            with contextlib.suppress(grpc.aio.AioRpcError, PeerFault):
                assert await fetched(a, b) == ZEROS
                if a.peers()[b.peer_id].via == other.peer_id:
                    break
            await asyncio.sleep(0.05)
    await until(lambda: b.relays.held == (other.peer_id,), 60)


@pytest.mark.parametrize("orderly", [True, False])
async def test_only_a_relay_that_falls_silent_is_worth_a_warning(
    swarm, hidden, monkeypatch, orderly
):
    monkeypatch.setattr(relays_module, "BEAT_S", 0.5)
    if not orderly:
        monkeypatch.setattr(relays_module, "BEAT_TIMEOUT_S", 3.0)
    relay = await swarm()
    b = await hidden(relay)
    if orderly:
        await relay.close()
    else:
        os.kill(relay.p2p.pid, signal.SIGSTOP)
    try:
        await until(lambda: not b.relays.held, 60)
    finally:
        if not orderly:
            os.kill(relay.p2p.pid, signal.SIGCONT)
    assert [e.level for e in b._journal.recent() if e.kind == "relay-lost"] == [
        "info" if orderly else "warning"
    ]


async def test_without_a_reservation_there_is_no_way(swarm):
    relay = await swarm()
    a = await swarm()
    b = await swarm()
    await b.p2p.connect([relay.p2p.addresses()[0]])
    introduce(a, b, relay)
    with pytest.raises(PeerFault, match="not connected to this relay"):
        await a.channel(b.peer_id)
    assert any("relay" in way for way in a.lines.tried(b.peer_id))


async def test_a_relay_keeps_to_its_limits_and_to_its_run(swarm, hidden):
    limits = ReachSettings(relay_clients=1, relay_circuits=64, relay_circuits_each=2)
    relay = await swarm(reach=limits)
    a = await swarm()
    b = await hidden(relay)
    assert relay.relay.clients == 1
    late = await swarm()
    CLOSED.add(id(late.reachable))
    await late.p2p.connect([relay.p2p.addresses()[0]])
    with pytest.raises(PeerFault, match="the 1 reservations for strangers are taken"):
        await late.relays._ask(
            relay.peer_id, relays_module.RelayAsk(reserve=relays_module.Reserve())
        )
    introduce(a, b, relay)
    assert await fetched(a, b) == ZEROS
    held = []

    async def open_three() -> None:
        for _ in range(3):
            held.append(await a.relays._connect(relay.peer_id, b.peer_id, "/tutti/handshake/1"))

    with pytest.raises(PeerFault, match="2 circuits of this peer are open"):
        await open_three()
    for _, writer in held:
        writer.close()
    stranger = await swarm(run="b" * 64)
    stranger.learn(relay.peer_id, relay.p2p.addresses())
    stranger.learn(b.peer_id, [], relays=[relay.peer_id])
    with pytest.raises(PeerFault, match="another run"):
        await stranger.channel(b.peer_id)


async def test_a_peer_that_is_admitted_no_more_loses_its_place(swarm, hidden, monkeypatch):
    monkeypatch.setattr(relays_module, "BEAT_S", 0.1)
    revoked = set()

    def admit(peer, hello):
        if peer in revoked:
            raise Refused("revoked")
        return math.inf

    relay = await swarm(admit=admit)
    b = await hidden(relay)
    assert relay.relay.clients == 1
    revoked.add(b.peer_id)
    await until(lambda: not relay.relay.clients and not b.relays.held, 10)


async def test_a_client_that_floods_its_relay_holds_nobody_up(swarm):
    admit = Mock(return_value=math.inf)
    relay = await swarm(admit=admit)
    client = await swarm()
    await client.p2p.connect([relay.p2p.addresses()[0]])
    reader, writer, _ = await client.relays._ask(
        relay.peer_id, relays_module.RelayAsk(reserve=relays_module.Reserve())
    )
    writer.write(b"." * (1 << 16))
    async with asyncio.timeout(10):
        assert await reader.readexactly(1 << 16) == b"." * (1 << 16), "each is answered"
    assert admit.call_count < 1 << 10
    writer.close()


@pytest.mark.parametrize("kind", ["poses", "reads", "alters", "replays", "stalls", "cuts"])
async def test_an_evil_relay_gains_nothing(swarm, hidden, kind):
    honest = await swarm()
    a = await swarm()
    key = Identity.ephemeral()
    bad = await swarm(identity=key, started=False)
    evil = corrupt(bad, kind, key, RUN)
    await bad.start()
    b = await hidden(honest, bad)
    # At first only the evil relay is known.
    introduce(a, b, bad)
    if kind == "poses":
        with pytest.raises(PeerFault, match="somebody else answers|no private connection"):
            await a.channel(b.peer_id)
        assert not evil.seen
    elif kind in ("reads", "replays"):
        assert await fetched(a, b) == ZEROS
        token = a.lines.open[b.peer_id].met.token
        assert bytes.fromhex(token) not in evil.seen
        assert token.encode() not in evil.seen
        assert RUN.encode() not in evil.seen, "not even which run the peers talk about"
        if kind == "replays":
            await until(lambda: evil.answers, 15)
            assert evil.answers == [b""], "the peer hangs up on what it has seen before"
    else:
        with pytest.raises((grpc.aio.AioRpcError, PeerFault)):
            await fetched(a, b, 1 << 22)
    introduce(a, b, bad, honest)
    async with asyncio.timeout(60):
        while True:
            try:
                assert await fetched(a, b) == ZEROS
                break
            except (grpc.aio.AioRpcError, PeerFault):
                # the line through the evil relay may still be there for a moment
                await asyncio.sleep(0.2)
    if kind not in ("reads", "replays"):
        assert a.peers()[b.peer_id].via == honest.peer_id
