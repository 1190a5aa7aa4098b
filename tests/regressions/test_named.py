"""Eight ways in which a swarm like this one has been stopped, misled or taken over; each by its
name."""

import asyncio
import contextlib
import dataclasses
import os
import signal
import time

import grpc
import psutil
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from node.core.clock import SystemClock
from node.core.errors import PeerFault, WireError
from node.core.ids import PeerId, RunId
from node.core.journey import Version
from node.dht.directory import Directory
from node.dht.settings import DirectorySettings
from node.epoch import events as ev
from node.epoch.member import Member
from node.identity.keys import Identity
from node.reach.secure import ServerCertificate, check_certificate, make_certificate
from node.telemetry.events import Journal
from node.transport import ask
from tests.training.test_leader import S1, S2, E, begun
from tests.transport.test_silence import lost, proxied

A = PeerId("a")
B = PeerId("b")
RUN = RunId("ab" * 32)


def test_01_over_nested_messages_raise_an_error(apart) -> None:
    """300 to 20,000 levels of nested extensions raise an error in the decoder that hivemind's
    messages go through."""
    said = apart("""
import msgpack, sys
from node.dht import guard
from hivemind.utils import MSGPackSerializer
guard.install()
assert not {"hivemind.averaging", "scipy.optimize"} & sys.modules.keys()
for depth in (300, 2000, 20_000):
    value = b"\\xc0"
    for _ in range(depth):
        value = msgpack.packb(msgpack.ExtType(0x40, b"\\x91" + value))
    try:
        MSGPackSerializer.loads(value)
        print("read", depth)
    except ValueError:
        print("refused", depth)
print("alive", MSGPackSerializer.loads(MSGPackSerializer.dumps((1, (2,)))))
""")
    assert said.splitlines() == ["refused 300", "refused 2000", "refused 20000", "alive (1, (2,))"]


def test_02_a_stranger_cannot_fill_a_directory_nodes_memory(apart) -> None:
    """Endless, absurd and missing expiries, values of a megabyte and 20,000 keys: nothing is
    stored, little memory is taken."""
    said = apart("""
import asyncio, math, gc, psutil
from node.core.clock import SystemClock
from node.core.ids import RunId
from node.dht import guard
from hivemind.dht.routing import DHTID
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils import MSGPackSerializer
from node.dht.guard import AdmissionFilter
from node.dht.record_store import RecordStore, TopicStore
from node.dht.settings import DirectorySettings
from node.identity.keys import Identity
guard.install()

class P2P:
    peer_id = PeerID.from_base58(Identity.ephemeral().peer_id)
    async def add_protobuf_handler(self, *args, **kwargs): ...

async def main():
    board, clock = RecordStore(RunId("ab" * 32), DirectorySettings()), SystemClock()
    key, pack = DHTID.generate(source=board.key).to_bytes(), MSGPackSerializer.dumps
    topics = TopicStore(RunId("ab" * 32), DirectorySettings())
    validator = guard.EnvelopeValidator(board, clock, 4096, AdmissionFilter(clock), topics)
    here = guard.node_id_of(P2P.peer_id)
    node = await guard.SwarmProtocol.create(P2P(), here, 20, 5, 5, 3, record_validator=validator)
    stored = 0

    async def store(who, keys, value, expires):
        n = len(keys)
        request = dht_pb2.StoreRequest(keys=keys, subkeys=[pack("x")] * n, values=[value] * n,
                                       expiration_time=[expires] * n, in_cache=[False] * n)
        reply = await node.rpc_store(request, P2PContext("", P2P.peer_id, who))
        return sum(reply.store_ok)

    crowd = [PeerID.from_base58(Identity.ephemeral().peer_id) for _ in range(200)]
    warm = [await store(crowd[0], [key], pack(b"warm"), clock.wall() + 10) for _ in range(50)]
    gc.collect()
    before = psutil.Process().memory_info().rss
    for who, expires in zip(crowd, (math.inf, math.nan, -math.inf, 9_999_999_999.0, 2.0**62)):
        stored += await store(who, [key], pack(b"value"), expires)
    for who in crowd[5:45]:
        stored += await store(who, [key], pack(bytes(1 << 20)), clock.wall() + 10)
    sent = 0
    while sent < 20_000:
        keys = [(sent + i).to_bytes(20, "big") for i in range(8)]
        stored += await store(crowd[sent // 8 % 200], keys, pack(bytes(100)), clock.wall() + 10)
        sent += 8
    await asyncio.sleep(0)
    gc.collect()
    grown = (psutil.Process().memory_info().rss - before) / 2**20
    print(stored, len(node.storage), len(node.cache), round(grown, 2))

asyncio.run(main())
""").split()
    assert said[:3] == ["0", "0", "0"]
    assert float(said[3]) < 8.0, f"grew by {said[3]} MiB"


async def test_05_a_stream_announcing_terabytes_is_closed_early(peers, monkeypatch) -> None:
    """A header of 2^40 bytes, and the largest our own can say, end the stream before a byte of a
    body is taken."""
    # so that this timeout does not end the stream here
    monkeypatch.setattr(ask, "READ_TIMEOUT_S", 600.0)
    a = await peers()
    b = await peers()
    a.learn(b.peer_id, b.p2p.addresses())
    # The second header is 2^40 in 8 bytes, as others write it: here it is a short message that
    # makes no sense, and then too many bytes.
    for header, body in ((b"\xff\xff\xff\xff", 0), ((2**40).to_bytes(8, "big"), 1 << 20)):
        reader, writer = await a.p2p.open_stream(b.peer_id, ask.STREAM)
        writer.write(header)
        async with asyncio.timeout(60.0):
            with contextlib.suppress(ConnectionError):
                for _ in range(0, body, 1 << 14):
                    writer.write(bytes(1 << 14))
                    await writer.drain()
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b"", "it hung up and said nothing"
        writer.close()
    assert (await a.ping(b.peer_id)) > 0


def mint(victim: ServerCertificate, signer: ServerCertificate) -> tuple[bytes, bytes]:
    """(key, certificate) with the victim's subject and name, signed by another member's key."""
    key = ec.generate_private_key(ec.SECP256R1())
    old = x509.load_pem_x509_certificate(victim.pem)
    by = x509.load_pem_x509_certificate(signer.pem)
    builder = (
        x509.CertificateBuilder()
        .subject_name(old.subject)
        .issuer_name(by.subject)
        .public_key(key.public_key())
        .serial_number(old.serial_number)
        .not_valid_before(old.not_valid_before_utc)
        .not_valid_after(old.not_valid_after_utc)
    )
    for extension in old.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    made = builder.sign(serialization.load_pem_private_key(signer.key, None), hashes.SHA256())
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return secret, made.public_bytes(serialization.Encoding.PEM)


async def test_06_a_member_cannot_forge_another_peers_certificate() -> None:
    """Certificates with the victim's name, signed by a member or by themselves, do not pass where
    the victim's certificate is pinned."""
    victim = make_certificate()
    member = make_certificate()
    key, leaf = mint(victim, member)
    shadow_key, shadow = mint(victim, victim)
    with pytest.raises(WireError, match="hash of its key"):
        check_certificate(leaf)  # nobody would pin it either

    async def reaches(shown: tuple[bytes, bytes], pinned: bytes, name: str) -> bool:
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([shown]))
        await server.start()
        options = [("grpc.ssl_target_name_override", name), ("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.aio.secure_channel(
            f"127.0.0.1:{port}", grpc.ssl_channel_credentials(pinned), options
        )
        try:
            while (
                state := channel.get_state(try_to_connect=True)
            ) is not grpc.ChannelConnectivity.READY:
                if state is grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                    return False
                await channel.wait_for_state_change(state)
            return True
        finally:
            await channel.close()
            await server.stop(None)

    async with asyncio.timeout(30.0):
        assert await reaches((victim.key, victim.pem), victim.pem, victim.name)
        for shown in (
            (key, leaf),
            (key, leaf + member.pem),
            (shadow_key, shadow),
            (shadow_key, shadow + victim.pem),
        ):
            assert not await reaches(shown, victim.pem, victim.name)
        assert not await reaches((key, leaf + member.pem), member.pem, victim.name), (
            "a pinned certificate vouches for no other"
        )


async def test_08_pending_calls_fail_as_soon_as_p2pd_is_killed(peers, record_property) -> None:
    """A frozen p2pd answers nothing; once it is killed, calls to it fail long before their own
    timeout of 100 s."""
    a = await peers()
    b = await peers(started=False)
    entered = asyncio.Event()

    async def silent(peer, reader, writer) -> None:
        entered.set()
        await reader.read()

    b.p2p.add_stream("/test/silent/1", silent)
    await b.start()
    a.learn(b.peer_id, b.p2p.addresses())
    reader, writer = await a.p2p.open_stream(b.peer_id, "/test/silent/1")
    await entered.wait()
    os.kill(a.p2p.pid, signal.SIGSTOP)
    waiting = [
        asyncio.ensure_future(a.p2p.open_stream(b.peer_id, "/test/silent/1", timeout=100))
        for _ in range(5)
    ]
    reading = asyncio.ensure_future(reader.read())
    await asyncio.sleep(0)
    began = time.monotonic()
    os.kill(a.p2p.pid, signal.SIGKILL)
    async with asyncio.timeout(30.0):
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert await reading == b""
    record_property("pending calls failed after", time.monotonic() - began)
    assert {type(e) for e in ended} == {PeerFault}
    assert all("our own p2p daemon went away" in str(e) for e in ended)
    writer.close()


async def test_09_a_wire_that_went_dead_in_one_direction_is_noticed(peers) -> None:
    """Replies vanish, nothing is closed: the line is given up within 15 s, with the settings as
    they come."""
    async with proxied(peers) as (a, b, proxy):
        gone = await lost(a, b.peer_id)
        assert a.path(b.peer_id) == "direct"
        proxy.swallow_replies = True
        await asyncio.wait_for(gone.wait(), 15.0)
        assert a.path(b.peer_id) == ""


def test_10_who_slept_through_an_epoch_wakes_to_closed_doors() -> None:
    """A peer paused for a minute: its late commit, round and plan belong to a term and attempt
    that are over."""
    leader, old = begun()
    member = Member(S1, Version(0))
    assert any(isinstance(a, ev.BeginEpoch) for a in member.handle(ev.PlanArrived(old), 5.0))

    # The others go on under a new leader with a higher term.
    new = dataclasses.replace(old, term=old.term + 2, leader=S2)
    assert any(isinstance(a, ev.BeginEpoch) for a in member.handle(ev.PlanArrived(new), 60.0))
    late = ev.RoundArrived(E, old.epoch, old.term, old.hash, 0, (), {}, (), (), 5.0)
    for stale in (
        late,
        ev.PlanArrived(old),
        dataclasses.replace(late, term=new.term, plan_hash=new.hash),
    ):
        assert [type(a) for a in member.handle(stale, 61.0)] == [ev.RefuseCaller]
    ended = ev.RoundEnded(old.epoch, old.term, 0, ("s1",), (), ())
    assert member.handle(ended, 61.0) == []
    assert member.handle(ev.Adopted(ended, "digest"), 61.0) == []
    assert member.at == Version(0)

    # The leader too refuses messages about a plan or an attempt that is not the current one.
    before = leader.phase
    for note in (ev.Committed(S1, "0" * 64, 0, "digest"), ev.Committed(S1, old.hash, 7, "digest")):
        assert not [
            a for a in leader.handle(note, 5.1) if isinstance(a, ev.SendPlan | ev.SendRound)
        ]
    assert leader.phase is before


async def test_12_without_bootstrap_peers_nobody_is_contacted(peers) -> None:
    """p2pd is started without its public bootstrap peers: a daemon without known peers has no
    connection and no DHT neighbour."""
    lonely = await peers()
    words = psutil.Process(lonely.p2p.pid).cmdline()
    flags = {
        w.lstrip("-").partition("=")[0]: w.partition("=")[2] for w in words if w.startswith("-")
    }
    assert "bootstrapPeers" not in flags
    assert flags["b"] == "0", "p2pd's switch for the public peers it knows"
    assert not any("bootstrap.libp2p.io" in w or "/dnsaddr/" in w for w in words)
    assert await lonely.p2p.look() == {}
    assert lonely.p2p.bootstrap.results == {}
    directory = Directory(
        Identity.ephemeral(),
        DirectorySettings(rejoin_s=0.01, rejoin_max_s=0.01),
        SystemClock(),
        RUN,
        Journal(),
    )
    await directory.attach(lonely.p2p.p2p)
    assert await directory.read() == {}
    assert directory.neighbours == 0
    assert await lonely.p2p.look() == {}
    await directory.close()
