"""The observer against a real p2pd in a process of its own, and against addresses that do not work."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from node.core.errors import ExitCode, NetworkFault, UsageFault
from node.identity.keys import Identity
from protos.ask_pb2 import Answer, Ask, AskPeers, AskPing

libp2p = pytest.importorskip("libp2p") if "hivemind" not in sys.modules else pytest.skip(
    "hivemind is loaded in this process", allow_module_level=True
)  # fmt: skip

from node.control import observer  # noqa: E402
from node.control.observer import ask, ask_first  # noqa: E402

SERVER = r"""
import asyncio, json, struct, sys
from hivemind.p2p import P2P
from protos.ask_pb2 import Answer, Ask, PeerLine, PeersAnswer, PingAnswer

async def main():
    p2p = await P2P.create(host_maddrs=("/ip4/127.0.0.1/tcp/0",), nat_port_map=False, auto_nat=False)

    async def answer(info, reader, writer):
        (size,) = struct.unpack(">I", await reader.readexactly(4))
        asked = Ask.FromString(await reader.readexactly(size))
        kind = asked.WhichOneof("question")
        if kind == "peers":
            reply = Answer(peers=PeersAnswer(peers=[PeerLine(peer=info.peer_id.to_base58(), name="caller")] * 3000))
        else:
            reply = Answer(ping=PingAnswer(nonce=asked.ping.nonce, version="1", name="calm-otter"))
        raw = reply.SerializeToString()
        frame = struct.pack(">I", len(raw)) + raw
        if asked.ping.nonce == b"silence":
            await reader.read()
            writer.close()
            return
        frame = {b"cut": frame[:-1], b"huge": struct.pack(">I", 2**31), b"noise": struct.pack(">I", 3) + b"\xff\xff\xff"}.get(
            asked.ping.nonce, frame
        )
        writer.write(frame)
        await writer.drain()
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
def observed_node() -> Iterator[str]:
    """The multiaddr of a node that answers questions. It ends when its standard input does."""
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())[0]
    finally:
        process.stdin.close()
        process.wait(20)


def ping(nonce: bytes = b"hello") -> Ask:
    return Ask(ping=AskPing(nonce=nonce))


def test_a_question_is_answered(observed_node: str) -> None:
    answer = ask(observed_node, ping(), timeout=20)
    assert (answer.ping.nonce, answer.ping.name) == (b"hello", "calm-otter")


def test_an_answer_of_many_frames_arrives_whole(observed_node: str) -> None:
    answer: Answer = ask(observed_node, Ask(peers=AskPeers()), timeout=20)
    assert len(answer.peers.peers) == 3000
    assert answer.ByteSize() > 100_000


def test_the_asker_is_who_its_seed_makes_it(observed_node: str) -> None:
    me = Identity.ephemeral()
    lines = ask(observed_node, Ask(peers=AskPeers()), timeout=20, seed=me.seed()).peers.peers
    assert {line.peer for line in lines} == {me.peer_id}
    other = ask(observed_node, Ask(peers=AskPeers()), timeout=20).peers.peers[0].peer
    assert other != me.peer_id


@pytest.mark.parametrize(
    ("nonce", "reason"),
    [(b"cut", "reading the answer"), (b"huge", "2147483648 bytes"), (b"noise", "not an Answer")],
)
def test_a_bad_answer_is_a_network_fault_with_its_reason(observed_node: str, nonce: bytes, reason: str) -> None:
    with pytest.raises(NetworkFault, match=reason) as caught:
        ask(observed_node, ping(nonce), timeout=20)
    assert caught.value.code == ExitCode.NETWORK
    assert observed_node in caught.value.what
    assert caught.value.next_step


def test_silence_ends_with_the_time_out(observed_node: str) -> None:
    with pytest.raises(NetworkFault, match="reading the answer failed: no answer within 5 s"):
        ask(observed_node, ping(b"silence"), timeout=5)


def test_a_node_that_is_somebody_else_is_not_asked(observed_node: str) -> None:
    impostor = observed_node.replace(observed_node.rsplit("/", 1)[1], STRANGER)
    with pytest.raises(NetworkFault, match="dialling failed"):
        ask(impostor, ping(), timeout=20)


def test_every_address_is_tried_and_named(observed_node: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    closed = f"/ip4/127.0.0.1/tcp/{port}/p2p/{STRANGER}"
    assert ask_first([closed, observed_node], ping(), timeout=20).ping.version == "1"
    unknown = f"/dns4/no-such-host.invalid/tcp/1/p2p/{STRANGER}"
    with pytest.raises(NetworkFault) as caught:
        ask_first([closed, unknown], ping(), timeout=20)
    assert f"{closed}: dialling failed" in caught.value.what
    assert f"{unknown}: dialling failed" in caught.value.what


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("nonsense", "not a multiaddr"),
        ("/ip4/127.0.0.1/tcp/4001", "whom to expect"),
        (f"/ip4/127.0.0.1/udp/4001/quic-v1/p2p/{STRANGER}", "plain TCP"),
        (f"/ip4/127.0.0.1/tcp/4001/p2p/{STRANGER}/p2p-circuit/p2p/{STRANGER}", "relay"),
        ("/ip4/127.0.0.1/tcp/4001/p2p/QmWrong", "not a multiaddr"),
        ("", "not a multiaddr|whom to expect"),
    ],
)
def test_an_address_that_cannot_be_dialled_is_the_users_mistake(address: str, reason: str) -> None:
    with pytest.raises(UsageFault, match=reason):
        ask(address, ping())
    with pytest.raises(UsageFault):
        ask_first([], ping())
    with pytest.raises(UsageFault, match="time-out"):
        ask(f"/ip4/127.0.0.1/tcp/4001/p2p/{STRANGER}", ping(), timeout=float("nan"))


def test_the_host_only_dials() -> None:
    host = observer._host(1.0)
    assert (host.mDNS, host.upnp, host.bootstrap) == (None, None, None)  # type: ignore[attr-defined]
    assert host.get_metrics_recv_channel() is None  # type: ignore[attr-defined]
    assert host.get_network().listeners == {}  # type: ignore[attr-defined]
    assert host.get_network()._resource_manager.prometheus_exporter is None  # type: ignore[attr-defined]
    limits = host.get_network().connection_config  # type: ignore[attr-defined]
    assert (limits.low_watermark + limits.high_watermark) // 2 == 0, "the library dials on its own up to this many"


def test_asking_leaves_no_thread_and_no_socket_behind(observed_node: str) -> None:
    import psutil

    ask(observed_node, ping(), timeout=20)
    before = threading.active_count()
    ask(observed_node, ping(), timeout=20)
    assert threading.active_count() <= before
    assert not [c for c in psutil.Process().net_connections("inet") if c.status in ("LISTEN", "ESTABLISHED")]


def test_it_refuses_to_share_a_process_with_hivemind() -> None:
    code = "import sys, types; sys.modules['hivemind'] = types.ModuleType('hivemind'); import node.control.observer"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert "a process of its own" in ended.stderr


def test_it_needs_neither_torch_nor_hivemind() -> None:
    code = "import sys, node.control.observer; print(sorted({'torch', 'hivemind', 'grpc'} & set(sys.modules)))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.stdout.strip() == "[]"
