"""The observer against a real p2pd in a process of its own, and against addresses that do not
work."""

import gc
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.control.diagnose import NobodyAnswers, verdict
from node.control.doctor import examine
from node.control.retries import Nobody, Outcome, Unanswered
from node.core.errors import ExitCode, NetworkFault, UsageFault
from node.core.ids import RunId
from node.core.version import PROTOCOLS
from node.identity.invites import Invite, endpoint_of
from node.identity.keys import Identity
from protos.ask_pb2 import Answer, Ask, AskPeers, AskPing

libp2p = pytest.importorskip("libp2p") if "hivemind" not in sys.modules else pytest.skip(
    "hivemind is loaded in this process", allow_module_level=True
)  # fmt: skip

from node.control import observer  # noqa: E402
from node.control.observer import ask_first, survey  # noqa: E402


def ask(multiaddr: str, question: Ask, **how) -> Answer:
    return ask_first([multiaddr], question, **how)


NEWER = PROTOCOLS.newest + 1
SERVER = r"""
import asyncio, json, struct, sys, time
from hivemind.p2p import P2P
from node.core.version import PROTOCOL, PROTOCOLS
from protos.ask_pb2 import Answer, Ask, PeerLine, PeersAnswer, PingAnswer, Refusal

NEWER = PROTOCOLS.newest + 1

async def main():
    ends = ("tcp/0", "udp/0/quic-v1")
    hosts = [f"/{ip}/{end}" for ip in ("ip4/127.0.0.1", "ip6/::1") for end in ends]
    p2p = await P2P.create(host_maddrs=hosts, nat_port_map=False, auto_nat=False)

    async def answer(info, reader, writer):
        (size,) = struct.unpack(">I", await reader.readexactly(4))
        asked = Ask.FromString(await reader.readexactly(size))
        kind = asked.WhichOneof("question")
        if kind == "peers":
            line = PeerLine(peer=info.peer_id.to_base58(), name="caller")
            reply = Answer(peers=PeersAnswer(peers=[line] * 3000))
        elif kind == "manifest":
            reply = Answer(oldest_protocol=NEWER, newest_protocol=NEWER + 1, version="9")
            reply.manifest.toml = b"format = 99"
        elif asked.ping.nonce == b"busy":
            reply = Answer(refusal=Refusal(code=7, reason="busy", again_s=6.0, place=17))
        elif asked.ping.nonce == b"no":
            reply = Answer(refusal=Refusal(code=5, reason="not for you"))
        else:
            now = time.time() + 100
            pong = PingAnswer(nonce=asked.ping.nonce, version="1", name="calm-otter", time=now)
            reply = Answer(ping=pong)
        if not reply.oldest_protocol:
            reply.oldest_protocol, reply.newest_protocol = PROTOCOLS.oldest, PROTOCOLS.newest
        if asked.ping.nonce == b"newer":
            reply.oldest_protocol, reply.newest_protocol, reply.version = NEWER, NEWER + 1, "9"
        raw = reply.SerializeToString()
        frame = struct.pack(">I", len(raw)) + raw
        if asked.ping.nonce == b"silence":
            await reader.read()
            writer.close()
            return
        damaged = {b"cut": frame[:-1], b"huge": struct.pack(">I", 2**31)}
        damaged[b"noise"] = struct.pack(">I", 3) + b"\xff\xff\xff"
        frame = damaged.get(asked.ping.nonce, frame)
        writer.write(frame)
        await writer.drain()
        if asked.ping.nonce != b"cut":
            await reader.read(1)  # as the daemon does: see node/transport/frames.py
        writer.close()

    await p2p.add_binary_stream_handler("/tutti/ask/1", answer)
    addresses = [str(a) + "/p2p/" + p2p.peer_id.to_base58() for a in await p2p.get_visible_maddrs()]
    addresses = [a if a.count("/p2p/") == 1 else a[: a.rindex("/p2p/")] for a in addresses]
    print(json.dumps(addresses), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await p2p.shutdown()

asyncio.run(main())
"""

STRANGER = "12D3KooWGQmdpbHXA4BTXpaGrFWCrgJMJhdGbyBQrT9HqGRbYs5B"


@pytest.fixture(scope="module")
def observed_places() -> Iterator[dict[str, str]]:
    """Multiaddrs of a node that answers questions, by IP version and transport: "4/tcp", "6/udp".
    The node ends when its standard input does."""
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        addresses = json.loads(process.stdout.readline())
        yield {
            f"{words[1][-1]}/{words[3]}": address
            for address in addresses
            if (words := address.split("/"))
        }
    finally:
        process.stdin.close()
        process.wait(20)


@pytest.fixture(scope="module")
def observed_node(observed_places: dict[str, str]) -> str:
    return observed_places["4/tcp"]


@pytest.fixture
def closed() -> str:
    """An address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        return f"/ip4/127.0.0.1/tcp/{gone.getsockname()[1]}/p2p/{STRANGER}"


@pytest.fixture
def mute() -> Iterator[str]:
    """An address that takes connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}/p2p/{STRANGER}"


@pytest.fixture
def in_time() -> Iterator[None]:
    """Assert that a test which allows a minute takes less than 30 s: nothing waits for addresses
    that are not needed, nor for other addresses of a peer that has refused."""
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < 30


def ping(nonce: bytes = b"hello") -> Ask:
    return Ask(ping=AskPing(nonce=nonce))


def test_the_asker_is_who_its_seed_makes_it(observed_node: str) -> None:
    me = Identity.ephemeral()
    lines = ask(observed_node, Ask(peers=AskPeers()), timeout=20, seed=me.seed()).peers.peers
    assert {line.peer for line in lines} == {me.peer_id}
    other = ask(observed_node, Ask(peers=AskPeers()), timeout=20).peers.peers[0].peer
    assert other != me.peer_id


@pytest.mark.parametrize("place", ["4/tcp", "4/udp", "6/tcp", "6/udp"])
def test_tcp_and_quic_of_both_ip_versions_carry_long_answers(
    observed_places: dict[str, str], place: str
) -> None:
    for _ in range(3):
        answer: Answer = ask(observed_places[place], Ask(peers=AskPeers()), timeout=20)
        assert len(answer.peers.peers) == 3000
        assert answer.ByteSize() > 100_000


@pytest.mark.parametrize("place", ["4/tcp", "4/udp"])
def test_a_name_is_looked_up(observed_places: dict[str, str], place: str) -> None:
    named = observed_places[place].replace("ip4/127.0.0.1", "dns/localhost")
    said = ask(named, ping(), timeout=20).ping
    assert (said.nonce, said.name, said.version) == (b"hello", "calm-otter", "1")


@pytest.mark.parametrize(
    ("nonce", "reason"),
    [
        (b"cut", "the answer did not come"),
        (b"huge", "2147483648 bytes"),
        (b"noise", "ends inside a field"),
    ],
)
def test_a_bad_answer_is_a_network_fault_with_its_reason(
    observed_node: str, nonce: bytes, reason: str
) -> None:
    with pytest.raises(NetworkFault, match=reason) as caught:
        ask(observed_node, ping(nonce), timeout=20)
    assert caught.value.code == ExitCode.NETWORK
    assert observed_node in caught.value.what
    assert caught.value.next_step


@pytest.mark.parametrize("place", ["4/tcp", "4/udp"])
def test_silence_ends_with_the_time_out(observed_places: dict[str, str], place: str) -> None:
    with pytest.raises(
        NetworkFault, match="connected, but the question is not answered within 5[.0-9]* s"
    ):
        ask(observed_places[place], ping(b"silence"), timeout=5)


def test_a_sign_of_life_is_told_from_nobody(
    observed_node: str, mute: str, closed: str, in_time: None
) -> None:
    def outcome(address: str, nonce: bytes = b"") -> Outcome:
        with pytest.raises(NobodyAnswers) as caught:
            ask(address, ping(nonce), timeout=6)
        return caught.value.outcome

    for nonce in (b"silence", b"cut", b"noise"):
        found = outcome(observed_node, nonce)
        assert isinstance(found, Unanswered)
        assert found.proven
    found = outcome(mute)
    assert isinstance(found, Unanswered)
    assert not found.proven
    assert outcome(closed) == Nobody(refused=True)
    assert outcome(observed_node.replace(observed_node[-52:], STRANGER)) == Nobody(final=True)


def test_of_refusals_the_one_that_says_when_to_ask_again_counts(observed_places) -> None:
    places = [observed_places["4/tcp"], observed_places["6/tcp"]]
    answer = ask_first(places, ping(b"busy"), timeout=20)
    assert (answer.refusal.again_s, answer.refusal.place) == (6.0, 17)


def test_a_listener_that_stays_silent_is_not_a_peer(mute: str) -> None:
    with pytest.raises(NetworkFault, match="does not prove who it is within 1[.0-9]* s"):
        ask(mute, ping(), timeout=1)


@pytest.mark.parametrize("place", ["4/tcp", "4/udp", "6/udp"])
def test_a_node_that_is_somebody_else_is_not_asked(
    observed_places: dict[str, str], place: str
) -> None:
    address = observed_places[place]
    impostor = address.replace(address.rsplit("/", 1)[1], STRANGER)
    with pytest.raises(NetworkFault, match="somebody else answers there"):
        ask(impostor, ping(), timeout=20)


def test_another_service_at_the_address_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            stranger, _ = server.accept()
            with stranger:
                stranger.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(NetworkFault, match="a web server answers there") as caught:
            ask(f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}/p2p/{STRANGER}", ping(), timeout=20)
        assert caught.value.code is ExitCode.OTHER_SERVICE
        assert "delimited" not in caught.value.what
        assert str(server.getsockname()[1]) in caught.value.next_step


def test_every_address_that_failed_is_named_with_its_reason(closed: str) -> None:
    unknown = f"/dns4/no-such-host.invalid/tcp/1/p2p/{STRANGER}"
    relayed = f"/ip4/127.0.0.1/tcp/4001/p2p/{STRANGER}/p2p-circuit/p2p/{STRANGER}"
    strange = f"/ip4/127.0.0.1/tcp/4001/ws/p2p/{STRANGER}"
    with pytest.raises(NetworkFault) as caught:
        ask_first([closed, unknown, relayed, strange], ping(), timeout=20)
    assert f"{closed}: connection refused" in caught.value.what
    assert f"{unknown}: the name no-such-host.invalid" in caught.value.what
    assert f"{relayed}: not tried: it leads through a relay" in caught.value.what
    assert f"{strange}: not tried" in caught.value.what
    listed = caught.value.details["findings"]
    assert {f["address"]: f["layer"] for f in listed} == {
        closed: "connect",
        unknown: "name",
        relayed: "address",
        strange: "address",
    }
    assert json.loads(json.dumps(listed)) == listed


def test_a_closed_port_has_its_own_code(closed: str) -> None:
    for address in (closed, closed.replace("/p2p/", "/quic-v1/p2p/").replace("tcp", "udp")):
        with pytest.raises(NetworkFault, match="nobody listens") as caught:
            ask(address, ping(), timeout=20)
        assert caught.value.code is ExitCode.PORT_CLOSED
        assert address.split("/")[4] in caught.value.next_step


@pytest.mark.usefixtures("in_time")
def test_all_addresses_are_tried_at_once_until_a_good_answer(
    observed_places: dict[str, str], closed: str, mute: str
) -> None:
    places = [mute, closed, observed_places["4/tcp"]]
    assert ask_first(places, ping(), timeout=60).ping.version == "1"


@pytest.mark.usefixtures("in_time")
def test_quic_is_used_where_tcp_does_not_answer(
    observed_places: dict[str, str], closed: str, mute: str
) -> None:
    for tcp in (mute, closed):
        assert ask_first([tcp, observed_places["4/udp"]], ping(), timeout=60).ping.version == "1"


def test_quic_is_left_alone_where_libp2p_speaks_at_the_tcp_address(
    observed_places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that is slow to answer over TCP is not asked over QUIC as well."""
    monkeypatch.setattr(observer, "QUIC_AFTER_S", 4.0)
    places = [observed_places["4/tcp"], observed_places["4/udp"]]
    with pytest.raises(NobodyAnswers) as failure:
        ask_first(places, ping(b"silence"), timeout=6)
    over_tcp, over_quic = failure.value.findings
    assert over_tcp.alive
    assert "not tried" in over_quic.cause


@pytest.mark.usefixtures("in_time")
def test_a_refusal_is_an_answer_but_not_a_good_one(
    observed_places: dict[str, str], mute: str
) -> None:
    place = observed_places["4/tcp"]
    same = mute.replace(STRANGER, place.rsplit("/", 1)[1])
    assert ask_first([place, same], ping(b"no"), timeout=60).refusal.reason == "not for you"
    assert not survey([place], [ping(b"no")], 20)[0].good


@pytest.mark.usefixtures("in_time")
def test_a_survey_waits_briefly_after_the_first_answer(
    observed_places: dict[str, str], closed: str, mute: str
) -> None:
    places = [*observed_places.values(), closed, mute]
    heard = survey(places, [ping(), Ask(peers=AskPeers())], 60)
    assert [h.finding.address for h in heard] == places
    assert [h.finding.layer for h in heard] == [*["answer"] * 4, "connect", "proof"]
    assert [h.finding.ok for h in heard] == [True] * 4 + [False] * 2
    for one in heard[:4]:
        assert one.finding.clock_s == pytest.approx(-100, abs=30)
        assert len(one.answers[1].peers.peers) == 3000
    assert verdict([h.finding for h in heard]).code is ExitCode.CLOCK_WRONG


def test_an_examination_compares_clocks(observed_places: dict[str, str], mute: str) -> None:
    for first in (True, False):
        found = examine([mute, observed_places["4/tcp"]], first=first, seconds=60)
        assert found.verdict.exit_code is ExitCode.CLOCK_WRONG
        assert found.clock_s == pytest.approx(-100, abs=30)
        # Though the first answer is enough, the others are asked all the same when that peer's
        # clock differs.
        assert [f.ok for f in found.findings] == ([True, False] if first else [False, True])


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("nonsense", "not a multiaddr"),
        ("/ip4/127.0.0.1/tcp/4001", "does not say which peer"),
        ("/ip4/127.0.0.1/tcp/4001/p2p/QmWrong", "does not end in a PeerId"),
        ("", "not a multiaddr"),
    ],
)
def test_an_address_of_no_peer_is_the_users_mistake(address: str, reason: str) -> None:
    with pytest.raises(UsageFault, match=reason):
        ask(address, ping())
    with pytest.raises(UsageFault):
        ask_first([], ping())


@pytest.mark.parametrize(
    ("greeting", "says"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "an SSH server"),
        (b"\x15\x03\x01\x00\x02\x02\x46", "gRPC port of a peer"),
        (b"welcome", "another service"),
        (b"", ""),
        (b"\x13/multistream/1.0.0\n", ""),
    ],
)
def test_a_greeting_distinguishes_a_peer_from_another_service(greeting: bytes, says: str) -> None:
    found = observer.other_service(f"/ip4/127.0.0.1/tcp/22/p2p/{STRANGER}", greeting)
    assert (found is not None) == bool(says)
    if found is not None:
        assert found.code is ExitCode.OTHER_SERVICE
        assert says in found.cause
        assert "port 22" in found.fix


@pytest.mark.parametrize(
    ("layer", "why", "code", "says"),
    [
        ("proof", "Peer ID mismatch: expected A, got B", ExitCode.NETWORK, "somebody else"),
        ("proof", "Certificate not yet valid", ExitCode.CLOCK_WRONG, "clock"),
        ("proof", "Certificate has expired", ExitCode.CLOCK_WRONG, "clock"),
        ("proof", "boom", ExitCode.NETWORK, "hangs up before it has proven who it is (boom)"),
        ("answer", "stream \x1b[31mreset", ExitCode.NETWORK, "did not come: stream  [31mreset"),
    ],
)
def test_a_conversation_that_breaks_off_is_put_into_words(
    layer: str, why: str, code: ExitCode, says: str
) -> None:
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{STRANGER}"
    place = endpoint_of(address)
    assert place is not None
    for greeted in (False, True):
        trial = observer._Trial(address, place, "127.0.0.1", 0.0, layer, greeted)
        found = observer._broke(trial, why)
        assert (found.layer, found.code, found.ok) == (layer, code, False)
        assert says in found.cause
        # A peer that speaks libp2p and hangs up because it has too much to do.
        assert found.alive == (layer == "answer" or (greeted and why == "boom"))


def test_the_host_only_dials() -> None:
    host = observer._host(1.0)
    assert (host.mDNS, host.upnp, host.bootstrap) == (None, None, None)  # type: ignore
    assert host.get_metrics_recv_channel() is None  # type: ignore[attr-defined]
    assert host.get_network().listeners == {}  # type: ignore[attr-defined]
    assert host.get_network()._resource_manager.prometheus_exporter is None  # type: ignore
    limits = host.get_network().connection_config  # type: ignore[attr-defined]
    assert (limits.low_watermark + limits.high_watermark) // 2 == 0, (
        "the library dials on its own up to this many"
    )


def test_asking_leaves_no_thread_and_no_socket_behind(observed_places: dict[str, str]) -> None:
    import psutil

    places = list(observed_places.values())
    survey(places, [ping()], 20)
    gc.collect()  # connections of earlier tests that timed out
    before = threading.active_count()
    survey(places, [ping()], 20)
    ask(observed_places["4/udp"], ping(), timeout=20)
    assert threading.active_count() <= before
    mine = psutil.Process().net_connections("inet")
    assert not [
        c for c in mine if c.status in ("LISTEN", "ESTABLISHED") or c.type == socket.SOCK_DGRAM
    ]


def test_join_ends_with_what_a_newer_swarm_needs(
    observed_node: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import cli

    invite = Invite(RunId("ab" * 32), Identity.ephemeral().peer_id, (observed_node,)).encode()
    code = cli.main(["--home", str(tmp_path), "join", invite, "--yes", "--no-start"])
    said = capsys.readouterr().err
    assert code == ExitCode.PROTOCOL
    assert f"speaks protocols {NEWER} to {NEWER + 1}" in said
    assert "update this tutti" in said
    assert not (tmp_path / "swarms").exists()


@pytest.mark.parametrize(
    ("before", "code", "says"),
    [
        ("sys.modules['hivemind'] = types.ModuleType('hivemind')", 1, "a process of its own"),
        ("pass", 0, "[]"),
    ],
)
def test_it_shares_no_process_with_hivemind_and_needs_no_torch(
    before: str, code: int, says: str
) -> None:
    program = (
        f"import sys, types; {before}; import node.control.observer; "
        "print(sorted({'torch', 'hivemind', 'grpc'} & set(sys.modules)))"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == code
    assert says in ended.stdout + ended.stderr
