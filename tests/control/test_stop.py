"""Waiting for a daemon that stops."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from node.control import commands
from node.control.client import ControlClient
from node.core.errors import NotRunning, TimedOut
from protos.control_pb2 import Event

ENDING = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("listens", flush=True)
sys.stdin.readline()
listener.close()
os.unlink(sys.argv[1])
print("closed", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that closes its socket after one line of input, and ends after another."""
    command = [sys.executable, "-c", ENDING, str(tmp_path / "s")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as made:
        yield made
        made.kill()


def tell(process: subprocess.Popen[str]) -> None:
    assert process.stdin is not None
    process.stdin.write("\n")
    process.stdin.flush()


def test_a_daemon_is_gone_when_its_process_is(tmp_path, process):
    assert process.stdout.readline() == "listens\n"
    with ControlClient(tmp_path / "s") as client:
        assert client.pid == process.pid
        tell(process)
        assert process.stdout.readline() == "closed\n"
        assert not client.wait_gone(0.0), "nobody listens, and it still runs"
        tell(process)
        # The test does not wait for its child: a parent may do so late, and the daemon is gone all
        # the same.
        assert client.wait_gone(60.0)


class Slow:
    """A daemon that is gone after some looks, and reports these messages until then."""

    pid = 4711

    def __init__(self, looks: int, *says: tuple[str, str]) -> None:
        self.looks = looks
        self.says = list(says)
        self.asked = list[Any]()

    def stop(self, *, now: bool) -> None:
        self.asked.append(now)

    def wait_gone(self, timeout_s: float) -> bool:
        self.looks -= 1
        return self.looks < 0

    def events(self, last: int) -> Iterator[Event]:
        if not self.says:
            raise NotRunning("gone")
        component, text = self.says.pop(0)
        yield Event(component=component, text=text)
        yield Event(component="transport", text="a relay is lost")


def test_a_stop_that_is_quick_says_no_more(capsys):
    assert commands.stop(Slow(0), now=False) == 0  # type: ignore[arg-type]
    assert capsys.readouterr().err == "stopped\n"


def test_a_stop_that_takes_longer_says_what_it_waits_for(capsys):
    writes = ("checkpoint", "writing stage 2 at epoch 65")
    slow = Slow(5, writes, writes, ("daemon", "saying goodbye"))
    assert commands.stop(slow, now=False) == 0  # type: ignore[arg-type]
    assert slow.asked == [False]
    assert capsys.readouterr().err.splitlines() == [
        "waiting for pid 4711 to end: writing stage 2 at epoch 65",
        "waiting for pid 4711 to end: saying goodbye",
        "waiting for pid 4711 to end",
        "stopped",
    ]


@pytest.mark.parametrize("pid", [0, 4711])
def test_a_stop_has_a_bound_and_kills_nobody(monkeypatch, pid):
    clock = iter(range(0, 10**6, 100))
    monkeypatch.setattr(commands, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(commands.os, "kill", None)
    slow = Slow(10**6)
    slow.pid = pid
    with pytest.raises(TimedOut, match="still there after 15 minutes") as fault:
        commands.stop(slow, now=False)  # type: ignore[arg-type]
    assert "tutti stop --now" in fault.value.next_step


def test_stop_now_kills_what_does_not_end(monkeypatch, capsys):
    killed: list[tuple[int, int]] = []
    monkeypatch.setattr(commands.os, "kill", lambda *how: killed.append(how))
    assert commands.stop(Slow(1), now=True) == 0  # type: ignore[arg-type]
    assert killed == [(4711, 9)]
    assert capsys.readouterr().err == "killed pid 4711\nstopped\n"
