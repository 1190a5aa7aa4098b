"""The parts that a stranger's bytes meet first: addresses, certificates, frames, limits, the
handshake itself."""

import asyncio
import datetime
import math
import ssl
import time
from types import SimpleNamespace

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from node.core.errors import ExitCode, PeerFault, Refused, WireError
from node.core.ids import PeerId
from node.core.version import PROTOCOL
from node.identity.faults import PEERS_KEPT, TokenBucket
from node.reach.interfaces import InterfaceKind
from node.reach.ladder import Rung
from node.reach.secure import check_certificate, make_certificate
from node.reach.settings import ReachSettings
from node.reach.standing import ReachReport, Standing
from node.telemetry.events import Journal
from node.transport import handshake, p2p
from node.transport.addresses import (
    ADDRESSES_KEPT,
    AddressBook,
    grpc_target,
    host_of,
    ip_of,
    multiaddr,
    part_of,
    split_multiaddr,
)
from node.transport.frames import StreamEnded, read_frame
from node.transport.handshake import Facts, Handshake, Tokens
from node.transport.service import PUNCHES_AT_ONCE, PUNCHES_PER_S, Transport
from node.transport.settings import TransportSettings
from node.transport.ways import reachable
from node.transport.ways.punch import candidates
from node.transport.ways.reachable import Known, Reachable
from protos.ask_pb2 import Answer, ReachAnswer
from protos.handshake_pb2 import Farewell, HandshakeFrame, Hello
from protos.reach_pb2 import PunchAsk

A = PeerId("12D3KooWKPc4n25PiHREWBqubMEm5SbamK9PQJ7fzEaQV4RxqXrZ")
B = PeerId("12D3KooWEyoppNCUx8Yx66oV9fJnriXwCcXwDDUA2kj6vnc6iDEp")


@pytest.mark.parametrize(
    ("address", "target"),
    [
        ("1.2.3.4:80", "ipv4:1.2.3.4:80"),
        ("[::1]:7001", "ipv6:[::1]:7001"),
        ("peer.example.org:65535", "dns:///peer.example.org:65535"),
    ],
)
def test_announced_addresses_are_dialled_as_what_they_are(address, target):
    assert grpc_target(address) == target


@pytest.mark.parametrize(
    "address",
    [
        "unix:/run/secret.sock:1",
        "xds:///x:1",
        "dns:///x:80",
        "1.2.3.4",
        "1.2.3.4:0",
        "1.2.3.4:70000",
        "::1:80",
        "300.1.1.1:80",
        "a,b:80",
        "host:８０",
        "[fe80::1%eth0]:80",
        "-x:80",
        "x" * 300 + ":80",
        ":80",
        "a b:80",
    ],
)
def test_no_other_scheme_can_be_smuggled_into_a_dial(address):
    with pytest.raises(WireError):
        grpc_target(address)


def test_multiaddrs_are_split_at_their_last_peer():
    circuit = f"/ip4/1.2.3.4/tcp/9/p2p/{B}/p2p-circuit/p2p/{A}"
    assert split_multiaddr(circuit) == (f"/ip4/1.2.3.4/tcp/9/p2p/{B}/p2p-circuit", A)
    assert part_of(circuit, "tcp") == "9"
    assert part_of(circuit, "udp") == ""
    for text in (
        "",
        "/ip4/1.2.3.4/tcp/9",
        f"ip4/1.2.3.4/p2p/{A}",
        "/ip4/1.2.3.4/tcp/9/p2p/0OIl",
        f"/ip4{'/x' * 300}/p2p/{A}",
    ):
        with pytest.raises(WireError):
            split_multiaddr(text)


def test_where_a_multiaddr_leads_is_an_ip_address_or_unknown():
    assert ip_of("/ip4/1.2.3.4/tcp/9/p2p/x") == ("1.2.3.4", 9)
    assert ip_of("/ip6/2600::1/udp/9/quic-v1") == ("2600::1", 0)
    for port in ("²", "65536", "9" * 5000, "-1", ""):
        assert ip_of(f"/ip4/1.2.3.4/tcp/{port}") == ("1.2.3.4", 0)
    for host in ("dns/example.org", "dns/a b", "ip4/localhost", "ip6/2600::1%a b", "unix/x", ""):
        assert ip_of(f"/{host}/tcp/9") is None


def test_only_public_addresses_are_punched():
    public = ["/ip4/11.0.0.5/tcp/4001", "/ip6/2600::1/tcp/65535"]
    assert candidates(public) == [("11.0.0.5", 4001), ("2600::1", 65535)]
    for other in (
        "/ip4/11.0.0.5/tcp/²",
        "/ip4/11.0.0.5/tcp/22",
        "/ip4/192.168.1.1/tcp/4001",
        "/dns/inside.example.org/tcp/6379",
        f"/dns/{'ä' * 70}/tcp/4001",
    ):
        assert candidates([other, public[0], public[0]]) == [("11.0.0.5", 4001)]


async def test_a_peer_gets_few_punches_at_once():
    spawned = []
    asked = object.__new__(Transport)
    asked.__dict__ |= {
        "caller": lambda context: A,
        "reachable": SimpleNamespace(
            seen=lambda: ["/ip4/11.0.0.9/tcp/4001"], local=False, moving_ports=lambda: False
        ),
        "reach_settings": ReachSettings(),
        "peer_id": B,
        "_punching": set(),
        "_punches": TokenBucket(PUNCHES_PER_S, PUNCHES_AT_ONCE),
        "_tasks": SimpleNamespace(spawn=lambda work, name: spawned.append(work)),
    }
    ask = PunchAsk(addresses=["/ip4/11.0.0.5/tcp/4001"])
    answers = [await asked._punch_asked(ask, None) for _ in range(int(PUNCHES_AT_ONCE) + 1)]
    assert [answer.accepted for answer in answers] == [True, True, True, False]
    assert answers[-1].reason == "too soon after the last attempt"
    assert len(spawned) == PUNCHES_AT_ONCE
    for work in spawned:
        work.close()


def certificate(key, *, ca=False, usage=True, name=None, many=False) -> bytes:
    """A certificate that deviates from ours in one respect."""
    spki = key.public_key().public_bytes(
        serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    digest = hashes.Hash(hashes.SHA256())
    digest.update(spki)
    name = name or digest.finalize().hex()[:32] + ".tutti"
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName(name)] + [x509.DNSName("localhost")] * many
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
    )
    if usage:
        flags = dict.fromkeys(
            (
                "content_commitment",
                "key_encipherment",
                "data_encipherment",
                "key_agreement",
                "crl_sign",
                "encipher_only",
                "decipher_only",
            ),
            False,
        )
        builder = builder.add_extension(
            x509.KeyUsage(digital_signature=True, key_cert_sign=ca, **flags), critical=True
        )
    signer = None if isinstance(key, ed25519.Ed25519PrivateKey) else hashes.SHA256()
    return builder.sign(key, signer).public_bytes(serialization.Encoding.PEM)


def test_only_a_certificate_of_our_own_form_is_pinned():
    made = make_certificate()
    assert check_certificate(made.pem) == made.name
    key = ec.generate_private_key(ec.SECP256R1())
    assert check_certificate(certificate(key))
    for bad in (
        certificate(key, ca=True),
        certificate(key, usage=False),
        certificate(key, name="victim.tutti"),
        certificate(key, many=True),
        certificate(ec.generate_private_key(ec.SECP384R1())),
        certificate(ed25519.Ed25519PrivateKey.generate()),
        made.pem + made.pem,
        made.key,
        made.pem + b" " * 4096,
        b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
        b"",
    ):
        with pytest.raises(WireError):
            check_certificate(bad)


@pytest.mark.parametrize(
    ("part", "other"),
    [
        ("2a8648ce3d0201", "2a8648ce3d0202"),  # an unknown kind of key
        ("2a8648ce3d030107", "2a8648ce3d03017f"),  # an unknown curve
        ("a003020102", "a003020107"),  # version 8
        ("820c68", "a50c68"),  # a name of a kind that the library does not know
    ],
)
def test_a_certificate_that_cannot_be_understood_is_refused(part, other):
    der = ssl.PEM_cert_to_DER_cert(
        certificate(ec.generate_private_key(ec.SECP256R1()), name="h" * 12).decode()
    )
    changed = der.replace(bytes.fromhex(part), bytes.fromhex(other))
    assert changed != der
    with pytest.raises(WireError, match="not a certificate of ours"):
        check_certificate(ssl.DER_cert_to_PEM_cert(changed).encode())


def stream_of(data: bytes) -> asyncio.StreamReader:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    return reader


async def test_initial_peers_are_tried_until_each_has_answered(monkeypatch):
    monkeypatch.setattr(p2p, "FIRST_RETRY_S", 0.0)
    journal = Journal()
    asked = []
    script = {"x": ["refused", "[/x] dial backoff", ""], "y": [""]}

    async def connect(missing):
        asked.append(list(missing))
        return {m: script[m].pop(0) for m in missing}

    way_in = p2p.Bootstrap(connect, journal)
    way_in.results = dict.fromkeys(script, p2p.NOT_TRIED)
    await way_in.run()
    assert (asked, way_in.results) == ([["x", "y"], ["x"], ["x"]], {"x": "", "y": ""})
    assert [e.level for e in journal.recent()] == ["warning", "info", "info"], (
        "each change is told once"
    )


def test_the_address_book_keeps_the_newest_of_the_right_peer():
    book = AddressBook(A)
    book.learn(B, [f"/ip4/1.2.3.4/tcp/1/p2p/{B}", f"/ip4/1.2.3.4/tcp/2/p2p/{A}", "junk"])
    book.learn(B, [f"/ip4/1.2.3.4/tcp/{n}/p2p/{B}" for n in range(2, 20)])
    assert book.of(B) == tuple(f"/ip4/1.2.3.4/tcp/{n}" for n in range(2, 10))
    book.learn(A, [f"/ip4/1.2.3.4/tcp/2/p2p/{A}"])
    assert book.of(A) == (), "nobody dials itself"


def test_the_address_book_keeps_some_addresses_of_each_kind():
    six = [f"/ip6/2600::{n}/tcp/1/p2p/{B}" for n in range(1, 9)]
    four = [f"/ip4/11.0.0.5/tcp/1/p2p/{B}", f"/ip4/192.168.1.5/tcp/1/p2p/{B}"]
    book = AddressBook(A)
    book.learn(B, six + four)
    assert len(book.of(B)) == 8
    assert {"/ip4/11.0.0.5/tcp/1", "/ip4/192.168.1.5/tcp/1"} < set(book.of(B))


async def test_a_frame_is_refused_by_its_length_before_it_is_read():
    assert await read_frame(stream_of(b"\0\0\0\2ok"), 2) == b"ok"
    with pytest.raises(WireError, match="4294967295 bytes") as refused:
        await read_frame(stream_of(b"\xff\xff\xff\xff"), 1 << 20)
    assert not isinstance(refused.value, StreamEnded)
    for cut in (b"", b"\0\0", b"\0\0\0\5four"):
        with pytest.raises(StreamEnded):
            await read_frame(stream_of(cut), 10)


def test_a_rate_is_that_of_each_peer():
    rate = TokenBucket(per_s=1.0, burst=2.0)
    assert [rate.allow(A, t) for t in (0, 0, 0, 0.5, 1.0, 1.1)] == [
        True,
        True,
        False,
        False,
        True,
        False,
    ]
    assert rate.allow(B, 1.1)
    for i in range(2 * PEERS_KEPT):
        rate.allow(PeerId(str(i)), 2.0)
    assert len(rate._buckets) == PEERS_KEPT


def test_a_token_speaks_for_its_peer_only_after_it_was_accepted():
    tokens = Tokens()
    token = tokens.issue(A).hex()
    assert tokens.owner(token) is None
    tokens.accept(A)
    assert tokens.owner(token) == A
    assert tokens.issue(A).hex() == token
    assert tokens.owner(token[:-2]) is None
    assert tokens.owner("ü") is None
    another = Tokens()
    another.issue(A)
    another.accept(A)
    assert another.owner(token) is None, "another node gave it another token"
    tokens.revoke(A)
    assert tokens.owner(token) is None
    for i in range(PEERS_KEPT + 1):
        tokens.accept(PeerId(str(i)))
    assert not tokens.knows(PeerId("0"))
    assert len(tokens._owner) == len(tokens._accepted) == PEERS_KEPT


class Sink:
    """A writer that keeps the bytes it gets."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data

    async def drain(self) -> None: ...

    def close(self) -> None: ...


class Scripted:
    """Streams with a scripted other side, which sends `replies` one after the other; None ends the
    stream."""

    def __init__(self, *replies: HandshakeFrame | bytes | None) -> None:
        self.replies = list(replies)
        self.opened = 0

    async def open_stream(self, peer, name, timeout=1.0, limit=0):
        self.opened += 1
        reply = self.replies.pop(0)
        raw = reply.SerializeToString() if isinstance(reply, HandshakeFrame) else reply
        return stream_of(b"" if raw is None else len(raw).to_bytes(4, "big") + raw), Sink()


OURS = make_certificate()


def meeting(streams, admit=lambda peer, hello: math.inf, run="r") -> Handshake:
    return Handshake(
        streams,
        Tokens(),
        lambda: Facts(run, "me", "0"),
        lambda: (["1.2.3.4:5"], []),
        OURS.pem,
        admit,
    )


def hello(**changes) -> Hello:
    good = dict(
        protocol=PROTOCOL,
        run_id="r",
        addresses=["5.6.7.8:9"],
        certificate=OURS.pem,
        token=bytes(32),
        name="you\n" + "x" * 99,
    )
    return Hello(**{**good, **changes})


async def test_a_good_greeting_yields_what_is_needed_to_call():
    met = await meeting(Scripted(HandshakeFrame(hello=hello()))).greet(B, 1.0)
    assert (met.targets, met.server_name, met.token) == (("ipv4:5.6.7.8:9",), OURS.name, "00" * 32)
    assert met.name.isprintable()
    assert len(met.name) <= 64


@pytest.mark.parametrize(
    ("reply", "said", "weight"),
    [
        (HandshakeFrame(hello=hello(protocol=PROTOCOL + 1)), f"protocol {PROTOCOL + 1}", 0),
        # Software that knows no windows: one version in its Hello, none in its Farewell.
        (HandshakeFrame(hello=hello(protocol=1)), "it speaks protocol 1,", 0),
        (HandshakeFrame(farewell=Farewell(code=ExitCode.PROTOCOL)), "it speaks protocol 1,", 0),
        (HandshakeFrame(hello=hello(run_id="other")), "run other", 0),
        (HandshakeFrame(hello=hello(run_id="")), "none", 0),
        (HandshakeFrame(hello=hello(token=b"short")), "32 bytes", 1),
        (HandshakeFrame(hello=hello(certificate=OURS.key)), "certificate", 1),
        (HandshakeFrame(hello=hello(addresses=["unix:/x:1"])), "not an address", 1),
        (HandshakeFrame(), "empty", 1),
        (b"\xff\xff\xff", "bad handshake", 1),
        (bytes(handshake.FRAME_BYTES + 1), "are allowed", 1),
    ],
)
async def test_nonsense_counts_and_strangers_do_not(reply, said, weight):
    with pytest.raises(PeerFault, match=said) as fault:
        await meeting(Scripted(reply)).greet(B, 1.0)
    assert fault.value.weight == weight


async def test_an_ended_stream_is_retried_once_and_a_farewell_is_not():
    streams = Scripted(None, HandshakeFrame(hello=hello()))
    assert (await meeting(streams).greet(B, 1.0)).peer == B
    twice = Scripted(None, None)
    with pytest.raises(PeerFault, match="broke off") as fault:
        await meeting(twice).greet(B, 1.0)
    assert (twice.opened, fault.value.weight) == (2, 0)
    farewell = HandshakeFrame()
    farewell.farewell.code = 5
    farewell.farewell.reason = "no\x1b[2Jthanks"
    with pytest.raises(PeerFault, match=r"says farewell: no \[2Jthanks"):
        await meeting(Scripted(farewell)).greet(B, 1.0)


async def test_a_handshake_is_answered_once_with_any_reason_to_refuse():
    async def answered(handshake: Handshake, said: Hello) -> tuple[HandshakeFrame, object]:
        sink = Sink()
        raw = HandshakeFrame(hello=said).SerializeToString()
        met = await handshake.answer(B, stream_of(len(raw).to_bytes(4, "big") + raw), sink)
        return HandshakeFrame.FromString(sink.data[4:]), met

    def nobody(peer, said):
        raise Refused("private")

    reply, met = await answered(meeting(None), hello())
    assert (len(reply.hello.token), met.peer) == (32, B)
    reply, met = await answered(meeting(None, nobody), hello())
    assert (reply.farewell.code, reply.farewell.reason, met) == (ExitCode.REFUSED, "private", None)
    reply, met = await answered(meeting(None), hello(run_id="other"))
    assert (reply.farewell.code, met) == (ExitCode.PROTOCOL, None)
    with pytest.raises(WireError, match="certificate"):
        await answered(meeting(None), hello(certificate=b""))
    with pytest.raises(PeerFault, match="no run"):
        await meeting(Scripted(), run="").greet(B, 1.0)


async def test_the_stream_of_a_greeting_that_is_turned_away_stays_until_its_peer_hangs_up():
    """Closing it resets it, and the peer may not have read the reason yet."""
    greeting = HandshakeFrame(hello=hello()).SerializeToString()
    reader = asyncio.StreamReader()
    writer = Sink()
    reader.feed_data(len(greeting).to_bytes(4, "big") + greeting)
    turning = asyncio.create_task(meeting(Scripted()).turn_away(reader, writer, "too often"))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not turning.done()
    reader.feed_eof()
    await turning
    assert HandshakeFrame.FromString(writer.data[4:]).farewell.reason == "too often"


@pytest.mark.parametrize("links", [{}, {B: ("/ip4/10.0.0.1/tcp/1",)}], ids=["cut off", "linked"])
async def test_a_peer_that_is_cut_off_dials_again_soon(monkeypatch, links):
    """After 15 minutes without a network it was five more until the next attempt."""
    monkeypatch.setattr(reachable, "LOOK_S", 0.0)
    now = 0.0
    tries = []
    enough = asyncio.Event()
    monkeypatch.setattr(reachable, "time", SimpleNamespace(monotonic=lambda: now))

    async def reach(peer, timeout):
        tries.append(now)
        if now > 900:
            enough.set()
        raise PeerFault(peer, "no answer")

    one = Reachable(
        SimpleNamespace(up=True, links=links, reach=reach),
        TransportSettings(host="127.0.0.1"),
        ReachSettings(),
        Journal(),
        *2 * [None],
    )
    one.learn(A, Known(("somewhere",), Standing.OPEN))
    one.start()
    while not enough.is_set():
        await asyncio.sleep(0)
        now += 1.0
    await one.close()
    pauses = [b - a for a, b in zip(tries, tries[1:], strict=False)]
    assert (max(pauses) <= reachable.CUT_OFF_S + 5) == (not links)


async def test_company_is_kept_with_those_that_can_be_dialled(monkeypatch):
    """However many known peers cannot be dialled: relays are among those that can, and reservations
    need a connection."""
    monkeypatch.setattr(reachable, "LOOK_S", 0.01)
    dialled = set()
    all_of_them = asyncio.Event()

    async def reach(peer, timeout):
        dialled.add(peer)
        if opened <= dialled:
            all_of_them.set()

    daemon = SimpleNamespace(up=True, links={}, reach=reach)
    one = Reachable(
        daemon, TransportSettings(host="127.0.0.1"), ReachSettings(), Journal(), *2 * [None]
    )
    opened = {PeerId(f"open-{n}") for n in range(100)}
    for peer in sorted(opened):
        one.learn(peer, Known(("somewhere",), Standing.OPEN))
    for n in range(200):
        one.learn(PeerId(f"closed-{n}"), Known(("somewhere",), Standing.CLOSED))
    one.start()
    async with asyncio.timeout(10):
        await all_of_them.wait()
    assert len(dialled) == reachable.COMPANY
    await one.close()


async def test_a_peer_is_called_back_at_the_address_of_its_connection_alone():
    """A punched connection comes to p2pd from this machine, whose ports are nobody's business."""

    async def look():
        return {}

    links = {A: ("/ip4/127.0.0.1/tcp/9",), B: ("/ip4/11.0.0.9/tcp/4001",)}
    daemon = SimpleNamespace(links=links, look=look, how=lambda peer: Rung.REVERSED)
    for host, found in (("", None), ("127.0.0.1", "127.0.0.1")):
        one = Reachable(
            daemon, TransportSettings(host=host), ReachSettings(), Journal(), *2 * [None]
        )
        assert await one.host(B) == "11.0.0.9"
        with pytest.raises(PeerFault, match="no libp2p connection"):
            await one.host(PeerId("never-met"))
        if found is None:
            with pytest.raises(PeerFault, match="no libp2p connection"):
                await one.host(A)
        else:
            assert await one.host(A) == found


async def test_no_port_of_this_machine_is_dialled_for_a_punched_peer(monkeypatch):
    """p2pd may listen at one address of the machine alone; punched connections come from there."""
    tried: list[str] = []

    async def accepts(host: str, port: int) -> bool:
        tried.append(host)
        return True

    monkeypatch.setattr(reachable, "own_addresses", lambda: ("11.0.0.5",))
    monkeypatch.setattr(reachable, "_accepts", accepts)
    links = {A: ("/ip4/11.0.0.5/tcp/9",), B: ("/ip4/11.0.0.9/tcp/4001",)}
    daemon = SimpleNamespace(links=links, how=lambda peer: Rung.PUNCHED)
    settings = TransportSettings(host="11.0.0.5")
    one = Reachable(daemon, settings, ReachSettings(), Journal(), *2 * [None])
    with pytest.raises(PeerFault, match="no libp2p connection"):
        await one.host(A)
    assert await one.dialled(A, [22]) == ("", [])
    # Where our p2pd has dialled, it is the peer's own address.
    assert await one.host(B) == "11.0.0.9"
    assert await one.dialled(B, [22]) == ("/ip4/11.0.0.9/tcp/4001", [22])
    assert tried == ["11.0.0.9"]


def test_one_observer_of_each_family_is_asked():
    one = Reachable(
        SimpleNamespace(links={}), TransportSettings(), ReachSettings(), Journal(), *2 * [None]
    )
    assert not one.outside().seen_by
    one._note_observer(A, ["/ip4/11.0.0.9/tcp/4001"], 0)
    one._note_observer(A, ["/ip4/192.168.1.9/tcp/4001", "/dns/example.org/tcp/1"], 7000)
    assert one.observers() == []
    one._note_observer(A, ["/ip4/11.0.0.9/tcp/4001"], 7000)
    one._note_observer(B, ["/ip6/2600::1/tcp/4001"], 7001)
    one._note_observer(PeerId("third"), ["/ip4/11.0.0.10/tcp/4001"], 7002)
    assert one.observers() == [("11.0.0.10", 7002), ("2600::1", 7001)]
    assert one.outside().seen_by


WEEK = tuple(f"2600:1:2:3::{n}" for n in range(1, 9))
"""Public IPv6 addresses of a machine that has run for a week, with one more each day."""


@pytest.fixture
def aged(monkeypatch) -> Reachable:
    """The reachability of a machine behind an IPv4 router that has run for a week."""
    own = (*WEEK, "192.168.1.5")
    monkeypatch.setattr(reachable, "own_addresses", lambda: own)
    monkeypatch.setattr(
        reachable, "address_kinds", lambda: dict.fromkeys(own, InterfaceKind.HARDWARE)
    )
    listens = [f"{multiaddr(host, 4001)}/p2p/{A}" for host in own]
    daemon = SimpleNamespace(links={}, addresses=lambda: listens, port=4001, peer_id=A)
    made = Reachable(
        daemon, TransportSettings(), ReachSettings(), Journal(), None, lambda: 5001, b""
    )
    made._reach.listens(4001, 5001)
    return made


def reported(by: str, host: str, port: int = 4001, open: bool = True) -> ReachReport:
    ports = frozenset({4001, 5001} if open else ())
    return ReachReport(PeerId(by), host, port, ports, True, time.monotonic())


def test_addresses_of_a_week_do_not_hide_the_one_behind_the_router(aged: Reachable):
    aged._reach.reported(reported("b", "11.0.0.5"))
    aged._reach.reported(reported("c", "11.0.0.5"))
    targets = aged.targets()[0]
    assert {"11.0.0.5:5001", "192.168.1.5:5001"} < set(targets[: handshake.ADDRESSES])
    hosts = [host_of(a) for a in aged.multiaddrs()]
    assert {*WEEK, "11.0.0.5", "192.168.1.5"} == set(hosts)
    for kept in (4, ADDRESSES_KEPT):
        assert {"11.0.0.5", "192.168.1.5", WEEK[0]} <= set(hosts[:kept])


def test_two_addresses_of_ipv6_are_told_for_hole_punching(aged: Reachable):
    aged._reach.reported(reported("b", "11.0.0.5", 7777))
    aged._reach.reported(reported("c", WEEK[4]))
    told = aged.seen()
    assert candidates(told) == [(WEEK[4], 4001), ("11.0.0.5", 7777), (WEEK[0], 4001)]
    assert len(told) == 3


async def test_others_hear_of_an_address_once_two_have_seen_it(aged: Reachable):
    aged._reach.reported(reported("liar", "11.0.0.66"))
    told: list[str] = []
    aged.on_change.append(lambda: told.append("changed"))
    answer = Answer(reach=ReachAnswer(seen="/ip4/11.0.0.5/tcp/4001", open=[4001, 5001]))

    async def ask(peer, question, timeout):
        return answer

    aged._ask = ask
    for peer in ("b", "c", "d"):
        await aged._be_dialled(PeerId(peer), ["/ip4/11.0.0.9/tcp/4001"])
    assert told == ["changed"] * 2, "another place is seen, and then its host is proven"
    hosts = {host_of(a) for a in aged.multiaddrs()}
    assert "11.0.0.5" in hosts
    assert "11.0.0.66" not in hosts
