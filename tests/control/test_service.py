import asyncio
import errno
import os
import socket as sockets
import stat
import threading
from pathlib import Path
from typing import Any

import grpc
import pytest

from node.control import daemons
from node.control import sockets as control_sockets
from node.control.client import ControlClient
from node.control.service import ControlService
from node.control.sockets import clear_stale, listener
from node.core.errors import ExitCode, LocalFault, NotRunning, OutOfResources, Refused, TimedOut
from node.serve.command import ControlDaemon
from protos.ask_pb2 import PeerLine, PeersAnswer
from protos.control_pb2 import Event, ExportRequest, GenerateRequest, Piece
from testbed.fakes.canned_window import CannedWindow, training_snapshot
from tests.control.conftest import ask


async def test_the_socket_is_for_its_owner_only(socket):
    assert stat.S_IMODE(socket.stat().st_mode) == 0o600


async def test_status_and_invite_arrive_whole(socket, window):
    assert await ask(socket, lambda c: c.status()) == window.said
    window.said = training_snapshot(healthy=False, reason="alone")
    assert (await ask(socket, lambda c: c.status())).reason == "alone"
    assert (await ask(socket, lambda c: c.invite())).invite == "tutti2canned"


async def test_a_refusal_keeps_its_sentence_next_step_and_exit_code(socket, window):
    with pytest.raises(LocalFault) as fault:
        await ask(socket, lambda c: c.ping("nobody"))
    assert (fault.value.what, fault.value.code) == ("no peer nobody in sight", ExitCode.REFUSED)
    assert fault.value.next_step == "see  tutti peers --all"

    def full(request: ExportRequest) -> Any:
        raise OutOfResources("disk is full: ünïcode", "free some")

    window.export = full
    with pytest.raises(LocalFault) as fault:
        await ask(socket, lambda c: list(c.export(ExportRequest(directory="/x"))))
    assert (fault.value.what, fault.value.code) == ("disk is full: ünïcode", ExitCode.RESOURCES)


async def test_an_export_ends_with_the_command_that_asked_for_it(socket, window):
    ended = asyncio.Event()

    async def export(request: ExportRequest) -> Any:
        try:
            yield Event(at=1.0, level="info", kind="export-progress", text="", fields="{}")
            await asyncio.Event().wait()
        finally:
            ended.set()

    window.export = export

    def interrupted(client: ControlClient) -> str:
        events = client.export(ExportRequest(directory="/x"))
        kind = next(events).kind
        events.close()
        return kind

    assert await ask(socket, interrupted) == "export-progress"
    await ended.wait()


async def test_an_answer_that_nobody_reads_any_more_is_ended_at_once(tmp_path, window):
    ended: list[bool] = []

    async def export(request: ExportRequest) -> Any:
        try:
            yield Event(at=1.0, level="info", kind="export-progress", text="", fields="{}")
        finally:
            ended.append(True)

    service = ControlService(window, tmp_path / "ctl.sock")
    answer = service._stream(None, export, ExportRequest())
    await anext(answer)
    await answer.aclose()  # type: ignore[attr-defined]
    assert ended == [True]


async def test_generate_streams_and_is_bounded(socket, window):
    asked: list[GenerateRequest] = []
    speak = window.generate
    window.generate = lambda request: asked.append(request) or speak(request)
    pieces = await ask(
        socket, lambda c: list(c.generate(GenerateRequest(prompt="abc", max_tokens=2_000_000_000)))
    )
    assert ("".join(p.text for p in pieces), asked[0].max_tokens) == ("ABC", 4096)


async def test_work_that_others_cancel_ends_the_answer_with_a_fault(socket, window):
    async def generate(request: GenerateRequest) -> Any:
        yield Piece(text="a")
        back = asyncio.get_running_loop().create_future()
        back.cancel()
        await back

    window.generate = generate
    with pytest.raises(LocalFault, match="gave up") as fault:
        await ask(socket, lambda c: list(c.generate(GenerateRequest(prompt="abc"), 60.0)))
    assert fault.value.code == ExitCode.NETWORK


async def test_events_give_history_then_live_each_once(socket, window):
    window.journal.emit("a", "old", "one", "debug")
    window.journal.emit("a", "old", "two")

    def follow(client: ControlClient) -> list[str]:
        told = []
        for event in client.events(follow=True, last=10):
            told.append(event.text)
            if event.text == "two":
                loop.call_soon_threadsafe(window.journal.emit, "a", "new", "three", "warning")
            if event.text == "three":
                break
        return told

    loop = asyncio.get_running_loop()
    assert await ask(socket, follow) == ["two", "three"]
    assert [e.text for e in await ask(socket, lambda c: list(c.events(last=1)))] == ["three"]
    assert [e.text for e in await ask(socket, lambda c: list(c.events(last=9, level="debug")))] == [
        "one",
        "two",
        "three",
    ]
    assert await ask(socket, lambda c: list(c.events(last=0))) == []


async def test_a_failed_drain_raises_its_fault(socket, window):
    async def late(timeout_s: float) -> None:
        raise TimedOut("still two micro-batches in flight", "tutti stop")

    window.drain = late
    with pytest.raises(LocalFault) as fault:
        await ask(socket, lambda c: list(c.drain(1.0)))
    assert fault.value.code == ExitCode.TIMED_OUT


async def test_a_second_daemon_is_refused_with_the_pid_of_the_first(socket, window):
    with pytest.raises(Refused, match=f"already running here, pid {os.getpid()}"):
        await ControlService(window, socket).start()
    assert (await ask(socket, lambda c: c.status())).peer  # the first one is unharmed


async def test_a_socket_left_by_a_dead_daemon_is_replaced(tmp_path):
    path = tmp_path / "#1?%41" / "ctl.sock"  # none of which may be taken for part of a URI
    path.parent.mkdir()
    with sockets.socket(sockets.AF_UNIX) as dead:
        dead.bind(str(path))
        dead.listen()
    assert path.exists()
    assert listener(path) is None
    service = ControlService(CannedWindow(), path)
    await service.start()
    assert (await ask(path, lambda c: c.status())).name == "brisk-otter"
    await service.close(0.1)
    assert not path.exists()


@pytest.mark.parametrize("kind", [grpc, grpc.aio], ids=["commands", "servers"])
async def test_a_daemon_that_is_back_is_asked_within_a_second(socket, monkeypatch, kind):
    seen = {}
    made = kind.insecure_channel

    def channel(target: str, options: Any) -> Any:
        seen.update(options)
        return made(target, options=options)

    monkeypatch.setattr(kind, "insecure_channel", channel)
    if kind is grpc:
        ControlClient(socket).close()
    else:
        await ControlDaemon(socket).close()
    assert seen["grpc.max_reconnect_backoff_ms"] <= 1000


@pytest.mark.parametrize("closed", [False, True])
async def test_the_daemon_of_another_user_is_not_trusted(socket, monkeypatch, closed):
    def peer(path: Path) -> tuple[int, int]:
        if closed:
            raise PermissionError(errno.EACCES, "Permission denied")
        return os.getuid() + 1, 4242

    monkeypatch.setattr(control_sockets, "_peer", peer)
    for asked in (ControlClient, clear_stale, listener):
        with pytest.raises(Refused, match="another user's"):
            asked(socket)
    assert daemons._asked(socket, socket.parent).state == daemons.FOREIGN
    assert socket.exists()


def test_a_closed_home_is_another_users(tmp_path, monkeypatch):
    def closed(path: Path) -> Any:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "lstat", closed)
    with pytest.raises(Refused, match="another user's"):
        clear_stale(tmp_path / "ctl.sock")


async def test_the_daemon_of_root_is_trusted(socket, monkeypatch):
    monkeypatch.setattr(control_sockets, "_peer", lambda path: (0, 4242))
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    assert listener(socket) == 4242


async def test_something_else_at_the_path_is_left_alone(tmp_path):
    path = tmp_path / "ctl.sock"
    path.write_text("precious")
    with pytest.raises(Refused, match="not a socket"):
        clear_stale(path)
    assert path.read_text() == "precious"


async def test_a_stopped_daemon_and_a_hanging_one_are_distinguished(tmp_path):
    window = CannedWindow()
    service = ControlService(window, tmp_path / "ctl.sock")
    await service.start()
    stuck = asyncio.Event()

    async def never() -> Any:
        await stuck.wait()

    window.snapshot = never
    hasty, client = [
        await asyncio.to_thread(ControlClient, service.path, timeout_s) for timeout_s in (0.2, 60.0)
    ]
    with pytest.raises(TimedOut):
        await asyncio.to_thread(hasty.status)
    await service.close(0.0)
    with pytest.raises(NotRunning):
        await asyncio.to_thread(client.status)
    assert await asyncio.to_thread(client.wait_gone, 60.0)
    for each in (hasty, client):
        each.close()


async def test_an_answer_larger_than_a_window_of_http2_comes_whole(socket, window):
    window.seen = PeersAnswer(
        peers=[PeerLine(peer="x" * 52, name=f"peer-{i}", state="training") for i in range(3000)]
    )
    assert await ask(socket, lambda c: c.peers(everybody=True)) == window.seen


@pytest.mark.parametrize(("says", "fault"), [(b"SSH-2.0\r\n", NotRunning), (b"", TimedOut)])
def test_a_process_that_is_no_daemon_is_not_waited_for(tmp_path, says, fault):
    with sockets.socket(sockets.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()

        def serve() -> None:
            server.accept()[0].close()  # who looks for a listener
            guests.append(server.accept()[0])
            guests[0].sendall(says)

        guests: list[sockets.socket] = []
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with ControlClient(tmp_path / "s", 0.5) as client, pytest.raises(fault):
            client.status()
        thread.join(10)
        guests[0].close()
