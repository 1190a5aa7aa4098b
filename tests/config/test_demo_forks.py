"""The demo's process that forks daemons, where it does not answer, and the text that it has the
model write."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from node.app.demo import forks as module
from node.app.demo import page, play, writing
from node.app.demo.daemons import DemoOptions, DemoSwarm
from node.app.demo.forks import LARGEST, ForkedChild, Forks
from node.app.demo.page import DemoPage
from node.app.demo.play import Demo, DemoOutcome
from node.app.demo.writing import Writer
from node.app.launch import Child
from node.core.errors import LocalFault, TimedOut
from protos.control_pb2 import GenerateRequest, Piece, Snapshot

SILENT = "import time; time.sleep(600)"
"""A process that forks nothing and says nothing."""


class Answering(Forks):
    """The answers of a process that forks, given by the test at ``theirs``."""

    def __init__(self, program: str = SILENT) -> None:
        super().__init__()
        self.program = program

    def server_command(self, door: int) -> list[str]:
        return [sys.executable, "-I", "-S", "-c", self.program, str(door)]

    def answer(self, pid: int, code: int | None) -> None:
        """Say this as the process that forks."""
        if self._socket is None:
            self._socket, self.theirs = socket.socketpair(type=socket.SOCK_SEQPACKET)
            self._server = subprocess.Popen([sys.executable, "-I", "-S", "-c", SILENT])
        self.theirs.send(json.dumps([pid, code]).encode())


@pytest.fixture
def forks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Answering]:
    monkeypatch.setattr(module, "ANSWER_S", 0.2)
    made = Answering()
    yield made
    made.close()


def test_a_process_that_forks_and_does_not_answer_is_given_up(forks, tmp_path):
    with pytest.raises(TimedOut, match="did not answer"):
        forks.start(["--version"], tmp_path / "out", {})
    with pytest.raises(OSError, match="has ended"):
        forks.start(["--version"], tmp_path / "out", {})


def test_a_request_that_is_too_large_starts_a_process_of_its_own(forks, tmp_path, monkeypatch):
    with pytest.raises(OSError, match="of environment|environment of") as raised:
        forks.start([], tmp_path / "out", {"LONG": "x" * LARGEST})
    assert raised.value.errno == errno.E2BIG
    plain: list[list[str]] = []
    monkeypatch.setattr(Child, "launch", lambda child, words, environment: plain.append(words))
    child = ForkedChild("one", tmp_path, (), forks=forks)
    child.launch(["start"], {"LONG": "x" * LARGEST})
    assert plain == [["start"]]


def test_a_signal_to_a_process_that_is_gone_is_none(forks):
    gone = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""])
    gone.wait()
    forks.answer(gone.pid, None)
    process = module.Forked(forks, gone.pid, [])
    process.send_signal(signal.SIGTERM)
    forks.answer(gone.pid, 3)
    assert process.poll() == 3


def test_the_wait_for_an_end_is_bounded(forks):
    forks.answer(os.getpid(), None)
    process = module.Forked(forks, os.getpid(), [])
    with pytest.raises(TimedOut, match="has not ended"):
        process.wait()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.0)


# ------------------------------------------------------------------ samples


class Swarm:
    """A demo's swarm with one daemon, whose ``running`` only the thread of the test may ask for."""

    def __init__(self, *pieces: str) -> None:
        self.manifest: Any = type("M", (), {"training": type("T", (), {"epochs": 8})})
        self.asked: list[tuple[GenerateRequest, float]] = []
        self.pieces = pieces
        self.runs = True
        self._thread = threading.get_ident()

    def chief(self) -> str:
        assert threading.get_ident() == self._thread, "Forks is asked by one thread alone"
        if not self.runs:
            raise LocalFault("every daemon at the ends has ended", "")
        return "ends-0"

    @contextmanager
    def client(self, label: str) -> Iterator["Swarm"]:
        yield self

    def generate(self, request: GenerateRequest, timeout_s: float) -> Iterator[Piece]:
        self.asked.append((request, timeout_s))
        for text in self.pieces:
            yield Piece(text=text)
        if not self.pieces:
            raise TimedOut("late", "")


def test_a_sample_has_few_tokens_and_its_thread_asks_no_process():
    swarm: Any = Swarm("a", "b")
    writer = Writer(swarm)
    writer.reached(1)
    writer.wait(10.0)
    assert [one.text for one in writer.written] == ["ab"]
    assert swarm.asked[0][0].max_tokens == 48
    assert writing.SHARE <= 0.15


def test_no_sample_is_taken_where_no_daemon_runs():
    swarm: Any = Swarm("a")
    swarm.runs = False
    writer = Writer(swarm)
    writer.reached(1)
    writer.wait(10.0)
    assert not writer.written
    assert not swarm.asked


def test_the_last_text_takes_no_longer_than_the_samples_let_expect(monkeypatch, capsys):
    swarm: Any = Swarm("a")
    writer = Writer(swarm)
    assert writer.longest_s(100) == 3 * 0.25 * 100, "none was measured"
    times = iter([0.0, 0.0, 48.0])
    clock = SimpleNamespace(monotonic=lambda: next(times, 48.0))
    monkeypatch.setattr(writing, "time", clock)  # of this module alone: other threads read it too
    writer.reached(1)
    writer.wait(10.0)
    assert writer.longest_s(100) == 3 * 1.0 * 100
    assert writer.longest_s(1) == 10.0
    demo = Demo.__new__(Demo)
    demo.swarm = swarm
    demo.writer = writer
    assert demo._last_sample() == "a"
    assert swarm.asked[-1][1] == 3 * play.SAMPLE_TOKENS
    swarm.pieces = ()
    assert demo._last_sample() == "", "the time is over"


def test_a_demo_whose_ends_are_gone_says_so_at_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(play, "POLL_S", 0.0)
    swarm = DemoSwarm(tmp_path, DemoOptions((1, 1)))
    monkeypatch.setattr(swarm, "poll", lambda: [Snapshot(role="ends", state="lost")])
    demo = Demo(swarm, DemoOutcome(1), time.monotonic(), DemoPage("never"))
    with pytest.raises(LocalFault, match="no daemon at the ends"):
        demo._finish()
    with pytest.raises(LocalFault, match="has ended"):
        demo._last_sample()


# ------------------------------------------------------------------ the browser


def test_a_browser_that_does_not_return_holds_up_nobody(monkeypatch: pytest.MonkeyPatch):
    closed = threading.Event()
    opened = threading.Event()

    def open_and_wait(address: str) -> None:
        opened.set()
        closed.wait(60)

    shown = DemoPage("never")
    with socket.create_server(("127.0.0.1", 0)) as server:
        shown._show = True
        shown._process = subprocess.Popen([sys.executable, "-I", "-S", "-c", SILENT])
        shown._port = server.getsockname()[1]
        monkeypatch.setattr(page.webbrowser, "open", open_and_wait)
        shown.look()
        assert opened.wait(60)
        assert not closed.is_set()
        closed.set()
        shown.close()
