"""Real p2pd, real TLS, real processes: connections, the identity they prove, and refusals."""

import asyncio
import contextlib
import dataclasses
import resource
import socket
import time

import grpc
import pytest

from node.core.errors import NetworkFault, PeerFault, Refused, UsageFault
from node.core.ids import PeerId, short
from node.identity.faults import PEERS_KEPT, TokenBucket
from node.identity.keys import Identity
from node.inference.forwarding import LIMIT_S
from node.reach.settings import ReachSettings
from node.transport.connections import IDLE_S, Connection, remote_of
from node.transport.service import DESCRIPTORS
from node.transport.ways import lines, reachable
from protos import ask_pb2, state_pb2, state_pb2_grpc, training_pb2, training_pb2_grpc
from tests.transport.conftest import fetch, introduce, stream, tell, until


def reading(transport, name: str, **labels: str) -> float | None:
    return transport._metrics.registry.get_sample_value(name, labels)


async def test_a_peer_that_shakes_hands_is_told_of(swarm):
    a, b = introduce(await swarm(), await swarm())
    met: list[str] = []
    b.on_met = met.append
    await a.channel(b.peer_id)
    assert met == [a.peer_id]


async def test_another_process_is_called_over_tls_and_over_the_tunnel(swarm, processes):
    dialled = processes()
    hidden = processes(force_tunnel=True)
    me = await swarm()
    for process, path in ((dialled, "direct"), (hidden, "tunnel")):
        facts = await process.ready()
        peer = facts["peer"]
        me.learn(peer, facts["multiaddrs"])
        assert await tell(me, peer) == me.peer_id
        assert me.path(peer) == path
        assert reading(me, "tutti_peers", path=path) == 1
        assert len(await fetch(me, peer, 8 << 20)) == 8 << 20
        assert 0 < await me.ping(peer) == me.peers()[peer].rtt
        me.count(peer, sent=5, received=8 << 20, plane="state")
        link = me.peers()[peer]
        assert (link.path, link.name, link.received) == (path, "test", 8 << 20)
    assert reading(me, "tutti_bytes_received_total", plane="state") == 16 << 20
    me.forget(facts["peer"])
    assert reading(me, "tutti_peers", path="tunnel") == 0
    assert reading(me, "tutti_peers", path="direct") == 1
    assert await hidden.end() == 0


async def test_concurrent_calls_share_one_handshake_and_one_channel(swarm):
    a, b = introduce(await swarm(), await swarm())
    assert len(set(await asyncio.gather(*(a.channel(b.peer_id) for _ in range(20))))) == 1
    assert len([e for e in a._journal.recent() if e.kind == "line-up"]) == 1
    assert await tell(b, a.peer_id) == b.peer_id


async def test_a_line_that_is_not_used_is_closed_and_dialled_anew(swarm):
    a, b = introduce(await swarm(), await swarm())
    later = a.settings.idle_s + 1
    pieces = aiter(await stream(a, b.peer_id, 64 << 20))
    assert (await anext(pieces)).data
    a.lines.rest(time.monotonic() + later)
    assert a.path(b.peer_id), "a stream is open"
    async for _ in pieces:
        pass
    a.lines.rest(time.monotonic() + later / 2)
    assert a.path(b.peer_id)
    a.lines.rest(time.monotonic() + later)
    assert not a.path(b.peer_id)
    assert await tell(a, b.peer_id) == a.peer_id
    assert not [e for e in a._journal.recent() if e.kind == "line-lost"]


async def test_a_stranger_is_not_hung_up_on_while_its_call_lasts(swarm, monkeypatch):
    monkeypatch.setattr("node.transport.service.LOOK_EVERY_S", 3600.0)
    a, b = introduce(await swarm(), await swarm())
    b.source.gate.clear()
    pieces = await stream(a, b.peer_id)
    await pieces.read()
    ((where, caller),) = b._auth.running()
    assert caller == a.peer_id
    remote = remote_of(where)
    assert remote is not None
    connection = Connection(0, remote)
    now = time.monotonic()
    later = 2 * IDLE_S
    assert b._unneeded([connection], now) == []
    assert b._unneeded([connection], now + later) == []
    b.source.gate.set()
    await pieces.read()
    await until(lambda: not b._auth.running(), 10)
    assert b._unneeded([connection], now + later) == []
    assert b._unneeded([connection], now + 2 * later) == [connection]


async def test_a_forgotten_line_leaves_time_for_the_longest_call(swarm, monkeypatch):
    monkeypatch.setattr(lines, "RETIRE_S", 0.0)
    a, b = introduce(await swarm(), await swarm())
    channel = await a.channel(b.peer_id)
    graces = asyncio.Queue()
    end = channel.close

    async def close(grace=None):
        graces.put_nowait(grace)
        await end(grace)

    monkeypatch.setattr(channel, "close", close)
    a.forget(b.peer_id)
    assert await asyncio.wait_for(graces.get(), 10) >= LIMIT_S


async def test_of_lost_peers_only_the_newest_are_remembered(swarm):
    """A peer with many keys can be met and lost under each of them."""
    a = await swarm()
    for number in range(PEERS_KEPT + 100):
        a.doubt(PeerId(f"stranger-{number}"))
    assert len(a.lines._lost) == PEERS_KEPT


async def test_a_server_with_another_certificate_is_not_the_peer(swarm):
    a = await swarm()
    impostor = await swarm()
    b = await swarm(announce=tuple(impostor.reachable.targets()[0]))
    introduce(a, b)
    assert await tell(a, b.peer_id) == a.peer_id
    assert a.path(b.peer_id) == "tunnel", (
        "the announced address shows another certificate, so it must not be used"
    )
    met = a.lines.open[b.peer_id].met
    with pytest.raises(PeerFault, match="none of its 1 addresses"):
        await a.lines._direct(met)
    honest = await a.lines._direct(dataclasses.replace(met, targets=(f"ipv4:127.0.0.1:{b._port}",)))
    assert honest.rung.word == "direct"
    await honest.channel.close()


async def test_an_unknown_token_is_refused_whatever_the_method(swarm):
    a, b = introduce(await swarm(), await swarm())
    channel = await a.channel(b.peer_id)
    for metadata in ((), (("tutti-token", "00" * 32),), (("tutti-token", ""),)):
        with pytest.raises(grpc.aio.AioRpcError, match="StatusCode.UNAUTHENTICATED"):
            # A body that does not parse would be an INTERNAL error, if it were read.
            await channel.raw.unary_unary("/tutti.v1.Training/Tell")(
                b"\xff" * 9, metadata=metadata, timeout=5
            )
        with pytest.raises(grpc.aio.AioRpcError, match="StatusCode.UNAUTHENTICATED"):
            await (
                state_pb2_grpc.StateStub(channel.raw)
                .Fetch(state_pb2.FetchRequest(length=1), metadata=metadata, timeout=5)
                .read()
            )


async def test_a_forgotten_token_costs_one_more_handshake(swarm):
    a, b = introduce(await swarm(), await swarm())
    old = await a.channel(b.peer_id)
    b._tokens.revoke(a.peer_id)
    assert await tell(a, b.peer_id) == a.peer_id, "a unary call shakes hands again by itself"
    assert await a.channel(b.peer_id) is not old
    b._tokens.revoke(a.peer_id)
    with pytest.raises(grpc.aio.AioRpcError):
        await fetch(a, b.peer_id, 1)
    await asyncio.gather(*(t for t in asyncio.all_tasks() if t.get_name() == "transport.look"))
    assert len(await fetch(a, b.peer_id, 1 << 16)) == 1 << 16, "a stream does so the next time"


async def test_a_token_shown_to_one_peer_opens_no_other(swarm):
    a, b, thief = introduce(await swarm(), await swarm(), await swarm())
    assert await tell(a, b.peer_id) == a.peer_id
    assert await tell(a, thief.peer_id) == a.peer_id
    stolen = thief.parrot.shown["tutti-token"]
    channel = await thief.channel(b.peer_id)
    with pytest.raises(grpc.aio.AioRpcError, match="StatusCode.UNAUTHENTICATED"):
        await training_pb2_grpc.TrainingStub(channel.raw).Tell(
            training_pb2.Note(), metadata=(("tutti-token", stolen),), timeout=5
        )
    assert await tell(thief, b.peer_id) == thief.peer_id, "under its own token it is only itself"


async def test_runs_protocols_and_admission_are_checked_on_both_sides(swarm):
    def nobody(peer, hello):
        raise Refused("this swarm is private", "ask for an invite")

    a, other_run, closed = introduce(
        await swarm(), await swarm(run="b" * 64), await swarm(admit=nobody)
    )
    with pytest.raises(PeerFault, match="we train bbbb"):
        await a.channel(other_run.peer_id)
    with pytest.raises(PeerFault, match="says farewell: this swarm is private"):
        await a.channel(closed.peer_id)
    assert not closed._tokens.knows(a.peer_id)
    with pytest.raises(PeerFault, match="private"):
        await closed.channel(a.peer_id)


async def test_a_peer_that_greets_too_often_hears_so(swarm):
    a, b = introduce(await swarm(), await swarm())
    b._strangers = TokenBucket(0.0, 1.0)
    await a.channel(b.peer_id)
    a.forget(b.peer_id)
    with pytest.raises(PeerFault, match="says farewell: you greet too often"):
        await a.channel(b.peer_id)
    b.established = lambda peer: peer == a.peer_id
    assert await a.channel(b.peer_id)


async def test_a_rendezvous_only_answers_questions(swarm):
    a = await swarm()
    rendezvous = await swarm(run="")
    address = rendezvous.p2p.addresses()[0]
    answer = await a.ask(address, ask_pb2.Ask(ping=ask_pb2.AskPing(nonce=b"now")))
    assert (answer.ping.nonce, answer.ping.name) == (b"now", "test")
    assert abs(answer.ping.time - time.time()) < 60, "by its own clock, which is this one"
    assert (await a.ask(address, ask_pb2.Ask(peers=ask_pb2.AskPeers()))).refusal.code == 6

    async def answerer(peer, question):
        if question.HasField("manifest"):
            raise Refused("no manifest here")
        return ask_pb2.Answer(peers=ask_pb2.PeersAnswer(peers=[ask_pb2.PeerLine(peer=peer)]))

    rendezvous.asking.answerer = answerer
    assert (await a.ask(rendezvous.peer_id, ask_pb2.Ask(peers=ask_pb2.AskPeers()))).peers.peers[
        0
    ].peer == a.peer_id
    refused = await a.ask(rendezvous.peer_id, ask_pb2.Ask(manifest=ask_pb2.AskManifest()))
    assert (refused.refusal.code, refused.refusal.reason) == (5, "no manifest here")
    for one, other in ((a, rendezvous), (rendezvous, a)):
        with pytest.raises(PeerFault, match="run"):
            await one.channel(other.peer_id)


async def test_a_banned_peer_is_refused_in_both_directions(swarm):
    a, b = introduce(await swarm(), await swarm())
    assert await tell(b, a.peer_id) == b.peer_id
    for _ in range(3):
        a.fault(b.peer_id, "garbage", weight=1.0)
    with pytest.raises(PeerFault, match="is refused for"):
        await a.channel(b.peer_id)
    with pytest.raises(PeerFault, match="refuses us"):
        await tell(b, a.peer_id)
    assert reading(a, "tutti_bans_total") == 1


async def test_one_peer_may_not_take_every_seat(swarm):
    a, b, c = introduce(await swarm(), await swarm(peer_streams=2), await swarm())
    b.source.gate.clear()
    held = [await stream(a, b.peer_id) for _ in range(2)]
    for call in held:
        await call.read()
    # HTTP/2 makes a third call of the same connection wait; a second connection meets the limit of
    # the peer.
    other = a.lines._channel(a.lines.open[b.peer_id].met, f"ipv4:127.0.0.1:{b._port}")
    with pytest.raises(grpc.aio.AioRpcError, match="StatusCode.RESOURCE_EXHAUSTED"):
        await other.unary_unary("/tutti.v1.Training/Tell")(b"\xff" * 9, timeout=10)
    assert await tell(c, b.peer_id) == c.peer_id
    b.source.gate.set()
    assert [len((await call.read()).data) for call in held] == [1 << 16] * 2
    await other.close()


async def test_a_lost_peer_is_forgotten_and_found_after_its_restart(swarm):
    identity = Identity.ephemeral()
    a, b = introduce(await swarm(), await swarm(identity=identity))
    lost = asyncio.Event()
    a.on_lost(lambda peer: lost.set() if peer == b.peer_id else None)
    assert await tell(a, b.peer_id) == a.peer_id
    await b.close()
    await asyncio.wait_for(lost.wait(), 10)
    assert a.path(b.peer_id) == ""
    # Others decide whether the peer is lost or has left.
    (broke,) = (e for e in a._journal.recent() if e.kind == "line-lost")
    assert (broke.level, broke.text) == (
        "debug",
        f"the connection to test ({short(b.peer_id)}) broke",
    )
    with pytest.raises(PeerFault):
        await a.channel(b.peer_id)
    # The restarted peer announces itself, as its directory record would; a connection it makes
    # counts as well.
    again, _ = introduce(await swarm(identity=identity), a)
    assert await tell(again, a.peer_id) == again.peer_id
    async with asyncio.timeout(60):
        while not a.path(again.peer_id):
            with contextlib.suppress(PeerFault):
                await a.ping(again.peer_id)
    assert await tell(a, again.peer_id) == a.peer_id


@pytest.mark.parametrize(
    ("seen", "places"),
    [
        ("/ip4/11.0.0.5/tcp/4001", (("11.0.0.5", 4001),)),
        ("/ip4/11.0.0.5/tcp/²", (("11.0.0.5", 0),)),
        ("/dns/a b/tcp/1", ()),
        ("/ip6/2600::1%a b/tcp/1", ()),
    ],
)
async def test_a_place_seen_is_believed_only_as_an_address(swarm, seen, places):
    a = await swarm(started=False)
    b = await swarm(started=False)

    async def said(*question):
        return ask_pb2.Answer(reach=ask_pb2.ReachAnswer(seen=seen))

    a.asking.ask = said
    await a.reachable._be_dialled(b.peer_id, [])
    assert a.reachable._reach.seen(time.monotonic()) == places


@pytest.mark.parametrize("quic", [False, True])
async def test_when_p2pd_moves_the_new_port_is_mapped(swarm, monkeypatch, quic):
    monkeypatch.setattr(reachable, "LOOK_S", 0.01)
    peer = await swarm(started=False, quic=quic)
    wanted = asyncio.Queue()
    peer.reachable.local = False
    peer.reachable._settings = ReachSettings(map_ports=False)
    peer.reachable.mapper.want = wanted.put_nowait
    peer.p2p._up.set()
    peer.reachable.start()
    for port in (4001, 4002):
        peer.p2p._ports = port, port
        async with asyncio.timeout(10):
            while ("tcp", port) not in (ports := await wanted.get()):
                pass
        assert (("udp", port) in ports) == quic


@pytest.mark.parametrize("address", ["example.com", "a_b:7001", "example.com:0"])
async def test_an_address_nobody_could_dial_is_not_announced(swarm, address):
    transport = await swarm(started=False, announce=("1.2.3.4:7001", address))
    with pytest.raises(UsageFault, match=f"transport.announce: not an address: '{address}'"):
        await transport.start()


async def test_a_taken_port_is_named_with_its_holder(swarm):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        options = {
            "grpc_port": "--set transport.grpc_port=PORT",
            "p2p_port": "--p2p-port PORT",
            "bypass_port": "--set transport.bypass_port=PORT",
        }
        for setting, option in options.items():
            transport = await swarm(started=False, **{setting: port})
            with pytest.raises(NetworkFault, match=f"port {port} of 127.0.0.1") as fault:
                await transport.start()
            assert option in fault.value.next_step
            assert "pid" in fault.value.what


async def test_its_connections_fit_below_the_limit_of_descriptors(swarm):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 1024), hard))
    try:
        await swarm()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, DESCRIPTORS), hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
