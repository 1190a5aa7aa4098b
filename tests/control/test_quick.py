"""One question without gRPC's client: what it brings is what gRPC's client brings, and nothing it
meets keeps it waiting."""

import asyncio
import socket as sockets
import threading
from pathlib import Path

import pytest

from node.control.client import ControlClient
from node.control.quick import MAX_ANSWER, Unanswered, _frame, unary
from node.core.errors import ExitCode, LocalFault, OutOfResources, TimedOut
from protos.ask_pb2 import PeerLine, PeersAnswer
from protos.control_pb2 import PeersRequest
from tests.control.conftest import ask

STATUS, PEERS = "/tutti.v1.Control/Status", "/tutti.v1.Control/Peers"


async def test_an_answer_larger_than_a_window_of_http2_comes_whole(socket, window):
    crowd = PeersAnswer(
        peers=[PeerLine(peer="x" * 52, name=f"peer-{i}", state="training") for i in range(3000)]
    )
    window.peers = lambda: crowd
    raw = await asyncio.to_thread(
        unary, socket, PEERS, PeersRequest(all=True).SerializeToString(), 60.0
    )
    assert len(raw) > 1 << 17
    assert PeersAnswer.FromString(raw) == crowd


async def test_a_question_may_fill_a_frame_and_no_more(socket):
    unknown = b"\x7a\x90\x4e" + b"x" * 10_000  # a field that no reader knows
    assert await asyncio.to_thread(unary, socket, STATUS, unknown, 60.0)
    with pytest.raises(Unanswered):
        unary(socket, STATUS, 2 * unknown, 60.0)


async def test_who_is_refused_asks_again_for_the_reason(socket, window):
    def full() -> None:
        raise OutOfResources("the disk is full", "free some")

    window.snapshot = full
    with pytest.raises(Unanswered):
        await asyncio.to_thread(unary, socket, STATUS, b"", 60.0)
    with pytest.raises(LocalFault, match="the disk is full") as caught:
        await ask(socket, lambda c: c.status())
    assert (caught.value.next_step, caught.value.code) == ("free some", ExitCode.RESOURCES)


def strange(path: Path, says: bytes, *, hold: bool = False) -> threading.Thread:
    """A server that says this to everybody and hangs up, or stays silent."""
    server = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
    server.bind(str(path))
    server.listen()

    def serve() -> None:
        with server:
            guest, _ = server.accept()
            with guest:
                guest.recv(1 << 16)
                guest.sendall(says)
                if hold:
                    guest.recv(1)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize(
    "says",
    [
        b"",
        b"SSH-2.0-OpenSSH\r\n" * 4,
        _frame(0, 0, 1, b"\x01\x00\x00\x00\x01x"),  # compressed, which nobody asked for
        _frame(0, 0, 1, b"\x00\xff\xff\xff\xff"),  # longer than anybody may answer
        _frame(0, 1, 1, b"\x00\x00\x00\x00\x09half"),
        _frame(0, 8, 1, b""),  # padding without its length
        _frame(7, 0, 0, bytes(8)),
    ],
)
def test_a_malformed_answer_counts_as_unanswered(tmp_path, says):
    thread = strange(tmp_path / "s", says)
    with pytest.raises(Unanswered):
        unary(tmp_path / "s", STATUS, b"", 30.0)
    thread.join(10)
    assert MAX_ANSWER < 1 << 32


def test_a_silent_daemon_times_out(tmp_path, monkeypatch):
    strange(tmp_path / "s", b"", hold=True)
    monkeypatch.setattr("node.control.client.listener", lambda path: 1)
    with pytest.raises(TimedOut), ControlClient(tmp_path / "s", 0.2) as client:
        client.status()
